"""Evaluates the rounds of a suite: a row for each contender, its rivals that do the same work, and its goals."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from ._contenders import OURS, PARTITIONER
from ._step import Row, rival
from ._suite_file import Result
from ._suite_table import Goal, SuiteWorkload

# A goal counts as reached if it is missed by at most this fraction.
GOAL_TOLERANCE = 0.005


def rows_of(workload: SuiteWorkload, results: Sequence[Result], contenders: Sequence[str] = ()) -> list[Row]:
    """Returns a row for each contender that ran. The `seconds` of a row are the medians of the successful rounds, and
    its facts are those of the first of them.

    Args:
        workload: the workload.
        results: the results, which may include those of other workloads.
        contenders: entries that select contenders, as in `SuiteWorkload.chosen`.
    """
    rows = []
    for contender in workload.chosen(contenders):
        own = [r for r in results if (r.workload, r.contender) == (workload.name, contender.name)]
        done = sorted((r for r in own if r.seconds), key=lambda r: r.round)
        if done:
            medians = tuple(statistics.median(r.seconds) for r in done)
            rows.append(Row(contender, medians, dict(done[0].facts), rounds=tuple(r.round for r in done)))
        elif own:
            rows.append(Row(contender, failure=own[0].failure))
    return rows


def same_work(row: Row, rows: Sequence[Row], family: str, workload: SuiteWorkload) -> Row | None:
    """Returns the row that a gtp_jax row is compared with: the fastest of a family with the same matmul formats and, if
    weights are gathered, the same policy; `None` if there is none. Rows of the partitioner must include the norm and
    the guard.

    Args:
        row: a row of gtp_jax.
        rows: all rows of the workload.
        family: the family of the rival.
        workload: the workload.
    """
    eligible = [r for r in rows if r.contender.guards or r.contender.family != PARTITIONER]
    return rival(row, eligible, family, any_policy=not workload.gathers)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether gtp_jax reached a goal with one policy.

    Attributes:
        goal: the goal.
        name: the name of gtp_jax's contender.
        rival: the name of the rival that it is compared with.
        ratio: the rival's median time over gtp_jax's.
        low: the smallest ratio within a round.
        high: the largest ratio within a round.
    """

    goal: Goal
    name: str
    rival: str
    ratio: float
    low: float
    high: float

    @property
    def is_reached(self) -> bool:
        """Whether the goal is reached within `GOAL_TOLERANCE`."""
        return self.ratio >= self.goal.ratio * (1 - GOAL_TOLERANCE)


def suite_verdicts(workload: SuiteWorkload, rows: Sequence[Row]) -> list[Verdict]:
    """Returns the verdicts on a workload's goals, omitting goals for which either side has no result."""
    found = []
    for goal in workload.goals:
        for row in rows:
            if not row.seconds or f"{row.contender.family} {row.contender.variant}" != goal.ours:
                continue
            if goal.rival.startswith(f"{OURS} "):
                other = _own(goal, row, rows)
            else:
                other = same_work(row, rows, goal.rival, workload)
            if other is not None:
                low, high = ratio_spread(row, other)
                ratio = other.median_s / row.median_s
                found.append(Verdict(goal, row.contender.name, other.contender.name, ratio, low, high))
    return found


def ratio_spread(row: Row, other: Row) -> tuple[float, float]:
    """Returns the smallest and the largest ratio, within one round, of the time of `other` to that of `row`; that of
    their medians if no round of both succeeded."""
    theirs = dict(zip(other.rounds, other.seconds, strict=True))
    pairs = [(theirs[n], ours) for n, ours in zip(row.rounds, row.seconds, strict=True) if n in theirs]
    ratios = [a / b for a, b in pairs] or [other.median_s / row.median_s]
    return min(ratios), max(ratios)


def _own(goal: Goal, row: Row, rows: Sequence[Row]) -> Row | None:
    for other in rows:
        named = f"{other.contender.family} {other.contender.variant}" == goal.rival
        if named and other.seconds and other.contender.policy == row.contender.policy:
            return other
    return None


def suite_summary(workloads: Sequence[SuiteWorkload], results: Sequence[Result]) -> list[dict[str, Any]]:
    """Returns the rows and verdicts of all workloads that have results, as values that can be written as JSON."""
    summary = []
    for workload in workloads:
        rows = rows_of(workload, results)
        if rows:
            summary.append(
                {
                    "workload": workload.name,
                    "title": workload.title,
                    "devices": workload.devices,
                    "rows": [_recorded(row, rows, workload) for row in rows],
                    "goals": [
                        {**dataclasses.asdict(v), "reached": v.is_reached} for v in suite_verdicts(workload, rows)
                    ],
                }
            )
    return summary


def _recorded(row: Row, rows: Sequence[Row], workload: SuiteWorkload) -> dict[str, Any]:
    entry: dict[str, Any] = {"contender": row.contender.name, "matmuls": row.contender.matmuls}
    if row.failure:
        return {**entry, "failure": row.failure}
    facts = ("planned_bytes", "peak_bytes", "reduce_dtype", "embedding_dtype", "compile_s")
    return {
        **entry,
        "median_s": row.median_s,
        "low_s": row.low_s,
        "high_s": row.high_s,
        "rounds": len(row.seconds),
        **{name: row.facts.get(name) for name in facts},
        **{f"ratio_to_{family}": suite_ratio(row, rows, family, workload) for family in ("partitioner", "fsdp2")},
    }


def suite_ratio(row: Row, rows: Sequence[Row], family: str, workload: SuiteWorkload) -> float | None:
    """Returns the speedup of a gtp_jax row over the family's fastest row that does the same work; `None` for rows of
    other families and if either has no result."""
    other = same_work(row, rows, family, workload) if row.contender.family == OURS and row.seconds else None
    return None if other is None else other.median_s / row.median_s
