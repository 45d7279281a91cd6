"""Draws the timeline of a trace, as a picture and as an interactive page."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

from ._breakdown import EXPOSED, IDLE, Breakdown
from ._trace import Op

COLOURS = {
    "matmul": "#4c72b0",
    "attention": "#8172b3",
    "elementwise": "#64b5cd",
    "copies": "#937860",
    "quantization": "#ccb974",
    "all-gather": "#55a868",
    "reduce-scatter": "#dd8452",
    "other collective": "#da8bc3",
    EXPOSED: "#d62728",
    IDLE: "#e6e6e6",
}
_LIGHT = ("elementwise", "quantization", "other collective", IDLE)
_ROWS = 4
_LANES = {"compute": 1.0, "communication": 0.0}


def draw_trace(ops: Sequence[Op], breakdown: Breakdown, title: str, path: Path) -> None:
    """Draws the shares of time as a bar, and below it the step in rows of two lanes, with exposed communication in red.

    Args:
        ops: the kernels of one device.
        breakdown: the breakdown of these kernels.
        title: the title of the picture.
        path: the PNG file to write.
    """
    from matplotlib.figure import Figure  # not pyplot, which may open a display
    from matplotlib.patches import Patch

    figure = Figure(figsize=(16, 2.6 + 1.5 * _ROWS), layout="constrained")
    top, *rows = figure.subplots(_ROWS + 1, 1)
    _draw_shares(top, breakdown)
    width = breakdown.total_us / _ROWS
    for number, axis in enumerate(rows):
        left, right = number * width, (number + 1) * width
        for kind in dict.fromkeys(op.kind for op in ops):
            shown = [op for op in ops if op.kind == kind and op.end_us > left and op.start_us < right]
            lane = "communication" if shown and shown[0].is_collective else "compute"
            spans = [(op.start_us / 1e3, (op.end_us - op.start_us) / 1e3) for op in shown]
            axis.broken_barh(spans, (_LANES[lane], 0.8), facecolors=COLOURS[kind])
        bare = [(a / 1e3, (b - a) / 1e3) for a, b in breakdown.exposed if b > left and a < right]
        axis.broken_barh(bare, (_LANES["communication"], 0.8), facecolors=COLOURS[EXPOSED])
        axis.set(xlim=(left / 1e3, right / 1e3), ylim=(-0.2, 2.0))
        axis.set_yticks([y + 0.4 for y in _LANES.values()], list(_LANES))
        axis.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlabel("ms")
    kinds = [k for k in COLOURS if k in breakdown.by_kind or any(op.kind == k for op in ops)]
    handles = [Patch(color=COLOURS[k], label=k) for k in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(f"{title}\n{sentence(breakdown)}", fontsize="medium")
    figure.savefig(path, dpi=100)


def _draw_shares(axis, breakdown: Breakdown) -> None:
    left = 0.0
    for kind in COLOURS:
        share = breakdown.share(kind)
        axis.barh(0, share, left=left, color=COLOURS[kind], edgecolor="white", linewidth=0.5)
        if share > 0.025:
            colour = "black" if kind in _LIGHT else "white"
            axis.text(left + share / 2, 0, f"{share:.1%}", ha="center", va="center", fontsize=9, color=colour)
        left += share
    axis.set(xlim=(0, 1), ylim=(-0.5, 0.5), xticks=[])
    axis.set_yticks([0], ["share of the step"])
    axis.tick_params(length=0)
    axis.spines[["top", "right", "left", "bottom"]].set_visible(False)


def sentence(breakdown: Breakdown) -> str:
    """Returns the totals of a breakdown as one line, for a heading."""
    hidden = breakdown.communication_us - breakdown.exposed_us
    return (
        f"{breakdown.total_us / 1e3:.2f} ms; communication {breakdown.communication_us / 1e3:.2f} ms, of which "
        f"{hidden / 1e3:.2f} ms under compute and {breakdown.exposed_us / 1e3:.2f} ms exposed "
        f"({breakdown.share(EXPOSED):.1%} of the step); idle {breakdown.by_kind.get(IDLE, 0.0) / 1e3:.2f} ms"
    )


def write_page(ops: Sequence[Op], breakdown: Breakdown, title: str, path: Path) -> None:
    """Writes a self-contained page with one lane per stream: zoom with the wheel, drag, and hover for names.

    Args:
        ops: the kernels of one device.
        breakdown: the breakdown of these kernels.
        title: the title of the page.
        path: the HTML file to write.
    """
    names = list(dict.fromkeys(op.name for op in ops))
    streams = sorted({op.stream for op in ops}, key=lambda s: min(op.start_us for op in ops if op.stream == s))
    kinds = list(COLOURS)
    place, lane, kind = ({x: i for i, x in enumerate(xs)} for xs in (names, streams, kinds))
    data = {
        "names": names,
        "streams": streams,
        "kinds": kinds,
        "colours": [COLOURS[k] for k in kinds],
        "shares": [breakdown.share(k) for k in kinds],
        "total": breakdown.total_us,
        "exposed": breakdown.exposed,
        "ops": [
            (place[op.name], kind[op.kind], lane[op.stream], round(op.start_us, 3), round(op.end_us, 3)) for op in ops
        ],
    }
    page = Path(__file__).with_name("timeline.html").read_text()
    for mark, text in (
        ("{{title}}", html.escape(title)),
        ("{{sentence}}", html.escape(sentence(breakdown))),
        ("{{data}}", json.dumps(data).replace("</", "<\\/")),
    ):
        page = page.replace(mark, text)
    path.write_text(page)
