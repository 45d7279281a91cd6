"""Draws the times of saving and restoring as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ._checkpoint import CheckpointTimes

_COLOURS = {"gtp_jax": "#2a6f97", "orbax": "#8c8c8c"}
_OTHER, _SUMS, _TEXT = "#dd8452", "#d1495b", "#333333"
_PANELS = {
    "blocked": "training blocked",
    "saved": "saved (red: waiting for checksums)",
    "restored": "restored (red: waiting for checksums)",
    "moved": "restored on another mesh",
}
_CHECKSUMS = {"saved": "save_checksums", "restored": "restore_checksums"}


def draw_checkpoints(done: Sequence[CheckpointTimes], title: str, path: Path) -> None:
    """Draws median seconds, one panel per operation. Whiskers extend from the fastest to the slowest round. The first
    round counts only if it is the only one.

    Args:
        done: the times of the contenders; each has one bar per panel.
        title: the title of the picture.
        path: the PNG file to write.
    """
    from matplotlib.figure import Figure  # not pyplot, which may need a display

    panels = [what for what in _PANELS if any(getattr(times, what) for times in done)] or ["saved"]
    figure = Figure(figsize=(3.4 * len(panels) + 1, 1.5 + 0.45 * len(done)), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for axis, what in zip(axes, panels, strict=True):
        top = 0.0
        for place, times in enumerate(done):
            median = times.median(what)
            if median is None:
                axis.text(0, place, " no result", va="center", fontsize=8, color=_TEXT)
                continue
            seconds = getattr(times, what)[1:] or getattr(times, what)
            axis.barh(place, median, color=_COLOURS.get(times.who, _OTHER), height=0.7)
            sums = times.median(_CHECKSUMS.get(what, "save_checksums")) if what in _CHECKSUMS else None
            if sums:
                axis.barh(place, sums, left=median - sums, color=_SUMS, height=0.7)
            axis.plot([min(seconds), max(seconds)], [place, place], color=_TEXT, linewidth=1)
            axis.text(max(seconds), place, f"  {median:.3g}", va="center", fontsize=9, color=_TEXT)
            top = max(top, *seconds)
        axis.set_xlim(0, 1.25 * top or 1)
        axis.set_yticks(range(len(done)), [times.who for times in done], fontsize=9)
        axis.set_xlabel("seconds")
        axis.set_title(_PANELS[what], loc="left", fontsize=9, color=_TEXT)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    figure.suptitle(title, fontsize=11, color=_TEXT)
    figure.savefig(path, dpi=110)
