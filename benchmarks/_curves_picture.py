"""Draws the loss curves of recipes and their gap to bf16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ._curves import Curve

_TEXT, _GRID = "#333333", "#e5e5e5"


def draw_curves(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Draws the smoothed losses and, below, how far each is above the first curve in percent. Curves with a deliberate
    omission or mistake are dashed.

    Args:
        curves: the curves; the others are compared with the first.
        title: the title of the picture.
        path: the PNG file to write.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # not pyplot, which may need a display
    from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

    figure = Figure(figsize=(11, 8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.2))
    width = max(1, max((len(c.steps) for c in curves), default=1) // 60)
    base = curves[0]
    colours = colormaps["tab10"].colors + colormaps["Dark2"].colors  # pyright: ignore[reportAttributeAccessIssue]
    lows, highs = [0.0], [0.1]
    for index, curve in enumerate(curves):
        if len(curve.steps) <= width:
            continue
        colour = "#222222" if index == 0 else colours[(index - 1) % len(colours)]
        style = dict(color=colour, linewidth=1.4, linestyle="--" if curve.variant.wrong else "-")
        smooth = _smooth(curve.losses, width)
        above.plot(curve.steps[width - 1 :], smooth, label=curve.variant.name, **style)
        both = min(len(smooth), len(base.losses) - width + 1)
        if index and both > 0:
            gap = 100 * (smooth[:both] / _smooth(base.losses, width)[:both] - 1)
            below.plot(curve.steps[width - 1 :][:both], gap, **style)
            settled = gap[len(gap) // 5 :]  # the beginning, where losses fall fast, does not set the axis limits
            settled = settled[np.isfinite(settled)]
            lows.append(float(settled.min(initial=0)))
            highs.append(float(np.quantile(settled, 0.98)) if settled.size else 0)
    below.axhline(0, color="#222222", linewidth=1)
    above.set_ylabel("loss, nats per token")
    above.set_yscale("log")
    above.yaxis.set_major_locator(MaxNLocator(8))
    above.yaxis.set_major_formatter(ScalarFormatter())
    above.yaxis.set_minor_formatter(NullFormatter())
    below.set(xlabel="step", ylabel=f"above {base.variant.name}, percent")
    below.set_ylim(min(lows) - 0.1, 1.15 * max(highs))
    for axis in (above, below):
        axis.grid(color=_GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    if above.get_legend_handles_labels()[0]:
        figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    figure.suptitle(
        f"{title}\nmeans over {width} steps; dashed: a deliberate omission or mistake", fontsize=11, color=_TEXT
    )
    figure.savefig(path, dpi=120)


def _smooth(values: np.ndarray, width: int) -> np.ndarray:
    return np.convolve(values, np.full(width, 1 / width), mode="valid")
