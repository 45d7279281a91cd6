"""The loss curve of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ._log import HELD_OUT, Record
from ._own_file import replacing
from ._task import Baseline

_TRAIN, _HELD_OUT, _BASELINE, _TEXT = "#9db7d5", "#d1495b", "#5b8c5a", "#333333"


def draw_curve(records: list[Record], baseline: Baseline | None, unit: str, title: str, path: Path) -> None:
    """Draws the training loss and the held-out loss, and a baseline.

    Args:
        records: the records of the run's log: steps have a `loss`, evaluations a `held_out`.
        baseline: the loss to compare with, if there is one.
        unit: the unit of the losses; empty if it is unknown.
        title: the title of the figure.
        path: the PNG file to write.
    """
    from matplotlib.figure import Figure  # not pyplot, which may need a display

    train = [(r["step"], r["loss"]) for r in records if "loss" in r]
    held_out = [(r["step"], r[HELD_OUT]) for r in records if HELD_OUT in r]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    axis.plot(*zip(*train, strict=True), color=_TRAIN, linewidth=1.2, label="train") if train else None
    if held_out:
        style: dict[str, Any] = dict(color=_HELD_OUT, linestyle="none", marker="o", markersize=6, clip_on=False)
        axis.plot(*zip(*held_out, strict=True), **style, label="held out")
        step, loss = held_out[-1]
        axis.annotate(f"{loss:.2f}", (step, loss), (6, 0), textcoords="offset points", va="center", color=_HELD_OUT)
    if baseline is not None:
        label = f"{baseline.name}, {baseline.loss:.2f}"
        axis.axhline(baseline.loss, color=_BASELINE, linestyle="--", linewidth=1.5, label=label)
    axis.set(xlabel="step", ylabel=f"loss, {unit}" if unit else "loss")
    axis.set_title(title, loc="left", fontsize=11, color=_TEXT)
    axis.set_xlim(left=0)
    axis.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)
