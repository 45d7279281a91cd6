"""Defines the axes along which a step grows, and the steps to measure on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from .contenders.workload import Workload


@dataclasses.dataclass(frozen=True)
class Axis:
    """A property of a step that grows while the rest stays constant.

    Attributes:
        name: the name for `--axes`.
        grows: what the values on the axis count.
        stays: what is the same in all steps on the axis.
        values: returns the default values, given the step that the axis goes through.
        at: returns the step at a value.
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
        axis: the name of the axis.
        value: the value on the axis.
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
        raise ValueError(f"the number of devices must be a multiple of tp {work.tp} and at most {work.devices}.")
    return devices // work.tp


def _weak(work: Workload, devices: int) -> Workload:
    gtp = _gtp(work, devices)
    return dataclasses.replace(work, gtp=gtp, sequences=work.sequences // work.gtp * gtp)


def _strong(work: Workload, devices: int) -> Workload:
    gtp = _gtp(work, devices)
    if work.seq % (work.gtp * work.tp):
        raise ValueError(
            f"sequences of {work.seq} tokens cannot be split into {work.gtp} equal parts, each divisible by tp. Choose "
            "another --seq."
        )
    return dataclasses.replace(work, gtp=gtp, seq=work.seq // work.gtp)


def _wide(work: Workload, width: int) -> Workload:
    ratio = {name: getattr(work, name) for name in ("hidden_size", "num_heads", "num_kv_heads", "intermediate_size")}
    unit = math.lcm(*(work.hidden_size // math.gcd(work.hidden_size, size) for size in ratio.values()))
    if width % unit:
        raise ValueError(f"the width must be a multiple of {unit}, because heads and ffn grow with it.")
    return dataclasses.replace(work, **{name: size * width // work.hidden_size for name, size in ratio.items()})


def _multiples(name: str, *factors: float) -> Callable[[Workload], list[int]]:
    return lambda work: sorted({max(1, round(getattr(work, name) * factor)) for factor in factors})


AXES: Mapping[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis("weak", "devices", "tokens per device", _counts, _weak),
        Axis("strong", "devices", "tokens per step (those of one rank, in shorter sequences)", _counts, _strong),
        Axis(
            "depth",
            "layers",
            "layer sizes",
            _multiples("num_layers", 1 / 2, 1, 2, 4),
            lambda work, num_layers: dataclasses.replace(work, num_layers=num_layers),
        ),
        Axis("width", "width", "ffn / width and width / heads", _multiples("hidden_size", 1 / 2, 1, 3 / 2, 2), _wide),
        Axis(
            "sequence",
            "tokens per sequence",
            "number of sequences per step",
            _multiples("seq", 1 / 4, 1 / 2, 1, 2, 4),
            lambda work, seq: dataclasses.replace(work, seq=seq),
        ),
    )
}


def parse_axes(words: Sequence[str]) -> dict[str, list[int]]:
    """Parses axes such as `depth` or `depth=8,64`, and returns their values in the order of `AXES`.

    An axis without values has an empty list, which stands for its default values. Without words, returns all axes.

    Raises:
        ValueError: if there is no such axis, or a value is not an integer of at least 1.
    """
    values_by_axis: dict[str, list[int]] = {}
    for word in words or AXES:
        name, given, text = word.partition("=")
        if name not in AXES:
            raise ValueError(f"`--axes` names {name!r}; the axes are {', '.join(AXES)}.")
        values = text.split(",") if given else []
        if not all(v.isascii() and v.isdigit() and int(v) for v in values):
            raise ValueError(f"`--axes` is {word!r}; values must be integers of at least 1, as in `{name}=1,2,4`.")
        values_by_axis[name] = sorted(set(map(int, values)))
    return {name: values_by_axis[name] for name in AXES if name in values_by_axis}


def growth_points(work: Workload, axes: Mapping[str, Sequence[int]]) -> list[Point]:
    """Returns the steps to measure. The ends of each axis come first, then its middle. Axes take turns, so that a run
    that ends early has measured points on all of them.

    Args:
        work: the step that all axes except `strong` go through.
        axes: for the name of each axis, the values in ascending order; if empty, the axis's default values.

    Raises:
        ValueError: if a step cannot have one of the values.
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
    """Returns the indices below `count`, each once: the last, the first, and then the midpoints of the gaps between
    those already listed, breadth first."""
    order = list(dict.fromkeys([count - 1, 0])) if count else []
    gaps = [(0, count - 1)]
    for low, high in gaps:  # the list grows during the iteration
        middle = (low + high) // 2
        if low < middle:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return order
