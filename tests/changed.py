"""Prints and runs the slow and full tests that a change needs: those of the rooms it touches, and of rooms above them.

    python -m tests.changed                    # since the commit in .ci/landed; uncommitted files count
    python -m tests.changed --base main~3 --list
    python -m tests.changed --above 0 --most 80 --within 240
    python -m tests.changed --part 2/8         # other arguments go to pytest

A room is a package of `gtp_jax` or of `gtp_jax/runner`, or `benchmarks`; who imports whom is read by grimp. A module
outside of rooms counts for the rooms that import it, and a helper of tests for the folders whose tests import it.
"""

from __future__ import annotations

import argparse
import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import grimp

CHECKOUT = Path(__file__).parents[1]
TESTS = Path(__file__).parent
LANDED = CHECKOUT / ".ci" / "landed"
BENCHMARKS = "benchmarks"
# Folders of tests without a room of their name, and the rooms that they test. Others test the room of their name.
TESTED = {
    "bench": {BENCHMARKS},
    "cli": {"cli", "flags"},
    "elsewhere": {"hook"},
    "hosts": {"launch", "trainer"},
    "hostile": {"cli", "trainer", "elastic", "data", "convert", "checkpoint"},
    "interop": {"convert", "models", "hook", "checkpoint"},
    "meaning": {"hook", "nn", "train", "chain", "weights", "variables"},
    "oldest": set(),
    "parity": {"nn", "chain", "weights", "layout", "train", "models"},
    "reliability": {"trainer", "elastic", "checkpoint"},
    "trainer": {"trainer", "flags"},
    "docs": set(),
    "mutants": set(),
    "structure": set(),
}


def room_of(module: str) -> str | None:
    """Returns the room of a module or file, by its name with dots; nothing for files at the top of the package."""
    root, *names = module.split(".")
    if root == BENCHMARKS:
        return root
    names = names[1:] if names[:1] == ["runner"] else names
    return names[0] if root == "gtp_jax" and names and not names[0].startswith("_") else None


def importers() -> dict[str, set[str]]:
    """Returns, for each room and for each module outside of rooms, the rooms that import it."""
    graph = grimp.build_graph("gtp_jax", BENCHMARKS)
    found: dict[str, set[str]] = {}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            above, below = room_of(module), room_of(imported) or imported
            if above and above != below:
                found.setdefault(below, set()).add(above)
    return found


def with_those_above(rooms: Iterable[str], importers: Mapping[str, set[str]], steps: int) -> list[str]:
    """Returns rooms and those that import them in so many steps: the touched ones first, then the nearest."""
    nearest = sorted(set(rooms))
    for _ in range(steps):
        above = functools.reduce(set.union, (importers.get(room, set()) for room in nearest), set())
        nearest += sorted(above - set(nearest))
    return nearest


def rooms_of(files: Iterable[str], importers: Mapping[str, set[str]]) -> set[str]:
    """Returns the rooms of files of the packages, also of those that are gone, and of `ffi`, which `native` calls."""
    rooms = set()
    for module in {".".join(Path(file).with_suffix("").parts) for file in files}:
        room = "native" if module.startswith("ffi.") else room_of(module)
        rooms |= {room} if room else importers.get(module, set())
    return rooms


def with_those_that_import(files: Iterable[str]) -> set[str]:
    """Returns files, the files of tests that import one of them, and so on, and those to which a `conftest.py` among
    them applies."""
    imported = _imported_by_tests()
    found, new = set[str](), set(files)
    while new:
        found |= new
        new = {file for file, needs in imported.items() if needs & new} - found
    folders = {Path(file).parent for file in found if Path(file).name == "conftest.py"}
    return found | {file for file in imported if folders.intersection(Path(file).parents)}


@functools.cache
def _imported_by_tests() -> dict[str, set[str]]:
    """Returns, for each file of tests, those that it imports. They may be gone."""
    return {str(path.relative_to(CHECKOUT)): set(_imports(path)) for path in sorted(TESTS.rglob("*.py"))}


def _imports(path: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        folder = TESTS  # which is on the path
        if isinstance(node, ast.Import):
            names = [alias.name.removeprefix("tests.") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1] if node.level else TESTS
            base = f"{node.module or ''}".removeprefix("tests.")
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (f"{folder.joinpath(*name.split('.')).relative_to(CHECKOUT)}.py" for name in names)


def folders_of(rooms: Iterable[str], files: Iterable[str]) -> list[str]:
    """Returns the folders of tests of rooms in their order, after the folders in which a file was touched, or imports
    one that was."""
    folders = sorted(path.name for path in TESTS.iterdir() if path.is_dir() and list(path.glob("test_*.py")))
    touched = {Path(file).parts[1] for file in with_those_that_import(files) if file.startswith("tests/")}
    found = [folder for folder in folders if folder in touched]
    for room in rooms:
        found += [folder for folder in folders if room in TESTED.get(folder, {folder}) and folder not in found]
    return found


def changed_files(base: str, checkout: Path = CHECKOUT) -> list[str]:
    """Returns files that differ from a commit, or are not tracked. One that was moved is there under both names."""
    changed = git("diff", "--name-only", "--no-renames", "-z", base, checkout=checkout)
    others = git("ls-files", "--others", "--exclude-standard", "-z", checkout=checkout)
    return sorted({*changed.split("\0"), *others.split("\0")} - {""})


def git(*arguments: str, checkout: Path = CHECKOUT) -> str:
    """Returns what git prints."""
    return subprocess.run(["git", *arguments], cwd=checkout, check=True, capture_output=True, text=True).stdout


def part_for(count: int, most: int, commit: str) -> str | None:
    """Returns K/N, such that a part of `count` has at most about `most`, with K by the commit; nothing if all are no
    more."""
    parts = -(-count // most)
    return None if parts <= 1 else f"{int(commit[:8], 16) % parts + 1}/{parts}"


def _count(arguments: list[str]) -> int:
    """Returns how many tests pytest would run."""
    command = [sys.executable, "-m", "pytest", *arguments, "-n", "0", "--collect-only", "-q"]
    listed = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True).stdout
    return sum("::" in line for line in listed.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.changed",
        description="Runs the slow and full tests of the rooms that a change touches, and of rooms that import them.",
        epilog="Other arguments go to pytest, such as --part 2/8.",
    )
    parser.add_argument("--base", help="compare with this commit (by default the one in .ci/landed)")
    parser.add_argument("--above", type=int, default=1, metavar="N", help="rooms that import them in N steps (1)")
    parser.add_argument("--most", type=int, metavar="TESTS", help="run a part of about so many, chosen by the commit")
    parser.add_argument("--list", action="store_true", help="only print the folders")
    args, rest = parser.parse_known_args()
    if args.most is not None and args.most < 1:
        parser.error(f"--most is {args.most}; it must be at least 1")
    files = changed_files(args.base or LANDED.read_text().strip())
    above = importers()
    rooms = with_those_above(rooms_of(files, above), above, args.above)
    folders = folders_of(rooms, files)
    print(f"rooms: {' '.join(rooms) or 'none'}\nfolders of tests: {' '.join(folders) or 'none'}", flush=True)
    if args.list or not folders:
        return 0
    arguments = [*(f"tests/{folder}" for folder in folders), "-m", "(slow or full) and not gpu", *rest]
    if args.most:
        count = _count(arguments)
        part = part_for(count, args.most, git("rev-parse", "HEAD"))
        print(f"{count} tests" + (f", of which part {part} runs; the others: --part K/N" if part else ""), flush=True)
        arguments += ["--part", part] if part else []
    print("pytest", *arguments, flush=True)
    status = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=CHECKOUT).returncode
    return 0 if status == 5 else status  # 5: none was chosen


if __name__ == "__main__":
    raise SystemExit(main())
