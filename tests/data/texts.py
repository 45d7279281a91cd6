"""Small texts to cut and count."""

from __future__ import annotations

import random
from pathlib import Path

WORDS = "the weight is cut into slices and gathered just before use then dropped again ünïcode 文字".split()


def document(seed: int, words: int = 120) -> str:
    """A document of some 700 bytes."""
    return " ".join(random.Random(seed).choices(WORDS, k=words)) + "\n"


def write_documents(root: Path, count: int = 40) -> Path:
    """A directory of text files, some of them in a sub-directory."""
    for i in range(count):
        folder = root / "deeper" if i % 3 == 0 else root
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i:03d}.txt").write_text(document(i), encoding="utf-8")
    return root
