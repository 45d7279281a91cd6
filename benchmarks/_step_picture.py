"""Draws a step's rate for each contender as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ._contenders import BOUND, FSDP2, OURS, PARTITIONER, TE
from ._step import Row

_COLOURS = {OURS: "#2a6f97", FSDP2: "#dd8452", PARTITIONER: "#8c8c8c", TE: "#55a868", BOUND: "#d9d9d9"}
_PANELS = {"regather": "weights gathered again in backward", "keep": "weights kept for backward"}
_TEXT = "#333333"


def draw_steps(rows: Sequence[Row], flops_a_device: float, title: str, path: Path) -> None:
    """Draws FLOP/s per device, one panel per policy. Whiskers extend from the slowest to the fastest step.

    Args:
        rows: the rows of a run; for those that failed, the reason replaces the bar.
        flops_a_device: the FLOPs per step and device.
        title: the title of the picture.
        path: the PNG file to write.
    """
    from matplotlib.figure import Figure  # not pyplot, which may need a display
    from matplotlib.patches import Patch

    panels = {p: [r for r in rows if r.contender.policy in (p, "")] for p in _PANELS}
    panels = {p: of_panel for p, of_panel in panels.items() if any(r.contender.policy for r in of_panel)} or {
        "": list(rows)
    }
    count = max(1, max(map(len, panels.values())))
    figure = Figure(figsize=(7.5 * len(panels), 1.9 + 0.36 * count), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharex=True)[0]
    for axis, (policy, shown) in zip(axes, panels.items(), strict=True):
        labels = []
        for place, row in enumerate(shown):
            labels.append(f"{row.contender.family} {row.contender.variant}".strip())
            if row.failure:
                axis.text(0, place, f" {row.failure}", va="center", fontsize=7, color=_TEXT, clip_on=True)
                continue
            rate, low, high = (flops_a_device / s / 1e12 for s in (row.median_s, row.high_s, row.low_s))
            axis.barh(place, rate, color=_COLOURS[row.contender.family], height=0.72)
            axis.plot([low, high], [place, place], color=_TEXT, linewidth=1)
            axis.text(high, place, f"  {rate:.3g}", va="center", fontsize=9, color=_TEXT)
        axis.set_yticks(range(len(shown)), labels, fontsize=9)
        axis.invert_yaxis()
        axis.set_xlabel("TFLOP/s per device, median step")
        axis.set_title(_PANELS.get(policy, ""), loc="left", fontsize=10, color=_TEXT)
        axis.spines[["top", "right"]].set_visible(False)
    top = max((flops_a_device / r.low_s / 1e12 for r in rows if not r.failure), default=1)
    axes[0].set_xlim(0, top * 1.15)
    families = dict.fromkeys(r.contender.family for r in rows)
    handles = [Patch(color=_COLOURS[f], label=f) for f in families]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title, fontsize=11, color=_TEXT)
    figure.savefig(path, dpi=110)
