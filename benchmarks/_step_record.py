"""A run of `gtp-jax bench step` as JSON, and what has become slower since another."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ._step import Row, ratio, workload_flops
from .contenders.workload import Workload

# Steps of one run spread by as much, and machines of one kind differ by more.
TOLERANCE = 0.03

_HOW_LONG = ("warmup", "steps")  # fields of a workload that do not change what a step is
_USUAL = {field.name: field.default for field in dataclasses.fields(Workload)}  # what runs had before there was a field


@dataclasses.dataclass(frozen=True)
class Change:
    """One figure of one contender, then and now.

    Attributes:
        name: the contender's.
        what: `step` in seconds or `memory` in bytes a device.
        then: the saved figure.
        now: this run's.
    """

    name: str
    what: str
    then: float
    now: float

    @property
    def relative(self) -> float:
        """Growth as a share of then."""
        return self.now / self.then - 1

    @property
    def is_regression(self) -> bool:
        """Returns whether it grew by more than runs differ."""
        return self.relative > TOLERANCE


def record(rows: Sequence[Row], work: Workload, device: str) -> dict[str, Any]:
    """Returns a run as JSON."""
    flops = workload_flops(work)

    def one(row: Row) -> dict[str, Any]:
        entry: dict[str, Any] = {"name": row.contender.name, **dataclasses.asdict(row.contender), **row.facts}
        entry["flags"] = list(row.contender.flags)
        if row.failure:
            return {**entry, "failure": row.failure}
        return {
            **entry,
            "median_s": row.median_s,
            "low_s": row.low_s,
            "high_s": row.high_s,
            "steps": len(row.seconds),
            "tokens_a_second_and_device": work.tokens / work.devices / row.median_s,
            "flops_a_second_and_device": flops / work.devices / row.median_s,
            "ratio_to_fsdp2": ratio(row, rows, "fsdp2"),
            "ratio_to_partitioner": ratio(row, rows, "partitioner"),
        }

    return {
        "device": device,
        "workload": dataclasses.asdict(work),
        "flops_a_step": flops,
        "contenders": [one(row) for row in rows],
    }


def changes(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[Change]:
    """Returns what both runs have measured, figure by figure.

    Raises:
        ValueError: if they are runs of different steps, on different devices, or of one contender with different flags.
    """
    _check_alike(now, then)
    before = {row["name"]: row for row in then["contenders"]}
    for row in now["contenders"]:
        flags = before.get(row["name"], row)["flags"]
        if flags != row["flags"]:
            raise ValueError(
                f"the run to compare with has {row['name']} with {' '.join(flags)}, this one with "
                f"{' '.join(row['flags'])}. Repeat it as it was."
            )
    differences = []
    for row in now["contenders"]:
        old = before.get(row["name"], {})
        for what, key in (("step", "median_s"), ("memory", "peak_bytes")):
            if row.get(key) and old.get(key):
                differences.append(Change(row["name"], what, old[key], row[key]))
    return differences


def _check_alike(now: Mapping[str, Any], then: Mapping[str, Any]) -> None:
    try:
        was, then_device = _USUAL | then["workload"], then["device"]
    except (KeyError, TypeError):
        raise ValueError("the file to compare with was not written by `gtp-jax bench step --json`.") from None
    differing = [
        f"{name} {was[name]} there, {value} here"
        for name, value in now["workload"].items()
        if name not in _HOW_LONG and was[name] != value
    ]
    if then_device != now["device"]:
        differing.append(f"{then_device} there, {now['device']} here")
    if differing:
        raise ValueError(f"the run to compare with is of another step: {'; '.join(differing)}. Repeat it as it was.")
