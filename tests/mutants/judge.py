"""Says what becomes of the tests that must see a mutant.

A server process imports jax and whatever else tests import, but not the package, and starts no backend of JAX and no
threads. For each mutant it forks a process, which imports the package of the checkout with the mutant's file in place
of its own, and runs pytest.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import FileFinder, PathFinder, SourceFileLoader
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import pytest

from .mutant import CHECKOUT, PACKAGE, Mutant

_LIMIT = 600  # seconds after which the tests of a mutant are taken to hang
_IMPORTED = (
    "jax jax.numpy flax.nnx flax.linen optax orbax.checkpoint numpy pytest hypothesis jaxtyping beartype".split()
)
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(_IMPORTED)


class Verdict(NamedTuple):
    """What tests said of a mutant.

    Attributes:
        kind: `"mistake"` if they could not say anything: the text is not there once, the package cannot be imported,
            or a test fails without the mutant or is not in the default tier.
        reason: the first error.
    """

    kind: Literal["killed", "survived", "mistake"]
    reason: str


def verdicts(mutants: Sequence[Mutant], jobs: int, *, passed: bool = False) -> Iterator[Verdict]:
    """Judges mutants, in their order.

    Args:
        mutants: the mutants.
        jobs: the number of processes that run tests at the same time.
        passed: whether the tests are known to pass as things are; otherwise they are run without mutants first.
    """
    tests = [test for mutant in mutants for test in mutant.tests]
    unusable = failures_without_mutants(tests, jobs, collected=passed)
    with ThreadPoolExecutor(jobs) as threads:
        yield from threads.map(lambda mutant: _verdict(mutant, unusable), mutants)


def _verdict(mutant: Mutant, unusable: dict[str, str]) -> Verdict:
    if len(places := mutant.places()) != 1:
        return Verdict("mistake", f"the text is in {len(places)} places, and must be in one")
    if reasons := [unusable[test] for test in mutant.tests if test in unusable]:
        return Verdict("mistake", reasons[0])
    with tempfile.TemporaryDirectory() as name:
        mutated = Path(name) / places[0].name
        mutated.write_text(places[0].read_text().replace(mutant.old, mutant.new))
        code, said = _run(["-x", *mutant.tests], (places[0], mutated))
    kinds: dict[Any, Any] = {pytest.ExitCode.OK: "survived", pytest.ExitCode.TESTS_FAILED: "killed", None: "killed"}
    return Verdict(kinds.get(code, "mistake"), _first_error(said) if code is not None else "the tests do not end")


def failures_without_mutants(tests: Iterable[str], jobs: int = 1, *, collected: bool = False) -> dict[str, str]:
    """Returns why tests can judge no mutant, by test: each that is not in the default tier, or fails as things are.

    Args:
        tests: the tests.
        jobs: as in `verdicts`.
        collected: whether to collect the tests only, which finds those of the first kind.
    """
    _start_server()
    tests = list(dict.fromkeys(tests))
    found = {test: "this file is not there" for test in tests if not (CHECKOUT / test.partition("::")[0]).exists()}
    files = sorted({test.partition("::")[0] for test in tests} - {test.partition("::")[0] for test in found})
    with ThreadPoolExecutor(jobs) as threads:
        parts = [files[number::jobs] for number in range(jobs)]
        for one in threads.map(lambda part: _failures(part, tests, collected), filter(None, parts)):
            found |= one
    return found


@functools.cache
def _bytecode() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder for the bytecode of all files but those of mutants, which does not outlive this process."""
    return tempfile.TemporaryDirectory()


def _start_server() -> None:
    """Starts the server, unless it runs, without threads of OpenBLAS, which a process could not be forked beside."""
    with mock.patch.dict(os.environ, JAX_PLATFORMS="cpu", OPENBLAS_NUM_THREADS="1"):
        os.environ.pop("GTP_TEST_PLATFORM", None)
        forkserver.ensure_running()
    _bytecode()


def _failures(files: Sequence[str], tests: Sequence[str], collected: bool) -> dict[str, str]:
    tests = [test for test in tests if test.partition("::")[0] in files]
    with tempfile.TemporaryDirectory() as name:
        record = Path(name) / "record.json"
        options = ["--continue-on-collection-errors", *(["--collect-only"] if collected else [])]
        _, said = _run([*options, *files], plugins=[_Record(tests, record)])
        if not record.exists():
            return dict.fromkeys(tests, f"without a mutant: {_first_error(said)}")
        default, failed = json.loads(record.read_text())
    found = {test: "it is not in the default tier" for test in tests if not any(_names(test, one) for one in default)}
    return found | {
        test: f"without a mutant: {why}"
        for node, why in failed.items()
        for test in tests
        if _names(test, node) or _names(node, test)  # the node may be the test's file, which cannot be imported
    }


def _names(test: str, node: str) -> bool:
    return node == test or node.startswith((f"{test}[", f"{test}::"))


class _Record:
    """A pytest plugin that runs only some tests, and writes which are in the default tier and which fail."""

    def __init__(self, tests: Sequence[str], record: Path) -> None:
        self._tests, self._record = tests, record
        self._default: list[str] = []
        self._failed: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if any(_names(test, item.nodeid) for test in self._tests)]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._default = [item.nodeid for item in session.items]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = _first_error(report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.setdefault(report.nodeid, _first_error(report.longreprtext))

    def pytest_sessionfinish(self) -> None:
        self._record.write_text(json.dumps([self._default, self._failed]))


def _first_error(said: str) -> str:
    errors = re.findall(r"^E +(.*)", said, re.MULTILINE)
    return (errors or said.strip().splitlines()[-1:] or [""])[0]


def _run(
    args: Sequence[str], mutated: tuple[Path, Path] | None = None, plugins: Sequence[Any] = ()
) -> tuple[int | None, str]:
    """Runs pytest in a process of its own.

    Args:
        args: its arguments.
        mutated: a file of the package, and the file that takes its place.
        plugins: its plugins, which are copied into the process.

    Returns:
        The exit status, `None` if the process does not end, and what it printed.
    """
    with tempfile.NamedTemporaryFile() as printed:
        process = _PROCESSES.Process(target=_pytest, args=(printed.name, _bytecode().name, args, mutated, plugins))
        process.start()
        process.join(_LIMIT)
        if hangs := process.is_alive():
            process.kill()
            process.join()
        return None if hangs else process.exitcode, Path(printed.name).read_text(errors="replace")


def _pytest(
    printed: str, bytecode: str, args: Sequence[str], mutated: tuple[Path, Path] | None, plugins: Sequence[Any]
) -> None:
    """Runs pytest, in a process that has not imported the package yet."""
    for number in (1, 2):
        os.dup2(os.open(printed, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(CHECKOUT)
    sys.pycache_prefix, sys.dont_write_bytecode = bytecode, False
    sys.meta_path.insert(0, _Checkout())
    if mutated is not None:
        sys.path_importer_cache[str(mutated[0].parent)] = _Folder(*mutated)
    code = pytest.main(["-n", "0", "-q", "-p", "no:cacheprovider", *args], plugins=[*plugins])
    sys.exit(int(code))


class _Checkout:
    """Finds the package in the checkout, ahead of an editable installation, which would find its own. Its compiled
    library is not there, and is still found."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != PACKAGE.name:
            return None
        return PathFinder.find_spec(name, [str(CHECKOUT)] if path is None else path)


class _Folder(FileFinder):
    """Finds the modules in a folder of the package, one of them in another file. `PathFinder` asks it, which jaxtyping
    also asks for the modules whose annotations it checks."""

    def __init__(self, file: Path, instead: Path) -> None:
        super().__init__(str(file.parent), (SourceFileLoader, [".py"]))
        self._file, self._instead = file, instead

    def find_spec(self, fullname: str, target: Any = None) -> Any:
        if fullname.rpartition(".")[2] == self._file.stem:
            return importlib.util.spec_from_file_location(fullname, self._instead)
        return super().find_spec(fullname, target)
