"""Times a training step with each contender, each in a process of its own with its own memory and flags."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gtp_jax.hlo import step_flops

from ._contenders import FSDP2, PARTITIONER, TE, Contender
from ._process import reason, run
from .contenders.workload import MARK, Workload


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender's result for a step.

    Attributes:
        contender: the contender.
        seconds: the seconds of each timed step; empty if it failed or was only compiled for absent devices.
        facts: what else it reports: `compile_s`, `peak_bytes` per device, `loss` of the first step, `parameters`,
            `reduce_dtype` of weight gradients and `versions`; `modelled_s` and `collectives` for a step that was only
            compiled.
        failure: why there is no result; empty if there is one.
        rounds: in a suite, where `seconds` are medians of rounds, the number of the round of each.
    """

    contender: Contender
    seconds: tuple[float, ...] = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    failure: str = ""
    rounds: tuple[int, ...] = ()

    @property
    def median_s(self) -> float:
        """The median seconds per step."""
        return statistics.median(self.seconds)

    @property
    def low_s(self) -> float:
        """The seconds of the fastest step."""
        return min(self.seconds)

    @property
    def high_s(self) -> float:
        """The seconds of the slowest step."""
        return max(self.seconds)


def workload_flops(work: Workload) -> int:
    """Returns the FLOPs per step over all devices, as counted by `gtp_jax.hlo.step_flops`."""
    return step_flops(
        matmul_params=work.matmul_parameters,
        tokens=work.tokens,
        layers=work.num_layers,
        seq=work.seq,
        heads=work.num_heads,
        head_dim=work.head_dim,
    )


def measure_steps(
    chosen: Sequence[Contender],
    work: Workload,
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    torch_python: str = sys.executable,
    within_s: float = float("inf"),
    logs: Path | None = None,
) -> Iterator[Row]:
    """Runs the contenders one after another, and yields their results.

    Args:
        chosen: the contenders to run.
        work: the step that they run.
        environment: the environment of their processes.
        timeout_s: the seconds that one contender may take, including its start and compilation.
        torch_python: the interpreter that has PyTorch.
        within_s: the seconds for all contenders together. A contender that is still running then is ended, and those
            after it are not run.
        logs: an existing folder for the output of each process; by default, output is not saved.
    """
    deadline = time.monotonic() + within_s
    for contender in chosen:
        left = deadline - time.monotonic()
        if left <= 0:
            yield Row(contender, failure=f"not run: the time limit of {within_s:.0f} s for all contenders had passed")
            continue
        yield measure_step(
            contender,
            work,
            environment=environment,
            timeout_s=min(timeout_s, left),
            torch_python=torch_python,
            log=None if logs is None else logs / f"{contender.name.replace(' ', '_')}.txt",
        )


def measure_step(
    contender: Contender,
    work: Workload,
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    torch_python: str = sys.executable,
    log: Path | None = None,
) -> Row:
    """Runs one contender, which sees only as many GPUs as the step has ranks, and returns its result.

    Args:
        contender: the contender to run.
        work: the step that it runs.
        environment: the environment of its process.
        timeout_s: the seconds that it may take, including its start and compilation.
        torch_python: the interpreter that has PyTorch.
        log: a file for its output; by default, output is not saved.
    """
    lacking = work.ours_alone if contender.family in (FSDP2, PARTITIONER, TE) else ""
    refused = lacking or contender.refused
    if refused:
        return Row(contender, failure=refused)
    shown = environment.get("CUDA_VISIBLE_DEVICES")
    every = [str(i) for i in range(work.devices)] if shown is None else shown.split(",")
    environment = {**environment, "CUDA_VISIBLE_DEVICES": ",".join(every[: work.devices])}
    code, output = run(contender.command(work.flags, work.devices, torch_python), environment, timeout_s)
    if log is not None:
        log.write_text(output)
    return _row(contender, code, output, timeout_s)


def rival(row: Row, rows: Sequence[Row], family: str, *, any_policy: bool = False) -> Row | None:
    """Returns a family's fastest row with the same policy and matmul formats as `row`; `None` if there is none.

    Args:
        row: the row to compare.
        rows: all rows of the run.
        family: the rival's family.
        any_policy: whether to ignore the policies, which make no difference if no weights are gathered.
    """
    alike = [
        r
        for r in rows
        if r.seconds
        and (r.contender.family, r.contender.matmuls) == (family, row.contender.matmuls)
        and (any_policy or r.contender.policy == row.contender.policy)
    ]
    return min(alike, key=lambda r: r.median_s, default=None)


def ratio(row: Row, rows: Sequence[Row], family: str, *, any_policy: bool = False) -> float | None:
    """Returns the speedup of a row over its `rival`; `None` if either has no result."""
    other = rival(row, rows, family, any_policy=any_policy)
    return other.median_s / row.median_s if other and row.seconds else None


def _row(contender: Contender, code: int | None, output: str, allowed_s: float) -> Row:
    results = [line[len(MARK) :] for line in output.splitlines() if line.startswith(MARK)]
    if results:
        facts = json.loads(results[-1])
        return Row(contender, tuple(facts.pop("seconds")), facts)
    return Row(contender, failure=f"timed out after {allowed_s:.0f} s" if code is None else reason(code, output))
