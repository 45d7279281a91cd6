"""A mistake that somebody could make in the package."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
PACKAGE = CHECKOUT / "gtp_jax"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one place.

    Attributes:
        name: what is wrong, in a few words.
        old: text that stands once in the whole package, in whichever file.
        new: what takes its place.
        tests: that fail then, as pytest is given them. They are in the default tier.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]

    def places(self) -> list[Path]:
        """Returns the file of every occurrence."""
        return [path for path, text in _texts().items() for _ in range(text.count(self.old))]


@functools.cache
def _texts() -> dict[Path, str]:
    return {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
