"""Records a run of `gtp-jax bench step` as JSON, and compares it with an earlier run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ._step import Row, ratio, workload_flops
from .contenders.workload import Workload

# A figure that grew by more than this fraction is a regression. Steps within one run vary by about as much; machines of
# one kind differ by more.
TOLERANCE = 0.03

_HOW_LONG = ("warmup", "steps")  # fields of a workload that do not change the step itself
_USUAL = {field.name: field.default for field in dataclasses.fields(Workload)}  # used for fields missing in older files


@dataclasses.dataclass(frozen=True)
class Change:
    """One figure of one contender, before and now.

    Attributes:
        name: the name of the contender.
        what: the figure: `step` in seconds, or `memory` in bytes per device.
        then: the value in the saved run.
        now: the value in this run.
    """

    name: str
    what: str
    then: float
    now: float

    @property
    def relative(self) -> float:
        """The relative growth, as a fraction of `then`."""
        return self.now / self.then - 1

    @property
    def is_regression(self) -> bool:
        """Whether the figure grew by more than `TOLERANCE`."""
        return self.relative > TOLERANCE


def record(rows: Sequence[Row], work: Workload, device: str) -> dict[str, Any]:
    """Returns a run as a dict that can be written as JSON."""
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
            "ratio_to_te": ratio(row, rows, "te"),
        }

    return {
        "device": device,
        "workload": dataclasses.asdict(work),
        "flops_a_step": flops,
        "contenders": [one(row) for row in rows],
    }


def changes(now: Mapping[str, Any], then: Mapping[str, Any]) -> list[Change]:
    """Returns a change for each figure that both runs have measured.

    Args:
        now: this run, as `record` returns it.
        then: the saved run.

    Raises:
        ValueError: if the runs differ in the step, the device, or the flags of a contender, or if `then` was not
            written by `gtp-jax bench step --json`.
    """
    _check_alike(now, then)
    before = {row["name"]: row for row in then["contenders"]}
    for row in now["contenders"]:
        flags = before.get(row["name"], row)["flags"]
        if flags != row["flags"]:
            raise ValueError(
                f"the saved run started {row['name']} with {' '.join(flags) or 'no flags'}, but this run uses "
                f"{' '.join(row['flags']) or 'none'}. Use the same flags."
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
        raise ValueError(
            "the file of `--compare` was not written by `gtp-jax bench step --json`. Give one that was."
        ) from None
    differing = [
        f"{name} {was[name]} there, {value} here"
        for name, value in now["workload"].items()
        if name not in _HOW_LONG and was[name] != value
    ]
    if then_device != now["device"]:
        differing.append(f"{then_device} there, {now['device']} here")
    if differing:
        raise ValueError(f"the saved run timed another step: {'; '.join(differing)}. Use the same settings.")
