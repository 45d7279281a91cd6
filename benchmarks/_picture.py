"""Draws the rates of kernels as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ._kernels import Measurement

_REACHED, _MISSED, _PLAIN, _LINE, _TEXT = "#5b8c5a", "#d1495b", "#4c78a8", "#555555", "#333333"


def draw_ratios(measurements: Sequence[Measurement], goal: float | None, title: str, path: Path) -> None:
    """Draws each kernel's rate as a fraction of the copy's, in red if it is below the goal.

    Args:
        measurements: the measurements, one bar each, from the top.
        goal: the goal, drawn as a dashed line; `None` for no line and no red bars.
        title: the title of the picture.
        path: the PNG file to write.
    """
    from matplotlib.figure import Figure  # not pyplot, which may need a display

    figure = Figure(figsize=(9, 1.2 + 0.24 * len(measurements)), layout="constrained")
    axis = figure.subplots()
    shares = [m.of_copy for m in measurements]
    colors = [_PLAIN if goal is None else _REACHED if s >= goal else _MISSED for s in shares]
    bars = axis.barh(range(len(shares)), shares, color=colors, height=0.7)
    axis.bar_label(bars, [f"{s:.0%}" for s in shares], padding=3, fontsize=8, color=_TEXT)
    labels = [f"{m.kernel.name}, {m.dtype}, {m.size} MiB" for m in measurements]
    axis.set_yticks(range(len(shares)), labels, fontsize=8)
    axis.invert_yaxis()
    if goal is not None:
        axis.axvline(goal, color=_LINE, linestyle="--", linewidth=1.2, label=f"{goal:.0%} of a copy")
        axis.legend(frameon=False, loc="lower right")
    axis.set_xlabel("rate of the bytes that must move, relative to a device-to-device copy")
    axis.set_title(title, loc="left", fontsize=11, color=_TEXT)
    axis.set_xlim(0, max(1.05, *shares) * 1.08 if shares else 1)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
