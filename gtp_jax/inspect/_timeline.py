"""Draws a modelled timeline: a compute lane and a communication lane, with exposed communication in red."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..hlo import Span, Timeline, quantity

_COLOURS = {
    "matmul": "#4c72b0",
    "attention": "#8172b3",
    "elementwise": "#b8b8b8",
    "all-gather": "#55a868",
    "reduce-scatter": "#dd8452",
}
_OTHER = "#937860"
_EXPOSED = "#d62728"
_SPANS_A_ROW = 40  # elementwise work not counted
_MAX_ROWS = 8
_LANES = {"compute": 1, "communication": 0}


def draw(line: Timeline, title: str, path: Path) -> None:
    """Draws a timeline, wrapped into rows like text.

    Args:
        line: the timeline.
        title: the first line of the picture's heading.
        path: the PNG file to write.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    counted = sum(span.event.kind != "elementwise" for span in line.spans)
    rows = max(1, min(_MAX_ROWS, -(-counted // _SPANS_A_ROW)))
    width_ms = max(line.total_us, 1e-3) / rows / 1e3
    figure = Figure(figsize=(16, 1.6 + 1.35 * rows), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False)[:, 0]
    for row, axis in enumerate(axes):
        for span in line.spans:
            _bar(axis, span)
        axis.set(xlim=(row * width_ms, (row + 1) * width_ms), ylim=(-0.55, 1.55))
        axis.set_yticks(list(_LANES.values()), list(_LANES))
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("modelled time, ms")
    kinds = dict.fromkeys(span.event.kind for span in line.spans)
    legend = [Patch(color=_COLOURS.get(kind, _OTHER), label=kind) for kind in kinds]
    legend.append(Patch(color=_EXPOSED, label="exposed: the compute lane waits"))
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    loops = (
        "; a loop is drawn as one iteration, at its whole length" if any(s.event.times > 1 for s in line.spans) else ""
    )
    beyond = "" if line.network is None else f", between hosts at {quantity(line.network.rate, 'B/s')}"
    rates = ", ".join(f"{kind} at {quantity(rate.value, rate.unit)}" for kind, rate in line.rates.items())
    figure.suptitle(
        f"{title}\nmodelled, not measured: {rates}\n"
        f"collectives at {quantity(line.link_rate.value, 'B/s')}{beyond}{loops}\n"
        f"compute {seconds(line.compute_us)}, communication {seconds(line.communication_us)}, "
        f"exposed {seconds(line.exposed_us)}",
        fontsize="medium",
    )
    figure.savefig(path, format="png", dpi=110)


def seconds(duration_us: float) -> str:
    """Returns a duration with a readable unit, such as `5.30 ms`."""
    return quantity(duration_us / 1e6, "s")


def _bar(axis: Any, span: Span) -> None:
    left, width = span.start_us / 1e3, (span.end_us - span.start_us) / 1e3
    line = 0.0 if span.event.kind == "elementwise" else 0.4  # many kernels are thinner than a line
    shared = {"y": _LANES[span.lane], "height": 0.8, "edgecolor": "white", "linewidth": line}
    axis.barh(left=left, width=width, color=_COLOURS.get(span.event.kind, _OTHER), **shared)
    if span.exposed_us:
        exposed = min(span.exposed_us, span.end_us - span.start_us) / 1e3
        axis.barh(left=left + width - exposed, width=exposed, color=_EXPOSED, **shared)
