"""Finds the launch order of a scheduled GPU program (its collectives, matmuls and attention), and what overlaps.

The order is that of XLA's schedule for the machine that the program is compiled for. Instructions of the compute stream
run one after another. A collective is in flight from its start until the instruction that waits for it. Elementwise
work is kept apart: it has times, but hides little.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

from ._collectives import Collective, direction_of, launched, waited_at
from ._hlo import BITS, Instruction, Module, Shape, Visit, parse
from ._moved import moved_bytes
from ._text import alike, columns, quantity

# Library calls that compute a matmul or attention, by the prefix of their target.
_LIBRARY_CALLS = {
    "__cublas$": "matmul",
    "__cudnn$blockScaledDot": "matmul",
    "__cudnn$fmha": "attention",
    "__gpu$xla.gpu.triton": "matmul",  # Pallas: grouped matmuls, whose number of operations is unknown
    "gtp_grouped_": "matmul",
    "gtp_blocked_product": "matmul",
}

# Instructions that run as a single kernel or call, even if they call computations.
_UNITS = frozenset(("dot", "custom-call", "custom-call-start", "fusion", "fusion-start", "async-start"))

COMPUTE = ("matmul", "attention")

# The number of matmuls of flash attention: scores and output in forward; scores again and four gradients in backward.
_ATTENTION_MATMULS = {"forward": 2, "backward": 5}


@dataclasses.dataclass(frozen=True)
class Event:
    """An operation that takes time on a device.

    Attributes:
        kind: `matmul`, `attention`, `elementwise`, or the kind of the collective.
        name: the name of the instruction.
        start: the position at which it is launched.
        end: the position at which the program waits for it; equal to `start` unless it is asynchronous.
        shapes: the shapes of the result.
        depth: the number of loops around it.
        times: the number of times it runs in one call of the program.
        direction: the forward or backward pass.
        flops: for a matmul or attention, the number of operations per run.
        moved: for elementwise work, the bytes that it reads and writes per run.
        rate: what bounds its time: a key of `RATES`; empty for a collective.
        collective: the collective, if it is one.
    """

    kind: str
    name: str
    start: int
    end: int
    shapes: tuple[Shape, ...]
    depth: int
    times: int
    direction: str
    flops: int = 0
    moved: int = 0
    rate: str = ""
    collective: Collective | None = None


@dataclasses.dataclass(frozen=True)
class LaunchOrder:
    """Events in the order in which they are launched.

    Attributes:
        events: collectives, matmuls and attention.
        elementwise: everything else that the compute stream runs.
    """

    events: tuple[Event, ...]
    elementwise: tuple[Event, ...] = ()

    def collectives(self, *kinds: str) -> tuple[Event, ...]:
        """Returns the collectives of the given kinds; all collectives by default."""
        return tuple(e for e in self.events if e.collective is not None and (not kinds or e.kind in kinds))

    def under(self, event: Event) -> tuple[Event, ...]:
        """Returns the matmuls and attention that are launched while a collective is in flight."""
        return tuple(e for e in self.events if e.kind in COMPUTE and event.start < e.start < event.end)

    def exposed(self, *kinds: str) -> tuple[Event, ...]:
        """Returns the collectives of the given kinds (all by default) that no matmul or attention overlaps: synchronous
        ones, and those that end before any is launched."""
        return tuple(e for e in self.collectives(*kinds) if not self.under(e))


def launch_order(program: str | Module) -> LaunchOrder:
    """Returns the order in which a compiled program launches its work.

    Args:
        program: the text of a compiled module, or the parsed module.

    Raises:
        ValueError: if the program is not scheduled, because its order then has no meaning.
    """
    module = parse(program) if isinstance(program, str) else program
    if not module.scheduled:
        raise ValueError("the module is not scheduled (`is_scheduled=true`): pass the text of a *compiled* program.")
    visits = list(module.walk())
    events = [e for at, visit in enumerate(visits) for e in _events(module, visit, at)]
    ends = {e.start: waited_at(visits, e.start) for e in events if e.collective and e.collective.asynchronous}
    return LaunchOrder(
        tuple(dataclasses.replace(e, end=ends.get(e.start, e.start)) for e in events if e.kind != "elementwise"),
        tuple(e for e in events if e.kind == "elementwise"),
    )


def render(program: LaunchOrder) -> str:
    """Returns the order as a table, with one line per event, and bars for collectives in flight.

    `┌` and `└` mark the start and the end of an asynchronous collective, `│` marks the lines while it is in flight, and
    `■` marks a synchronous collective. Exposed collectives are labeled.
    """
    exposed = {e.name for e in program.exposed()}
    points = [(e.start, True, e) for e in program.events] + [
        (e.end, False, e) for e in program.events if e.end > e.start
    ]
    lanes: list[Event | None] = []
    rows: list[tuple[object, ...]] = []
    for at, starting, e in sorted(points, key=lambda point: point[:2]):
        bars = _bars(lanes, e, starting)
        name = "  " * e.depth + e.kind
        if not starting:
            rows.append((at, bars, name, "", "", "", f"done: {e.name}", ""))
            continue
        size = quantity(e.collective.wire_bytes, "B") if e.collective else quantity(e.flops, "FLOP")
        note = "" if e.collective is None else "async" if e.end > e.start else "sync"
        note = f"EXPOSED, {note}" if e.name in exposed else note
        rows.append((at, bars, name, f"x{e.times}", e.direction, size, alike(map(str, e.shapes)), note))
    header = ("at", "in flight", "event", "times", "pass", "size", "result", "")
    return columns(header, rows, right=(0, 3, 5)) if rows else "no collectives, matmuls or attention"


def _bars(lanes: list[Event | None], event: Event, starting: bool) -> str:
    """Returns the marks of the collectives in flight, one column each. Adds an event to `lanes` when it starts, and
    removes it when it ends."""
    mark = "" if event.collective is None else "■" if event.end == event.start else "┌" if starting else "└"
    if mark in ("■", "┌"):
        free = lanes.index(None) if None in lanes else len(lanes)
        lanes[free : free + 1] = [event]
    bars = "".join(mark if lane is event and mark else " " if lane is None else "│" for lane in lanes)
    if mark in ("■", "└"):
        lanes[lanes.index(event)] = None
    return bars


def _events(module: Module, visit: Visit, at: int) -> Iterator[Event]:
    i = visit.instruction
    where = {"name": i.name, "start": at, "end": at, "depth": visit.depth, "times": visit.times}
    found = False
    for c in launched(module, visit):
        found = True
        yield Event(kind=c.kind, shapes=c.results, direction=c.direction, collective=c, **where)
    for inner in [visit, *module.inside(i)] if i.opcode in _UNITS else []:
        kind = _work(inner.instruction)
        if kind:
            found = True
            flops = _attention_flops(inner) if kind == "attention" else _matmul_flops(inner)
            result = inner.instruction.shapes[:1]  # a library call also returns its workspace
            direction = direction_of(inner.instruction.op_name or i.op_name)
            yield Event(kind, shapes=result, direction=direction, flops=flops, rate=_rate(kind, inner), **where)
    moved = 0 if found else moved_bytes(module, visit)
    if moved:
        direction = direction_of(i.op_name)
        yield Event("elementwise", shapes=i.shapes, direction=direction, moved=moved, rate="elementwise work", **where)


def _work(instruction: Instruction) -> str:
    if instruction.opcode == "dot":
        return "matmul"
    if instruction.opcode == "custom-call":
        target = instruction.attribute("custom_call_target")
        return next((kind for start, kind in _LIBRARY_CALLS.items() if target.startswith(start)), "")
    return ""


def _matmul_flops(visit: Visit) -> int:
    """Returns 2 * elements of the result * size of the contraction; in a grouped matmul, each row has one group."""
    i = visit.instruction
    operand = visit.scope.get(i.operands[0]) if i.operands else None
    if operand is not None and (i.attribute("custom_call_target") or "").startswith("gtp_"):
        return 2 * operand.shapes[0].elements * i.shapes[0].dims[-1]
    dims = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', i.attributes)
    if operand is None or dims is None:
        return 0
    contracted = math.prod(operand.shapes[0].dims[int(d)] for d in re.findall(r"\d+", dims[1]))
    return 2 * i.shapes[0].elements * contracted


def _attention_flops(visit: Visit) -> int:
    """Returns 2 * scores that are not masked * head size per matmul: half of all with a causal mask, fewer with a
    window. Documents that share a row count as whole rows, because their lengths are not in the program."""
    i = visit.instruction
    scores = re.search(r'"intermediate_tensor_shape":.*?"dimensions": ?\[([^\]]*)\]', i.attributes)
    operand = visit.scope.get(i.operands[0]) if i.operands else None
    if operand is None or scores is None:
        return 0
    *batch, queries, keys = (int(d) for d in re.findall(r"\d+", scores[1]))
    seen = queries * keys
    if re.search(r'"mask_type": ?"[A-Z_]*CAUSAL', i.attributes):
        window = re.search(r'"sliding_window_length": ?"?(\d+)', i.attributes)
        width = min(queries, keys, int(window[1]) if window and int(window[1]) else keys)
        seen = width * queries - width * width // 2
    matmuls = _ATTENTION_MATMULS["backward" if _is_backward(i) else "forward"]
    return 2 * matmuls * math.prod(batch) * seen * operand.shapes[0].dims[-1]


def _is_backward(attention: Instruction) -> bool:
    """Returns whether a call is of attention's backward pass; that pass may also recompute forward."""
    return attention.attribute("custom_call_target").endswith("Backward")


def _rate(kind: str, visit: Visit) -> str:
    """Returns the key of `RATES` for a matmul or attention, by the pass and the size of its operands' elements."""
    i = visit.instruction
    operand = visit.scope.get(i.operands[0]) if i.operands else None
    small = operand is not None and BITS.get(operand.shapes[0].dtype) == 8  # codes may be integers
    if kind == "attention":
        return "attention backward" if _is_backward(i) else "FP8 attention forward" if small else "attention forward"
    return "FP8 matmuls" if small else "bf16 matmuls"
