"""Draws the pictures of docs/how-it-works.md from what the code says of itself.

    python -m docs.pictures.how_it_works          # some two minutes; the last picture needs the extra `target`

The life of a weight comes from the table of `gtp_jax.weights`, the schedule from the planner, the rooms from the layers
in pyproject.toml, and the timeline from a step that is compiled for eight H200s.
"""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch, Rectangle
from PIL import Image  # matplotlib needs it

import gtp_jax.weights
from gtp_jax.chain import Barrier, Compute, Event, Gather, Reduce, Schedule, plan
from gtp_jax.inspect import InspectOptions, inspect
from gtp_jax.runner.flags import ModelSizes, Parallelism
from tests.structure.sizes import lines_of

ROOT = Path(__file__).parents[2]
COMPUTE, GATHER, REDUCE, ATTENTION, WAITS = "#4c72b0", "#55a868", "#dd8452", "#8172b3", "#d62728"
_TEXT, _GRAY, _BAND = "#222222", "#777777", "#f3f3f3"
_WIDTH = 8.5  # inches; at 200 dots an inch, GitHub shows a page's width of it at half its size
_POINTS: dict[str, Any] = dict(textcoords="offset points")
_WORD = re.compile(r"`([\w.]+)")


def life() -> list[dict[str, str]]:
    """Returns the rows of the table in [Note: life of a weight]."""
    rows = [line.strip("| ").split(" | ") for line in (gtp_jax.weights.__doc__ or "").splitlines() if line[:2] == "| "]
    head, *body = [[cell.strip() for cell in row] for row in rows]
    return [dict(zip(head, row + [""] * (len(head) - len(row)), strict=True)) for row in body]


def groups(events: Sequence[Event]) -> list[list[Event]]:
    """Returns the events that happen at the same time, group by group. A layer's own gather comes before the layer."""
    between: list[list[Event]] = [[]]
    for event in events:
        between.append([]) if isinstance(event, Barrier) else between[-1].append(event)
    found = []
    for group in between:
        computed = {event.layer for event in group if isinstance(event, Compute)}
        before = [event for event in group if isinstance(event, Gather) and event.layer in computed]
        found += [before, [event for event in group if event not in before]]
    return [group for group in found if group]


def rooms() -> list[list[tuple[str, int, str]]]:
    """Returns the layers of the import contracts from the top: the name of each room, its lines of code and its
    purpose."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[_room(name.strip()) for name in layer.split("|")] for layer in layers]


def _room(name: str) -> tuple[str, int, str]:
    folder = ROOT / name.replace(".", "/")
    said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    purpose = re.split(r"\.(?:\s|$)", said.split("\n\n")[0])[0].replace("\n", " ").replace("`", "")
    return name.removeprefix("gtp_jax."), lines_of(sorted(folder.rglob("*.py"))), purpose


def draw_life(path: Path) -> None:
    """Draws the states of a weight from storage to the gradient of the shards, and the update that ends them."""
    rows = [*life(), {"state": "updated", "type": "`optax`", "made by": "`train`", "when": "per step"}]
    columns = len(rows) // 2
    figure, axis = _canvas(_WIDTH, 3.6, columns, 2.0)
    places = [(i, 1.0) for i in range(columns)] + [(columns - 1 - i, 0.0) for i in range(columns)]
    for row, (x, y) in zip(rows, places, strict=True):
        colour = {"gathered": GATHER, "reduced": REDUCE, "gradient": COMPUTE}.get(row["state"], _GRAY)
        axis.add_patch(_box(x + 0.06, y + 0.1, 0.84, 0.78, colour))
        kind = None if row["type"].startswith("an array") else _WORD.search(row["type"])
        maker = _WORD.search(row["made by"])
        when = textwrap.fill(row["when"].replace("`", ""), 21)
        for text, down, style in (
            (row["state"], 0.14, dict(size=8.8, weight="bold", color=_TEXT)),
            (kind[1] if kind else "array", 0.31, dict(size=8, family="monospace", color=_TEXT)),
            (maker[1] if maker else row["made by"], 0.45, dict(size=7.2, color=_GRAY)),
            (when, 0.63, dict(size=7.2, color=_TEXT)),
        ):
            axis.text(x + 0.48, y + 0.88 - down, text, ha="center", va="center", **style)
    for (x, y), (next_x, next_y) in zip(places, [*places[1:], places[0]], strict=True):
        if y == next_y:
            step = 1 if next_x > x else -1
            begin, end = (x + 0.48 + step * 0.42, y + 0.49), (next_x + 0.48 - step * 0.42, y + 0.49)
        else:
            step = 1 if next_y > y else -1
            begin, end = (x + 0.48, y + 0.49 + step * 0.39), (next_x + 0.48, next_y + 0.49 - step * 0.39)
        axis.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=9, color=_TEXT, linewidth=1))
    colours = {"all-gather": GATHER, "compute": COMPUTE, "reduce-scatter": REDUCE, "other": _GRAY}
    _legend(figure, colours)
    _save(figure, path)


def draw_schedule(path: Path) -> None:
    """Draws the plan of a chain of four layers: what runs at the same time is in one column."""
    found = plan([4], Schedule())
    figure = Figure(figsize=(_WIDTH, 3.2), layout="constrained")
    lanes = {"forward": ("compute", "all-gather"), "backward": ("compute", "all-gather", "reduce-scatter")}
    columns = {"forward": groups(found.forward), "backward": groups(found.backward)}
    kept = {"forward": "\nkeeps its weights", "backward": "\nhas its weights"}
    for axis, name in zip(figure.subplots(2, 1, height_ratios=(2, 3)), lanes, strict=True):
        for column, group in enumerate(columns[name]):
            for event in group:
                lane, colour, text = _shown(event)
                y = len(lanes[name]) - 1 - lanes[name].index(lane)
                if isinstance(event, Compute) and event.keep:
                    text += kept[name]
                axis.add_patch(_box(column + 0.04, y + 0.1, 0.92, 0.8, colour, filled=True))
                axis.text(column + 0.5, y + 0.5, text, color="white", size=9, ha="center", va="center")
        axis.set(xlim=(0, max(map(len, columns.values()))), ylim=(0, len(lanes[name])), xticks=[])
        axis.set_yticks([len(lanes[name]) - 0.5 - i for i in range(len(lanes[name]))], lanes[name], size=9)
        axis.set_title(name, loc="left", size=10, weight="bold", color=_TEXT)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    figure.axes[-1].set_xlabel("time →", size=9)
    _save(figure, path)


def _shown(event: Event) -> tuple[str, str, str]:
    assert isinstance(event, Compute | Gather | Reduce)  # of unrolled layers
    lane, colour = {
        Compute: ("compute", COMPUTE),
        Gather: ("all-gather", GATHER),
        Reduce: ("reduce-scatter", REDUCE),
    }[type(event)]
    return lane, colour, f"layer {event.layer}"


def draw_rooms(path: Path) -> None:
    """Draws the rooms, each with its lines of code and its purpose. Each imports only rooms below its line."""
    layers = rooms()
    count = sum(map(len, layers))
    figure, axis = _canvas(_WIDTH, 0.232 * count + 0.35, _WIDTH, count + 1)
    most = max(lines for layer in layers for _, lines, _ in layer)
    y = float(count)
    axis.text(0.05, y + 0.45, "room", size=8.5, weight="bold", va="center", color=_TEXT)
    axis.text(1.0, y + 0.45, "lines of code", size=8.5, weight="bold", va="center", color=_TEXT)
    for number, layer in enumerate(layers):
        if number % 2 == 0:
            axis.add_patch(Rectangle((0, y - len(layer)), _WIDTH, len(layer), color=_BAND, linewidth=0))
        for name, lines, purpose in layer:
            y -= 1
            axis.text(0.05, y + 0.48, name, size=8.5, va="center", color=_TEXT)
            axis.add_patch(Rectangle((1.0, y + 0.2), 0.55 * lines / most, 0.6, color=COMPUTE, linewidth=0))
            axis.text(1.05 + 0.55 * lines / most, y + 0.48, f"{lines:,}", size=7.5, va="center", color=_TEXT)
            text = textwrap.shorten(purpose, 118, placeholder=" …")
            axis.text(2.0, y + 0.48, text, size=7.2, va="center", color=_TEXT)
    _save(figure, path)


def draw_step(path: Path) -> None:
    """Draws the modelled streams of one H200 of eight in a step of four layers of Llama 8B, wrapped into two rows."""
    sizes = ModelSizes(num_layers=4, vocab_size=32_000)
    options = InspectOptions(
        preset="8b", sizes=sizes, seq=8192, target="h200:8", parallelism=Parallelism(gtp=8, dp=1, tp=1)
    )
    line = inspect(options).timeline
    assert line is not None  # with a target
    colours = {"matmul": COMPUTE, "attention": ATTENTION, "all-gather": GATHER, "reduce-scatter": REDUCE}
    figure = Figure(figsize=(_WIDTH, 3.2), layout="constrained")
    turn = next(span.start_us for span in line.spans if span.event.direction == "backward" and span.lane == "compute")
    half = line.total_us / 2e3
    for row, axis in enumerate(figure.subplots(2, 1)):
        for span in line.spans:
            left, width = span.start_us / 1e3, (span.end_us - span.start_us) / 1e3
            box = dict(y=float(span.lane == "compute"), height=0.8, edgecolor="white", linewidth=0.4)
            axis.barh(left=left, width=width, color=colours.get(span.event.kind, _GRAY), **box)
            waits = min(span.exposed_us / 1e3, width)
            axis.barh(left=left + width - waits, width=waits, color=WAITS, **box) if waits else None
        axis.set(xlim=(row * half, (row + 1) * half), ylim=(-0.5, 1.95))
        if row * half <= turn / 1e3 < (row + 1) * half:
            axis.axvline(turn / 1e3, color=_TEXT, linewidth=1)
            axis.annotate("backward ", (turn / 1e3, 1.95), ha="left", va="top", size=9, xytext=(4, 0), **_POINTS)
            axis.annotate("forward", (turn / 1e3, 1.95), ha="right", va="top", size=9, xytext=(-4, 0), **_POINTS)
        axis.set_yticks([1, 0], ["compute", "communication"], size=9)
        axis.tick_params(labelsize=8.5)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[-1].set_xlabel("modelled time, ms", size=9)
    _legend(figure, {**colours, "compute waits for it": WAITS})
    _save(figure, path)


def _canvas(width: float, height: float, right: float, top: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.set(xlim=(0, right), ylim=(0, top), autoscale_on=False)
    axis.axis("off")
    return figure, axis


def _box(x: float, y: float, width: float, height: float, colour: str, *, filled: bool = False) -> FancyBboxPatch:
    style: dict[str, Any] = dict(facecolor=colour if filled else "white", edgecolor=colour, linewidth=1.8)
    return FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.05", **style)


def _save(figure: Figure, path: Path) -> None:
    """Writes a figure with a palette: a few colours need a third of the bytes."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=200)
    Image.open(drawn).convert("RGB").quantize(32).save(path, optimize=True)


def _legend(figure: Figure, colours: dict[str, str]) -> None:
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5)


PICTURES = {"life": draw_life, "schedule": draw_schedule, "rooms": draw_rooms, "step": draw_step}


def main() -> None:
    for name, draw in PICTURES.items():
        path = ROOT / "docs" / f"how-it-works-{name}.png"
        draw(path)
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
