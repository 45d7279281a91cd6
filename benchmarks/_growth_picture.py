"""Draws how the cost of a step grows, as small multiples: time, memory and compile time against each axis."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ._growth import AXES
from ._growth_run import Cost, first_of

_COLOURS = ("#2a6f97", "#dd8452", "#55a868", "#8172b3", "#c44e52", "#937860")
_GREY, _TEXT = "#b0b0b0", "#333333"
_SCALES = {"step_s": 1e3, "peak_bytes": 2.0**-30, "compile_s": 1.0}


def draw_growth(costs: Sequence[Cost], title: str, path: Path, *, modelled: bool = False) -> None:
    """Draws a column for each axis, with one row each for time, memory and compile time.

    Args:
        costs: the costs in any order; those without a result are drawn as crosses at the bottom.
        title: the title of the picture.
        path: the PNG file to write.
        modelled: whether the steps were only compiled, not run.
    """
    picture(costs, title, modelled=modelled).savefig(path, dpi=100)


def picture(costs: Sequence[Cost], title: str, *, modelled: bool = False) -> Any:
    """Returns what `draw_growth` writes, as a matplotlib figure."""
    from matplotlib.figure import Figure  # not pyplot, which may need a display
    from matplotlib.lines import Line2D

    columns = [name for name in AXES if any(c.axis == name for c in costs)]
    names = list(dict.fromkeys(c.contender for c in costs))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    labels = {
        "step_s": "modelled ms per step" if modelled else "ms per step",
        "peak_bytes": "GiB per device" + " (planned)" * modelled,
        "compile_s": "compile time, CPU s" if modelled else "compile time, s",
    }
    figure = Figure(figsize=(1.2 + 2.7 * len(columns), 7.2), layout="constrained")
    grid = figure.subplots(len(labels), len(columns), squeeze=False, sharex="col")
    for column, axis_name in enumerate(columns):
        here = [c for c in costs if c.axis == axis_name]
        for place, (what, label) in enumerate(labels.items()):
            axis = grid[place][column]
            for name, colour in colours.items():
                _line(axis, [c for c in here if c.contender == name], what, colour)
            top = axis.dataLim.ymax  # infinite without data
            axis.set_ylim(0, 1.08 * top if 0 < top < math.inf else 1)
            axis.set_xlim(0, 1.04 * max(c.value for c in here))
            axis.spines[["top", "right"]].set_visible(False)
            axis.tick_params(labelsize=8, colors=_TEXT)
            if column == 0:
                axis.set_ylabel(label, fontsize=9, color=_TEXT)
        values = sorted({c.value for c in here})
        grid[0][column].set_title(axis_name, loc="left", fontsize=11, color=_TEXT)
        grid[-1][column].set_xticks(values, _spaced(values))
        grid[-1][column].set_xlabel(AXES[axis_name].grows, fontsize=9, color=_TEXT)
    handles = [Line2D([], [], color=colour, marker="o", markersize=4, label=name) for name, colour in colours.items()]
    handles.append(Line2D([], [], color=_GREY, linestyle="--", label="proportional to the FLOPs per device"))
    if any(c.failure for c in costs):
        handles.append(Line2D([], [], color=_TEXT, marker="x", linestyle="", label="no result"))
    longest = max(len(str(handle.get_label())) for handle in handles)
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=max(1, int(figure.get_figwidth() / (0.6 + 0.08 * longest))),  # inches per entry
        frameon=False,
        fontsize=9,
    )
    figure.suptitle("\n".join(textwrap.wrap(title, 38 * len(columns))), fontsize=11, color=_TEXT)
    return figure


def _line(axis: Any, line: Sequence[Cost], what: str, colour: str) -> None:
    line = sorted(line, key=lambda c: c.value)
    known = [c for c in line if getattr(c, what) is not None]
    axis.plot(
        [c.value for c in known], [getattr(c, what) * _SCALES[what] for c in known], "o-", color=colour, markersize=4
    )
    for failed in (c for c in line if c.failure):
        axis.plot(failed.value, 0, "x", color=colour, clip_on=False)
    first = first_of(known[0], line) if known and what == "step_s" else None
    if first is not None and first.flops_rate is not None:
        ideal = [1e3 * c.flops / c.devices / first.flops_rate for c in line]
        axis.plot([c.value for c in line], ideal, "--", color=_GREY, linewidth=1, zorder=0)


def _spaced(values: Sequence[int]) -> list[str]:
    """Returns the labels of ascending ticks. A tick has none if its label would overlap the next one."""
    room = 0.1 * values[-1]
    near = [after - value < room for value, after in itertools.pairwise(values)]
    return ["" if close else _short(value) for value, close in zip(values, [*near, False], strict=True)]


def _short(value: int) -> str:
    return f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value)
