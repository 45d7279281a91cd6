"""Draws a timeline of a supervised run: what each device did, and how many steps had been made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..trainer import Event
from ._events import PARTS

_COLOURS = {
    "training": "#2a6f97",
    "detection": "#c44e52",
    "start": "#b0b0b0",
    "restore": "#55a868",
    "compile": "#dd8452",
    "step": "#8172b3",
    "lost": "#333333",
}
_LABELS = {
    "detection": "detection, probes",
    "start": "start of processes",
    "restore": "restore from memory",
    "step": "first step",
    "lost": "device left out",
}
_TEXT = "#333333"


@dataclasses.dataclass(frozen=True)
class Span:
    """An interval in which a device did one thing.

    Attributes:
        device: the device number.
        what: the activity, a key of the legend.
        begin: the start of the interval, in seconds since the run began.
        end: the end of the interval, in seconds since the run began.
    """

    device: int
    what: str
    begin: float
    end: float


def spans_of(events: Sequence[Event]) -> list[Span]:
    """Returns the intervals of all devices, derived from a supervisor's events."""
    zero = events[0]["time"]
    spans: list[Span] = []
    devices: list[int] = []
    dropped: list[int] = []
    lost: dict[int, float] = {}
    began = trained = last_sign = None
    for event in events:
        now, name = event["time"] - zero, event["event"]
        if name == "fleet":
            devices, began, trained = event["devices"], now, None
            for device in [d for d in lost if d in devices]:
                spans.append(Span(device, "lost", lost.pop(device), now))
        elif name == "training":
            if not spans and began is not None:  # a later fleet's start is a part of the recovery that it ends
                spans += [Span(d, "start", began, now) for d in devices]
            trained, last_sign = now, None
        elif name == "recovered":
            at = now - event["total_s"]
            for part in PARTS:
                what = part.removesuffix("_s")
                if what != "detection":
                    spans += [Span(d, what, at, at + event[part]) for d in devices]
                at += event[part]
        elif name == "failure":
            last_sign = event["last_sign"] - zero
        elif name in ("fleet ended", "end"):
            until = now if last_sign is None else last_sign
            if trained is not None:
                spans += [Span(d, "training", trained, until) for d in devices]
            elif began is not None:  # it failed before its first step
                spans += [Span(d, "start", began, until) for d in devices]
            began = trained = None
        elif name == "verdict" and last_sign is not None:
            spans += [Span(d, "detection", last_sign, now) for d in devices]
            lost.update((device, now) for device in dropped)
            dropped = []
        elif name == "lost":
            dropped.append(event["device"])
    last = events[-1]["time"] - zero
    return spans + [Span(device, "lost", since, last) for device, since in lost.items()]


def draw_timeline(events: Sequence[Event], path: Path) -> None:
    """Draws a row for each device and, below the rows, the number of steps over time.

    Args:
        events: a supervisor's events.
        path: the PNG file to write.

    Raises:
        ValueError: if there are no events.
    """
    if not events:
        raise ValueError("there are no events to draw: the run has not started.")
    from matplotlib.figure import Figure  # not pyplot, which may need a display
    from matplotlib.patches import Patch

    names = next((event["devices"] for event in events if event["event"] == "start"), [])
    spans = spans_of(events)
    figure = Figure(figsize=(9.0, 2.4 + 0.3 * len(names)), layout="constrained")
    rows, steps = figure.subplots(2, 1, sharex=True, height_ratios=[0.3 * len(names) + 0.3, 1.4])
    for span in spans:
        width = max(0.0, span.end - span.begin)
        rows.barh(span.device, width, left=span.begin, color=_COLOURS[span.what], height=0.7)
    rows.set_yticks(range(len(names)), names, fontsize=8)
    rows.invert_yaxis()
    used = [what for what in _COLOURS if any(span.what == what for span in spans)]
    handles = [Patch(color=_COLOURS[what], label=_LABELS.get(what, what)) for what in used]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8)
    _draw_steps(steps, events)
    rows.set_xlim(0, events[-1]["time"] - events[0]["time"])
    for axis in (rows, steps):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8, colors=_TEXT)
    figure.savefig(path, dpi=120)


def _draw_steps(axis: Any, events: Sequence[Event]) -> None:
    zero = events[0]["time"]
    known = {"training": "step", "snapshot": "fleet_step", "fleet ended": "step", "end": "step"}
    pieces: list[list[tuple[float, int]]] = [[]]
    for event in events:
        if event["event"] == "fleet":
            pieces.append([])
        if event["event"] in known and known[event["event"]] in event:
            pieces[-1].append((event["time"] - zero, event[known[event["event"]]]))
    for piece in pieces:
        if piece:
            axis.plot(*zip(*piece, strict=True), color=_COLOURS["training"])
    snapshots = [(e["time"] - zero, e["step"]) for e in events if e["event"] == "snapshot"]
    if snapshots:
        axis.plot(*zip(*snapshots, strict=True), ".", color=_COLOURS["restore"], markersize=5, label="snapshot")
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    axis.set_ylabel("steps", fontsize=9, color=_TEXT)
    axis.set_xlabel("seconds since the start", fontsize=9, color=_TEXT)
