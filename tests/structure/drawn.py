"""Draws docstrings, comments and messages of a folder at random, to be judged by a reader.

python -m tests.structure.drawn gtp_jax/weights --count 40 --seed 1
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Calls and keywords whose texts users read.
_SAYS = {"ValueError", "TypeError", "RuntimeError", "OSError", "ImportError", "warn", "print", "add_argument", "knob"}


class Prose(NamedTuple):
    """A piece of prose, with its kind and where it is."""

    where: str
    kind: str
    text: str


def prose_of(path: Path) -> Iterator[Prose]:
    """Yields the docstrings, comments and messages of a file."""
    source = path.read_text()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield Prose(f"{path}:{getattr(node, 'lineno', 1)}", "docstring", text)
        if isinstance(node, ast.Call) and (ast.unparse(node.func).rsplit(".", 1)[-1] in _SAYS):
            for value in (*node.args, *(word.value for word in node.keywords)):
                text = _text(value)
                if len(text.split()) >= 4:
                    yield Prose(f"{path}:{value.lineno}", "message", text)
    for block in re.finditer(r"(?m)^[ \t]*#.*\n(?:[ \t]*#.*\n)*", source):
        text = " ".join(line.strip().lstrip("# ") for line in block[0].splitlines())
        if len(text.split()) >= 4:
            yield Prose(f"{path}:{source[: block.start()].count(chr(10)) + 1}", "comment", text)


def _text(node: ast.expr) -> str:
    """Returns the text of a literal or an f-string, with `{...}` for its values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = (f"{{{ast.unparse(p.value)}}}" if isinstance(p, ast.FormattedValue) else _text(p) for p in node.values)
        return "".join(parts)
    return ""


def main() -> None:
    """Prints the pieces that are drawn, numbered."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("folder", type=Path, help="a folder; files in folders below it count too")
    flags.add_argument("--count", type=int, default=40, help="how many to draw (default: 40)")
    flags.add_argument("--seed", type=int, default=0, help="the seed of the choice (default: 0)")
    args = flags.parse_args()
    found = [prose for path in sorted(args.folder.rglob("*.py")) for prose in prose_of(path)]
    drawn = random.Random(args.seed).sample(found, min(args.count, len(found)))
    for number, prose in enumerate(drawn, 1):
        print(f"{number}. {prose.where} ({prose.kind})\n{textwrap.indent(prose.text, '    ')}\n")


if __name__ == "__main__":
    main()
