"""Counts the XLA programs that tests of the default tier compile, and holds them against the budget.

    python -m tests.structure.programs_compiled           # runs the tests, and prints the programs of every folder
    python -m tests.structure.programs_compiled --write   # records every file's programs in programs_compiled.json

The number does not depend on how fast the machine is: tests of a file run in order in one process, and each file begins
without compiled programs. Programs of processes that tests start are not counted. Every run of the whole tier counts
them too, and fails above the budget, which stands in CONTRIBUTING.md.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import jax
import jax.monitoring
import pytest

RECORD = Path(__file__).with_suffix(".json")
CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"
PLUGIN = "programs compiled"


def budget() -> int:
    """Returns how many programs the default tier may compile, as CONTRIBUTING.md says."""
    (number,) = re.findall(r"at most ([\d,]+) XLA programs", CONTRIBUTING.read_text())
    return int(number.replace(",", ""))


def recorded() -> Counter[str]:
    """Returns the programs of every file when they were recorded."""
    return Counter(json.loads(RECORD.read_text()) if RECORD.exists() else {})


def verdict(counts: Counter[str], before: Counter[str], budget: int) -> str:
    """Returns what exceeds the budget, with the five files that grew most; nothing within the budget."""
    if counts.total() <= budget:
        return ""
    growth = Counter({file: count - before[file] for file, count in counts.items()})
    grown = [f"  {file}: {before[file]} -> {counts[file]}" for file, more in growth.most_common(5) if more > 0]
    return "\n".join(
        [
            f"The default tier compiles {counts.total():,} XLA programs. Its budget is {budget:,} (CONTRIBUTING.md).",
            f"Compile fewer, or mark cases full. The files that grew most since {RECORD.name} was written:",
            *grown,
        ]
    )


def by_folder(counts: Counter[str]) -> Counter[str]:
    """Returns the programs of each folder."""
    folders: Counter[str] = Counter()
    for file, count in counts.items():
        folders[str(Path(file).parent)] += count
    return folders


class ProgramCount:
    """Counts programs by file in every worker of pytest-xdist, and adds them up in the process that reports.

    Attributes:
        counts: programs by file.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.counts: Counter[str] = Counter()
        self._config = config
        self._file = ""
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, _: float, **__: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration" and self._file:
            self.counts[self._file] += 1

    def is_whole(self) -> bool:
        """Returns whether all of the default tier was asked for, so that its budget applies."""
        config = self._config
        selected = any(arg.startswith("-m") for arg in config.invocation_params.args)
        selected = selected or bool(config.option.keyword or config.getoption("--part"))
        return config.args == config.getini("testpaths") and not selected

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        file = item.nodeid.partition("::")[0]
        if file != self._file:
            jax.clear_caches()
        self._file = file

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["programs"] = dict(self.counts)
        elif self.is_whole() and verdict(self.counts, recorded(), budget()) and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        self.counts.update(getattr(node, "workeroutput", {}).get("programs", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.is_whole():
            terminalreporter.section("XLA programs compiled")
            wrong = verdict(self.counts, recorded(), budget())
            terminalreporter.line(wrong or f"{self.counts.total():,}; the budget is {budget():,}")


class _Result:
    """Takes the counts of a run when it ends."""

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        self.counts: Counter[str] = getattr(config.pluginmanager.get_plugin(PLUGIN), "counts", Counter())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.structure.programs_compiled",
        description="Runs the tests of the default tier, and prints the XLA programs that each folder compiles.",
        epilog="Other arguments go to pytest: paths, for instance.",
    )
    parser.add_argument("--write", action="store_true", help=f"record every file's programs in {RECORD.name}")
    args, rest = parser.parse_known_args()
    result = _Result()
    status = pytest.main(["-q", *rest], plugins=[result])
    print(f"\n{'programs':>8}  {'recorded':>8}  folder")
    before = by_folder(recorded())
    for folder, count in by_folder(result.counts).most_common():
        print(f"{count:8,}  {before[folder]:8,}  {folder}")
    print(f"{result.counts.total():8,}  {before.total():8,}  in all; the budget is {budget():,}")
    if args.write:
        kept = {} if not rest else recorded()
        RECORD.write_text(json.dumps(dict(sorted({**kept, **result.counts}.items())), indent=1) + "\n")
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
