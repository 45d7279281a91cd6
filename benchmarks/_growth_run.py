"""Measures steps along an axis, each in its own process: either run here, or compiled for GPUs that are absent."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gtp_jax.hlo import Target, fact

from ._contenders import OURS, PARTITIONER, Contender
from ._growth import Point
from ._step import Row, measure_step, workload_flops

# The families of `CONTENDERS` that can be compiled without a device.
_COMPILED = (OURS, PARTITIONER)
_SCAN = "scan"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a step.

    Attributes:
        axis, value: the axis, and the value on it.
        contender: the name of the contender that ran the step.
        devices: the number of devices.
        tokens: the number of tokens per step, over all devices.
        flops: the FLOPs per step, over all devices, as counted by `workload_flops`.
        step_s: the median seconds per step; modelled seconds if the step was only compiled; `None` without a result.
        low_s, high_s: the seconds of the fastest and the slowest step.
        peak_bytes: the peak memory per device, in bytes; the planned peak if the step was only compiled.
        compile_s: the seconds of compilation; if the step was only compiled, CPU seconds over all cores.
        collectives: the number of collectives launched, if the step was only compiled.
        failure: why there is no result; empty if there is one.
    """

    axis: str
    value: int
    contender: str
    devices: int
    tokens: int
    flops: int
    step_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    peak_bytes: int | None = None
    compile_s: float | None = None
    collectives: int | None = None
    failure: str = ""

    @property
    def flops_rate(self) -> float | None:
        """FLOP/s per device."""
        return self.flops / self.devices / self.step_s if self.step_s else None

    @property
    def tokens_rate(self) -> float | None:
        """Tokens per second and device."""
        return self.tokens / self.devices / self.step_s if self.step_s else None


def growth_runs(
    points: Sequence[Point], contenders: Sequence[Contender], *, scan: bool, target: Target | None
) -> list[tuple[Point, Contender]]:
    """Returns the pairs of points and contenders to run, in order.

    Args:
        points: the points in the order in which they run.
        contenders: the contenders, each of which runs at every point.
        scan: whether to also run gtp_jax with its layers in a loop, at the points of the axis `depth`.
        target: the GPUs to compile for, without running anything; `None` to run the steps.

    Raises:
        ValueError: if a contender cannot be compiled for a target.
    """
    unable = [c.name for c in contenders if target and c.family not in _COMPILED]
    if unable:
        raise ValueError(
            f"{', '.join(unable)} cannot be compiled for GPUs that are absent. Remove `--target`, or choose "
            f"`--contenders` of {' or '.join(_COMPILED)}."
        )
    pairs = []
    for point in points:
        for contender in contenders:
            pairs.append((point, contender))
            if scan and point.axis == "depth" and contender.family == OURS:
                pairs.append((point, _scanned(contender)))
    return [(point, _compiled(contender, target) if target else contender) for point, contender in pairs]


def measure_growth(
    runs: Sequence[tuple[Point, Contender]],
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    torch_python: str = sys.executable,
    within_s: float = float("inf"),
    logs: Path | None = None,
) -> Iterator[Cost]:
    """Runs the points one after another, and yields their costs. A step that lies on several axes runs only once.

    Args:
        runs: the pairs of points and contenders.
        environment: the environment of the processes.
        timeout_s: the seconds that one point may take, including its start and compilation.
        torch_python: the interpreter that has PyTorch.
        within_s: the seconds for all points together. A point that is still running then is ended, and those after it
            are not run.
        logs: an existing folder for the output of each process; by default, output is not saved.
    """
    deadline = time.monotonic() + within_s
    done: dict[object, Row] = {}
    for point, contender in runs:
        known = (contender, point.work)
        if known not in done:
            left = deadline - time.monotonic()
            if left <= 0:
                late = Row(contender, failure=f"not run: the time limit of {within_s:.0f} s for all points had passed")
                yield cost(point, late)
                continue
            name = f"{point.axis}_{point.value}_{contender.name.replace(' ', '_')}.txt"
            done[known] = measure_step(
                contender,
                point.work,
                environment=environment,
                timeout_s=min(timeout_s, left),
                torch_python=torch_python,
                log=None if logs is None else logs / name,
            )
        yield cost(point, done[known])


def cost(point: Point, row: Row) -> Cost:
    """Returns the cost of a point from a contender's result."""
    facts, work = row.facts, point.work
    times: dict[str, float | None] = {"step_s": facts.get("modelled_s")}
    if row.seconds:
        times = {"step_s": statistics.median(row.seconds), "low_s": row.low_s, "high_s": row.high_s}
    return Cost(
        axis=point.axis,
        value=point.value,
        contender=row.contender.name,
        devices=work.devices,
        tokens=work.tokens,
        flops=workload_flops(work),
        **times,
        peak_bytes=facts.get("peak_bytes"),
        compile_s=facts.get("compile_cpu_s", facts.get("compile_s")),
        collectives=facts.get("collectives"),
        failure=row.failure,
    )


def over_memory(cost: Cost, chip: str) -> bool:
    """Returns whether a step needs more memory than this chip has."""
    return (cost.peak_bytes or 0) > fact(chip, "memory").value


def first_of(cost: Cost, costs: Sequence[Cost]) -> Cost | None:
    """Returns the lowest point of a cost's axis at which the same contender has a result, with which the other points
    are compared; `None` if there is none."""
    line = [c for c in costs if (c.axis, c.contender) == (cost.axis, cost.contender) and c.step_s]
    return min(line, key=lambda c: c.value, default=None)


def efficiency(cost: Cost, costs: Sequence[Cost]) -> float | None:
    """Returns the FLOP/s per device, divided by that at the point of `first_of`; `None` without a result. 1 is ideal on
    every axis."""
    first = first_of(cost, costs)
    if first is None or cost.flops_rate is None:
        return None
    assert first.flops_rate is not None
    return cost.flops_rate / first.flops_rate


def _scanned(contender: Contender) -> Contender:
    flags = (*contender.flags, "--unroll=1")
    return dataclasses.replace(contender, variant=f"{contender.variant} {_SCAN}", flags=flags)


def _compiled(contender: Contender, target: Target) -> Contender:
    return dataclasses.replace(contender, flags=(*contender.flags, f"--target={target.chip}"))
