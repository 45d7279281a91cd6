"""A mistake that somebody could make in the package, and what becomes of the tests that must see it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

CHECKOUT = Path(__file__).parents[2]
PACKAGE = CHECKOUT / "gtp_jax"
# Of pytest: all passed, some failed, none was run; others are errors.
_PASSED, _FAILED, _NONE = 0, 1, 5


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one place.

    Attributes:
        name: what is wrong, in a few words.
        old: text that stands once in the whole package, in whichever file.
        new: what takes its place.
        tests: that fail then, as pytest is given them.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]

    def places(self, package: Path = PACKAGE) -> list[Path]:
        """Returns the file of every occurrence."""
        texts = ((path, path.read_text()) for path in sorted(package.rglob("*.py")))
        return [path for path, text in texts for _ in range(text.count(self.old))]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What tests said of a mutant.

    Attributes:
        kind: `"mistake"` if they could not say anything: the text is not there once, or the package cannot be imported.
        reason: the first error.
    """

    kind: Literal["killed", "survived", "mistake"]
    reason: str


def judge(mutant: Mutant) -> Verdict:
    """Runs the tests of a mutant with a copy of the package that has it."""
    if len(places := mutant.places()) != 1:
        return Verdict("mistake", f"the text is in {len(places)} places, and must be in one")
    if reason := _failure_without_mutants(mutant.tests):
        return Verdict("mistake", f"without the mutant: {reason}")
    with _copy() as folder:
        mutated = folder / places[0].relative_to(CHECKOUT)
        mutated.write_text(mutated.read_text().replace(mutant.old, mutant.new))
        code, reason = _run(folder, mutant.tests)
    return Verdict({_PASSED: "survived", _FAILED: "killed"}.get(code, "mistake"), reason)


@functools.cache
def _failure_without_mutants(tests: tuple[str, ...]) -> str:
    """Returns why tests fail with an unchanged copy of the package; nothing if they pass."""
    with _copy() as folder:
        code, reason = _run(folder, tests)
    return "" if code == _PASSED else reason


@contextlib.contextmanager
def _copy() -> Iterator[Path]:
    """Makes a copy of the package, and next to it a pytest plugin that has it imported."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(PACKAGE, folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "imports_the_copy.py").write_text(_PLUGIN)
        yield folder


# An editable installation finds its own package before any of sys.path.
# The copy lacks its compiled library, which is still found there.
_PLUGIN = """
import importlib.machinery
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent


class Copy:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] != "gtp_jax":
            return None
        return importlib.machinery.PathFinder.find_spec(name, [str(FOLDER)] if path is None else path)


sys.meta_path.insert(0, Copy)


def pytest_collection_finish(session):
    import gtp_jax

    if not pathlib.Path(gtp_jax.__file__).is_relative_to(FOLDER):
        pytest.exit(f"{gtp_jax.__file__} is imported in place of the copy", returncode=3)
"""


def _run(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Runs tests; returns the exit status and the first error, or what pytest said last."""
    # -P: not the checkout, in which the tests are, before the copy
    pytest = [sys.executable, "-P", "-B", "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    command = [*pytest, "-p", "imports_the_copy", *tests]
    done = subprocess.run(command, cwd=CHECKOUT, env=env, capture_output=True, text=True)
    if done.returncode == _NONE:  # all of them are slow
        done = subprocess.run([*command, "-m", "slow"], cwd=CHECKOUT, env=env, capture_output=True, text=True)
    errors = re.findall(r"^E +(.*)", done.stdout, re.MULTILINE)
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    return done.returncode, errors[0] if errors else said[-1] if said else ""
