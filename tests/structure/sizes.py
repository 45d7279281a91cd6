"""Counts lines of code, without docstrings, comments and blank lines, and says of which files.

    python -m tests.structure.sizes           # totals, and every room
    python -m tests.structure.sizes --files   # every file as well

A room is a folder of the package, wherever it lies: one that moves into another is still counted by its name. Files at
the top of the package are a room of their own, `.`.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "gtp_jax"
# The library: what a step is made of. Models, reports on programs, the runner and benchmarks are beside it.
CORE = (
    *("mesh", "native", "formats", "layout", "ops", "recipes", "collectives", "checkpoint"),
    *(
        "weights",
        "chain",
        "variables",
        "hook",
        "nn",
        "experts",
        "nonuniform",
        "optimizers",
        "train",
    ),  # nn asks hook for what `shard` has sharded
)
OTHERS = ("models", "generation", "hlo", "inspect", "convert", "runner", "cli", "elastic", "trainer", "data")
BENCHMARKS = ("bench", "benchmarks")  # and the command's own files of them, `_bench*.py`
# What happens to a weight from its constructor to its gradient: a room, and files of others as long as they are there.
LIFE_OF_A_WEIGHT = {
    "weights": None,
    "collectives": ("_bits.py", "_replicas.py", "_split.py"),
    "layout": ("_layout.py",),
    "nn": ("_array.py", "_frozen.py", "_owners.py", "_quantized.py", "_stages.py", "_weight.py"),
}

_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def code_lines(source: str) -> int:
    """Returns the number of lines on which there is code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            lines -= set(range(doc.lineno, (doc.end_lineno or doc.lineno) + 1))
    return len(lines)


def room_of(path: Path, package: Path = PACKAGE) -> str:
    """Returns the room of a file: the innermost folder on its way that has one of the names above, else the outermost
    folder."""
    if path.name.startswith("_bench"):
        return BENCHMARKS[0]
    folders = path.relative_to(package).parts[:-1]
    known = [name for name in folders if name in (*CORE, *OTHERS, *BENCHMARKS)]
    return known[-1] if known else folders[0] if folders else "."


def files_by_room(package: Path = PACKAGE) -> dict[str, list[Path]]:
    """Returns the files of every room, lower rooms first."""
    found: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        found.setdefault(room_of(path, package), []).append(path)
    order = [*CORE, ".", *OTHERS]
    return dict(sorted(found.items(), key=lambda one: (*order, one[0]).index(one[0])))


def life_of_a_weight(package: Path = PACKAGE) -> list[Path]:
    """Returns the files of the table that are there."""
    rooms = files_by_room(package)
    return [
        path
        for room, names in LIFE_OF_A_WEIGHT.items()
        for path in rooms.get(room, [])
        if names is None or path.name in names
    ]


def lines_of(files: Iterable[Path]) -> int:
    """Returns the lines of code of several files."""
    return sum(code_lines(path.read_text()) for path in files)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.structure.sizes", description=__doc__.split("\n")[0])
    parser.add_argument("--files", action="store_true", help="show every file")
    parser.add_argument("--package", type=Path, default=PACKAGE, help="another copy of gtp_jax")
    args = parser.parse_args()
    rooms = files_by_room(args.package)
    life = life_of_a_weight(args.package)
    totals = {
        "life of a weight": life,
        "core": [path for room in CORE for path in rooms.get(room, [])],
        "package without benchmarks": [path for room in rooms if room not in BENCHMARKS for path in rooms[room]],
        "package": [path for files in rooms.values() for path in files],
    }
    for title, table in (("", totals), ("room", {**rooms, "of which the life of a weight": life})):
        print(f"{title:30} {'lines':>6} {'files':>6}")
        for name, files in table.items():
            print(f"{name:30} {lines_of(files):6,} {len(files):6}{'  core' if name in CORE else ''}")
            if args.files and table is not totals:
                for path in files:
                    print(f"    {path.relative_to(args.package).as_posix():40} {lines_of([path]):6,}")
        print()


if __name__ == "__main__":
    main()
