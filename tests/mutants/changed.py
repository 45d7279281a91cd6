"""Finds the mutants that a change concerns."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from ..changed import changed_files
from .mutant import CHECKOUT, Mutant

_HERE = Path(__file__).parent.relative_to(CHECKOUT).as_posix()
_PRINT = """
import dataclasses, json
from tests.mutants.table import MUTANTS
print(json.dumps([dataclasses.astuple(mutant) for mutant in MUTANTS]))
"""


def changed_since(revision: str, mutants: Sequence[Mutant]) -> list[Mutant]:
    """Returns the mutants whose entries in the table, whose files of the package, or whose tests differ from those of a
    revision."""
    files = set(changed_files(revision))
    before = _table_of(revision)

    def concerns(mutant: Mutant) -> bool:
        own = [place.relative_to(CHECKOUT).as_posix() for place in mutant.places()]
        own += [test.partition("::")[0] for test in mutant.tests]
        return mutant not in before or not files.isdisjoint(own)

    return [mutant for mutant in mutants if concerns(mutant)]


def _table_of(revision: str) -> list[Mutant]:
    command = ["git", "archive", revision, _HERE]
    archived = subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archived)) as archive:
            archive.extractall(folder, filter="data")
        done = subprocess.run([sys.executable, "-c", _PRINT], cwd=folder, capture_output=True, text=True)
    rows = json.loads(done.stdout) if done.returncode == 0 else []
    return [Mutant(*rest, tests=tuple(tests)) for *rest, tests in rows]
