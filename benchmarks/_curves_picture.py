"""Draws the loss curves of recipes and their gap to bf16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ._curves import Curve
from ._variants import HIGHLIGHTED

_TEXT, _GRID, _BASE, _OTHERS = "#333333", "#e5e5e5", "#222222", "#bbbbbb"


def draw_curves(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Draws the smoothed losses and, below, how far each is above the first curve in percent. Curves with a deliberate
    omission or mistake are dashed. If there are many, only those in `HIGHLIGHTED` have colours and names; the others
    are gray.

    Args:
        curves: the curves; the others are compared with the first.
        title: the title of the picture.
        path: the PNG file to write.
    """
    picture(curves, title).savefig(path, dpi=120)


def picture(curves: Sequence[Curve], title: str) -> Any:
    """Returns what `draw_curves` writes, as a matplotlib figure."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # not pyplot, which may need a display
    from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

    figure = Figure(figsize=(11, 7), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    width = max(1, max((len(c.steps) for c in curves), default=1) // 60)
    base, *others = curves
    colours = dict(zip(_coloured(others), colormaps["tab10"].colors, strict=False))  # pyright: ignore[reportAttributeAccessIssue]
    lows, highs = [0.0], [0.1]
    handles = []
    for curve in curves:
        if len(curve.steps) <= width:
            continue
        name = curve.variant.name
        gray = curve is not base and name not in colours
        style: dict[str, Any] = dict(
            color=_BASE if curve is base else colours.get(name, _OTHERS),
            linewidth=1.0 if gray else 1.8,
            linestyle="--" if curve.variant.wrong else "-",
            zorder=2 if gray else 3,
            label="others" if gray else name,
        )
        smooth = _smooth(curve.losses, width)
        if curve is base:
            handles += above.plot(curve.steps[width - 1 :], smooth, **style)
            continue
        # gray: losses differ by less than the width of a line, so colours would not help
        above.plot(curve.steps[width - 1 :], smooth, color=_OTHERS, linewidth=1.0, zorder=2)
        both = min(len(smooth), len(base.losses) - width + 1)
        if both <= 0:
            continue
        gap = 100 * (smooth[:both] / _smooth(base.losses, width)[:both] - 1)
        (line,) = below.plot(curve.steps[width - 1 :][:both], gap, **style)
        if not gray or all(handle.get_label() != "others" for handle in handles):
            handles.append(line)
        settled = gap[len(gap) // 5 :]  # the beginning, where losses fall fast, does not set the axis limits
        settled = settled[np.isfinite(settled)]
        lows.append(float(settled.min(initial=0)))
        highs.append(float(np.quantile(settled, 0.98)) if settled.size else 0)
    below.axhline(0, color=_BASE, linewidth=1)
    above.set_ylabel("loss, nats per token")
    above.set_yscale("log")
    above.yaxis.set_major_locator(MaxNLocator(6))
    above.yaxis.set_major_formatter(ScalarFormatter())
    above.yaxis.set_minor_formatter(NullFormatter())
    below.set(xlabel="step", ylabel=f"above {base.variant.name}, percent")
    below.set_ylim(min(lows) - 0.1, 1.15 * max(highs))
    for axis in (above, below):
        axis.grid(color=_GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    if handles:
        handles.sort(key=lambda handle: handle.get_label() == "others")
        figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)
    note = "; dashed: a deliberate omission or mistake" if any(curve.variant.wrong for curve in curves) else ""
    figure.suptitle(f"{title}\nmeans over {width} steps{note}", fontsize=11, color=_TEXT)
    return figure


def _coloured(others: Sequence[Curve]) -> list[str]:
    names = [curve.variant.name for curve in others]
    return names if len(names) <= len(HIGHLIGHTED) else [name for name in names if name in HIGHLIGHTED]


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    return np.convolve(values, np.full(width, 1 / width), mode="valid")
