"""Writes the report of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from ... import hlo
from ...hlo import columns
from ._account import goodput
from ._log import Record
from ._loop import Outcome
from ._text_block import block


def report(
    causes: Mapping[str, float], memory: hlo.Memory, results: Sequence[tuple[str, str]], outcome: Outcome
) -> str:
    """Returns tables of where the time went, of memory and of results.

    Args:
        causes: the seconds of all attempts, by cause.
        memory: the memory of the step, in bytes per device.
        results: the rows of the results.
        outcome: how the loop ended.
    """
    parts = [_times(causes), memory.table(), columns(("result", ""), results)]
    if outcome.sample:
        written = f"what the model writes{measured_at(outcome.sample_step, outcome)}"
        parts.append(f"{written}\n\n{block(outcome.sample)}")
    return "\n\n".join(parts)


def _times(causes: Mapping[str, float]) -> str:
    whole = max(1e-9, sum(causes.values()))
    rows = [(name, f"{s:.1f}", f"{s / whole:.1%}") for name, s in sorted(causes.items(), key=lambda item: -item[1])]
    rows.append(("goodput", "", f"{goodput(dict(causes)):.1%}"))
    return columns(("time, all attempts", "s", ""), rows, right=(1, 2))


def train_loss(records: Sequence[Record], unit: str) -> list[tuple[str, str]]:
    """Returns the row of the training loss; none without steps."""
    last = [record["loss"] for record in records if "loss" in record][-10:]
    if not last:
        return []
    named = f" {unit}" if unit else ""
    return [("train loss", f"{sum(last) / len(last):.3f}{named}, mean of the last {len(last)} steps")]


def speed(outcome: Outcome, unit: str) -> list[tuple[str, str]]:
    """Returns the row of the speed; none if it is unknown."""
    return [("speed", f"{outcome.speed:,.0f} {unit}/s")] if outcome.speed else []


def last_of(records: Sequence[Record], name: str) -> tuple[int, float] | None:
    """Returns the last step at which a number was logged, and the number; `None` if it never was."""
    return next(((record["step"], record[name]) for record in reversed(records) if name in record), None)


def measured_at(step: int, outcome: Outcome) -> str:
    """Returns where a loss was measured, unless it was after the last step."""
    return "" if step == outcome.step else f" (at step {step}; not measured since)"


def mesh_in_words(mesh: Mesh) -> str:
    """Returns the degrees of a mesh, such as `gtp 4 x tp 2`."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
