"""Says whether two versions of the package differ in their prose alone.

    python -m tests.structure.same_code REVISION [PATH ...]

Compares the Python files of the working tree with those of a revision: their syntax trees without comments, with every
string blanked. Words that code may read (strings without a space, such as keys, dtypes and flags) must not change.
"""

import argparse
import ast
import collections
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


class _Blank(ast.NodeTransformer):
    """Blanks strings, and keeps those that code may read."""

    def __init__(self) -> None:
        self.words: collections.Counter[str] = collections.Counter()

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if not isinstance(node.value, str):
            return node
        if " " not in node.value.strip():
            self.words[node.value] += 1
        return ast.copy_location(ast.Constant(""), node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        # a sentence may name its values in another order
        values = [self.visit(value) for value in node.values if isinstance(value, ast.FormattedValue)]
        return ast.copy_location(ast.JoinedStr(sorted(values, key=ast.dump)), node)


def differences(before: str, after: str) -> list[str]:
    """Returns what differs between two sources besides prose; nothing if they are the same code."""
    blanks = _Blank(), _Blank()
    trees = [ast.dump(blank.visit(ast.parse(text))) for blank, text in zip(blanks, (before, after), strict=True)]
    found = [] if trees[0] == trees[1] else ["code"]
    words = [blank.words for blank in blanks]
    gone, new = words[0] - words[1], words[1] - words[0]
    return found + [f"-{word!r}" for word in sorted(gone)] + [f"+{word!r}" for word in sorted(new)]


def main(argv: list[str] | None = None) -> int:
    """Prints each file that differs in more than prose, and returns 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="the commit before")
    parser.add_argument("paths", nargs="*", default=["gtp_jax"], help="files or folders; default: gtp_jax")
    options = parser.parse_args(argv)

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=CHECKOUT, check=True, capture_output=True, text=True).stdout

    changed = git("diff", "--name-only", options.revision, "--", *options.paths).split()
    files = [name for name in changed if name.endswith(".py")]
    there = set(git("ls-tree", "-r", "--name-only", options.revision).split("\n"))
    failed = False
    for name in files:
        path = CHECKOUT / name
        if name not in there or not path.exists():
            found = ["the file is new, moved or gone"]
        else:
            found = differences(git("show", f"{options.revision}:{name}"), path.read_text())
        if found:
            failed = True
            print(f"{name}: {', '.join(found)}")
    print(f"{len(files)} files changed: {'more than prose' if failed else 'prose alone'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
