"""Runs a suite: the contenders of each workload take turns, for several rounds on one machine."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

from ._contenders import OURS, Contender
from ._step import measure_step
from ._suite_file import Result, SuiteFile
from ._suite_table import SuiteWorkload


@dataclasses.dataclass(frozen=True)
class SuiteOptions:
    """How to run a suite.

    Attributes:
        platform: `"gpu"` or `"cpu"`.
        machine: the name of this machine.
        environment: the environment of the contenders' processes.
        rounds: how often each contender runs.
        contenders: entries that select contenders, as in `SuiteWorkload.chosen`; all if empty.
        steps: the number of steps timed per round; `None` for the number in the table.
        timeout_s: the seconds that one process may take, including its start and compilation.
        within_s: the time limit of the whole suite, in seconds. A process that is still running when it is reached is
            ended without a result. A run is not started if the time left is no more than its longest earlier run.
        slower: the fraction by which a rival may be slower than the fastest of its kind in the first round and still
            run again; `None` to run all rivals again.
        torch_python: the interpreter that has PyTorch.
        logs: an existing folder for the output of each process; by default, output is not saved.
    """

    platform: str
    machine: str
    environment: Mapping[str, str]
    rounds: int = 3
    contenders: Sequence[str] = ()
    steps: int | None = None
    timeout_s: float = 240
    within_s: float = float("inf")
    slower: float | None = None
    torch_python: str = sys.executable
    logs: Path | None = None


def run_suite(
    workloads: Sequence[SuiteWorkload],
    file: SuiteFile,
    options: SuiteOptions,
    *,
    say: Callable[[str], object] = lambda line: None,
) -> Generator[tuple[SuiteWorkload, Result]]:
    """Measures what is missing in the file, and yields each result once it is saved.

    The contenders of a workload take turns: A, B, C, A, B, C, A, B, C. All rounds of a workload run on one machine; a
    workload that was started but not finished on another machine is measured again. A contender that failed does not
    run again.

    Args:
        workloads: the workloads, in the order in which they run.
        file: the file that holds the results so far, and to which new ones are saved.
        options: how to run.
        say: called with a message when results are dropped, and when the time is over.

    Raises:
        ValueError: if the file has results of a contender with other flags.
    """
    deadline = time.monotonic() + options.within_s
    for workload in workloads:
        flags = workload.workload(options.platform, options.steps).flags
        _check_flags(workload, workload.chosen(options.contenders), file, flags)
    for workload in workloads:
        chosen = workload.chosen(options.contenders)
        work = workload.workload(options.platform, options.steps)
        elsewhere = [r for r in file.results if r.workload == workload.name and r.machine != options.machine]
        if elsewhere and any(True for _ in _open(workload, chosen, file, options)):
            say(f"{workload.name}: started but not finished on another machine, so it is measured again")
            file.drop(elsewhere)
        for number, contender in _open(workload, chosen, file, options):
            left = deadline - time.monotonic()
            before = [r.wall_s for r in _of(file, workload, contender)]
            if left <= max(before, default=0):
                say(f"no time is left for {workload.name}, {contender.name}, round {number + 1}")
                return
            begin = time.monotonic()
            log = None if options.logs is None else options.logs / _log_name(workload, contender, number)
            row = measure_step(
                contender,
                work,
                environment=options.environment,
                timeout_s=min(options.timeout_s, left),
                torch_python=options.torch_python,
                log=log,
            )
            if row.failure and time.monotonic() >= deadline:  # the deadline ended it; it did not fail on its own
                say(f"the time is over; {workload.name}, {contender.name}, round {number + 1} was ended")
                return
            wall_s, flags = time.monotonic() - begin, (*work.flags, *contender.flags)
            result = Result(
                workload.name,
                contender.name,
                number,
                options.machine,
                flags,
                wall_s,
                row.seconds,
                row.facts,
                row.failure,
            )
            file.add(result)
            yield workload, result


def turns(contenders: Sequence[Contender], rounds: int) -> list[tuple[int, Contender]]:
    """Returns the order of runs: all contenders in each round."""
    return [(number, contender) for number in range(rounds) for contender in contenders]


def _open(
    workload: SuiteWorkload, chosen: Sequence[Contender], file: SuiteFile, options: SuiteOptions
) -> Iterator[tuple[int, Contender]]:
    """Yields the runs that are left, in turns. Takes into account results that are added to the file meanwhile."""
    for number, contender in turns(chosen, options.rounds):
        found = _of(file, workload, contender)
        if any(r.round == number or r.failure for r in found):
            continue
        if number and options.slower is not None and _is_slower(workload, contender, chosen, file, options.slower):
            continue
        yield number, contender


def _is_slower(
    workload: SuiteWorkload, contender: Contender, chosen: Sequence[Contender], file: SuiteFile, margin: float
) -> bool:
    """Returns whether, in the first round, a rival was slower than the fastest of its kind by more than the margin."""
    if contender.family == OURS:
        return False
    kind = lambda c: (c.family, c.matmuls, c.guards, c.policy if workload.gathers else "")  # noqa: E731
    first = {
        c.name: statistics.median(r.seconds)
        for c in chosen
        if kind(c) == kind(contender)
        for r in _of(file, workload, c)
        if r.round == 0 and r.seconds
    }
    return contender.name in first and first[contender.name] > (1 + margin) * min(first.values())


def _of(file: SuiteFile, workload: SuiteWorkload, contender: Contender) -> list[Result]:
    return [r for r in file.results if (r.workload, r.contender) == (workload.name, contender.name)]


def _log_name(workload: SuiteWorkload, contender: Contender, number: int) -> str:
    return f"{workload.name}_{contender.name.replace(' ', '_')}_{number + 1}.txt"


def _check_flags(
    workload: SuiteWorkload, chosen: Sequence[Contender], file: SuiteFile, flags_of_work: Sequence[str]
) -> None:
    for contender in chosen:
        now = (*flags_of_work, *contender.flags)
        for result in _of(file, workload, contender):
            if result.flags != now:
                differing = " ".join(sorted(set(result.flags) ^ set(now)))
                raise ValueError(
                    f"the file has results of {contender.name} on {workload.name} with other flags ({differing}). Use "
                    "another file to start again."
                )
