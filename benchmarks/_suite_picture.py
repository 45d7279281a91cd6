"""Draws a suite as bars: gtp_jax's speedup over its best rivals for each workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ._contenders import FSDP2, OURS, PARTITIONER
from ._step import Row
from ._suite_table import SuiteWorkload
from ._suite_verdicts import GOAL_TOLERANCE, ratio_spread, same_work

_COLOURS = {PARTITIONER: "#2a6f97", FSDP2: "#dd8452"}
_LABELS = {PARTITIONER: "XLA's partitioner doing the same work", FSDP2: "PyTorch FSDP2"}
_MISSED, _TEXT, _FAINT = "#c1121f", "#333333", "#8c8c8c"
_HEIGHT = 0.36  # the height of a bar, in units of the distance between lines


def draw_suite(rows: Sequence[tuple[SuiteWorkload, Sequence[Row]]], title: str, path: Path) -> None:
    """Draws the ratios of gtp_jax's rows to the fastest rivals that do the same work.

    A bar starts at 1, where both are equally fast. Whiskers extend from the smallest to the largest ratio within a
    round, and a tick marks the goal. Rows without a rival's result are omitted.

    Args:
        rows: the rows of each workload, as returned by `rows_of`.
        title: the title of the picture.
        path: the PNG file to write.
    """
    from matplotlib.figure import Figure  # not pyplot, which may need a display
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    lines = [
        (workload, row, bars)
        for workload, of_workload in rows
        for row in of_workload
        if row.contender.family == OURS and row.seconds and (bars := _bars(workload, row, of_workload))
    ]
    figure = Figure(figsize=(10, 1.9 + 0.62 * max(1, len(lines))), layout="constrained")
    axis = figure.subplots()
    low, high = 0.95, 1.05
    for place, (workload, row, bars) in enumerate(lines):
        for offset, (family, (ratio, least, most)) in zip(_offsets(len(bars)), bars.items(), strict=True):
            y = place + offset
            goal = _goal(workload, row, family)
            missed = goal is not None and ratio < goal * (1 - GOAL_TOLERANCE)
            axis.barh(y, ratio - 1, left=1, color=_COLOURS[family], height=_HEIGHT)
            axis.plot([least, most], [y, y], color=_TEXT, linewidth=1, solid_capstyle="butt")
            if goal is not None:
                axis.plot([goal] * 2, [y - 0.6 * _HEIGHT, y + 0.6 * _HEIGHT], color=_TEXT, linewidth=2.2)
            end = max(ratio, most, goal or 1, 1)
            axis.annotate(
                f"{ratio:.3f}",
                (end, y),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
                color=_MISSED if missed else _TEXT,
                fontweight="bold" if missed else "normal",
            )
            low, high = min(low, least), max(high, end)
    labels = [f"{w.title}\n{r.contender.variant}{_policy(w, r)}, {1e3 * r.median_s:.4g} ms" for w, r, _ in lines]
    axis.set_yticks(range(len(lines)), labels, fontsize=8.5, color=_TEXT)
    axis.set_ylim(max(len(lines), 1) - 0.4, -0.6)
    room = 0.06 * (high - low)
    axis.set_xlim(low - room, high + 2.5 * room)
    axis.axvline(1, color=_FAINT, linewidth=1)
    axis.xaxis.grid(True, color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel(
        "the rival's time over gtp_jax's: above 1, gtp_jax is faster; red if a goal is missed",
        fontsize=9,
        color=_TEXT,
    )
    axis.spines[["top", "right", "left"]].set_visible(False)
    shown = [family for family in _COLOURS if any(family in bars for _, _, bars in lines)]
    handles: list[Patch | Line2D] = [Patch(color=_COLOURS[family], label=_LABELS[family]) for family in shown]
    handles.append(Line2D([], [], color=_TEXT, linewidth=1, label="smallest to largest ratio of a round"))
    handles.append(
        Line2D([], [], color=_TEXT, marker="|", markersize=9, markeredgewidth=2.2, linestyle="", label="goal")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5)
    figure.suptitle(title, fontsize=11, color=_TEXT)
    figure.savefig(path, dpi=120)


def _bars(workload: SuiteWorkload, row: Row, rows: Sequence[Row]) -> dict[str, tuple[float, float, float]]:
    """Returns, for each family with a result, the time of its fastest row that does the same work, divided by the time
    of `row`; and the smallest and the largest of these ratios within a round."""
    others = {family: same_work(row, rows, family, workload) for family in _COLOURS}
    return {f: (other.median_s / row.median_s, *ratio_spread(row, other)) for f, other in others.items() if other}


def _offsets(count: int) -> list[float]:
    return [_HEIGHT * (i - (count - 1) / 2) for i in range(count)]


def _goal(workload: SuiteWorkload, row: Row, family: str) -> float | None:
    named = f"{row.contender.family} {row.contender.variant}"
    return next((goal.ratio for goal in workload.goals if (goal.ours, goal.rival) == (named, family)), None)


def _policy(workload: SuiteWorkload, row: Row) -> str:
    return f" {row.contender.policy}" if workload.gathers else ""
