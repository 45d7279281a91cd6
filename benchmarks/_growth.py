"""Along what the cost of a step grows: axes, and the steps on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from .contenders.workload import Workload


@dataclasses.dataclass(frozen=True)
class Axis:
    """Something of a step that grows while the rest stays.

    Attributes:
        name: for `--axes`.
        grows: what its values are.
        stays: what all its steps have in common.
        values: those measured if none are named, of the step that the axis goes through.
        at: the step at a value.
    """

    name: str
    grows: str
    stays: str
    values: Callable[[Workload], list[int]]
    at: Callable[[Workload, int], Workload]


@dataclasses.dataclass(frozen=True)
class Point:
    """A step on an axis.

    Attributes:
        axis: its axis' name.
        value: where it is.
        work: the step.
    """

    axis: str
    value: int
    work: Workload


def _counts(work: Workload) -> list[int]:
    powers = (2**i for i in range(work.gtp.bit_length()))
    return sorted({work.devices, *(work.tp * gtp for gtp in powers if work.gtp % gtp == 0)})


def _gtp(work: Workload, devices: int) -> int:
    if devices > work.devices or devices % work.tp:
        raise ValueError(f"it is a multiple of tp {work.tp}, and there are {work.devices} devices.")
    return devices // work.tp


def _weak(work: Workload, devices: int) -> Workload:
    gtp = _gtp(work, devices)
    return dataclasses.replace(work, gtp=gtp, sequences=work.sequences // work.gtp * gtp)


def _strong(work: Workload, devices: int) -> Workload:
    gtp = _gtp(work, devices)
    if work.seq % (work.gtp * work.tp):
        raise ValueError(
            f"sequences of {work.seq} cannot be divided into {work.gtp} parts, one for each rank. Choose another --seq."
        )
    return dataclasses.replace(work, gtp=gtp, seq=work.seq // work.gtp)


def _wide(work: Workload, width: int) -> Workload:
    ratio = {name: getattr(work, name) for name in ("hidden_size", "num_heads", "num_kv_heads", "intermediate_size")}
    unit = math.lcm(*(work.hidden_size // math.gcd(work.hidden_size, size) for size in ratio.values()))
    if width % unit:
        raise ValueError(f"heads and ffn grow with the width, which is then a multiple of {unit}.")
    return dataclasses.replace(work, **{name: size * width // work.hidden_size for name, size in ratio.items()})


def _multiples(name: str, *factors: float) -> Callable[[Workload], list[int]]:
    return lambda work: sorted({max(1, round(getattr(work, name) * factor)) for factor in factors})


AXES: Mapping[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis("weak", "devices", "tokens a device", _counts, _weak),
        Axis("strong", "devices", "tokens of the step: those of one rank, in shorter sequences", _counts, _strong),
        Axis(
            "depth",
            "layers",
            "the layer",
            _multiples("num_layers", 1 / 2, 1, 2, 4),
            lambda work, num_layers: dataclasses.replace(work, num_layers=num_layers),
        ),
        Axis("width", "width", "ffn / width and width / heads", _multiples("hidden_size", 1 / 2, 1, 3 / 2, 2), _wide),
        Axis(
            "sequence",
            "tokens a sequence",
            "sequences of the step",
            _multiples("seq", 1 / 4, 1 / 2, 1, 2, 4),
            lambda work, seq: dataclasses.replace(work, seq=seq),
        ),
    )
}


def parse_axes(words: Sequence[str]) -> dict[str, list[int]]:
    """Parses axes, `depth` or `depth=8,64`, in the order of `AXES`; without values those of the axis, all if no words.

    Raises:
        ValueError: if there is no such axis, or a value is no whole number of at least 1.
    """
    values_by_axis: dict[str, list[int]] = {}
    for word in words or AXES:
        name, given, text = word.partition("=")
        if name not in AXES:
            raise ValueError(f"`--axes` names {name!r}; there are {', '.join(AXES)}.")
        values = text.split(",") if given else []
        if not all(v.isascii() and v.isdigit() and int(v) for v in values):
            raise ValueError(f"`--axes` is {word!r}; values are whole numbers of at least 1: `{name}=1,2,4`.")
        values_by_axis[name] = sorted(set(map(int, values)))
    return {name: values_by_axis[name] for name in AXES if name in values_by_axis}


def growth_points(work: Workload, axes: Mapping[str, Sequence[int]]) -> list[Point]:
    """Returns the steps to measure: ends of each axis first, then its middle; axes take turns, so that none waits for
    another.

    Args:
        work: the step that all axes but `strong` go through.
        axes: values by name of an axis, in rising order; the axis' own if empty.

    Raises:
        ValueError: if there is no step at a value.
    """
    lines = [
        [_point(work, name, value) for value in values or AXES[name].values(work)] for name, values in axes.items()
    ]
    turns = [[line[i] for i in _ends_first(len(line))] for line in lines]
    return [line[turn] for turn in range(max(map(len, turns), default=0)) for line in turns if turn < len(line)]


def _point(work: Workload, name: str, value: int) -> Point:
    try:
        return Point(name, value, AXES[name].at(work, value))
    except ValueError as error:
        raise ValueError(f"`--axes` {name}={value}: {error}") from None


def _ends_first(count: int) -> list[int]:
    """Returns the indices: last, first, then what lies midway, breadth first."""
    order = list(dict.fromkeys([count - 1, 0])) if count else []
    gaps = [(0, count - 1)]
    for low, high in gaps:  # grows while it is read
        middle = (low + high) // 2
        if low < middle:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order
