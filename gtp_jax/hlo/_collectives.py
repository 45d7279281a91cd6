"""Finds the collectives of a compiled program: what they send, how much, how often, and between which ranks."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from ._groups import Groups, axes_named, replica_groups
from ._hlo import Computation, Instruction, Module, Shape, Visit, parse
from ._text import alike, columns, quantity

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

Direction = Literal["forward", "backward"]

# The bytes that leave a device in a ring of n ranks, as a multiple of (n - 1) / n times the larger of operand and
# result; 1 for other kinds.
_RING_PASSES = {"all-reduce": 2}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program. A collective that XLA has combined from several is one record with several shapes.
    On GPUs, XLA may also join the operands of all-reduces end to end, so that only the sum of their sizes is left.

    Attributes:
        name: the name of the instruction that launches it.
        kind: one of `KINDS`.
        operands: the shapes of the operands on one device.
        results: the shapes of the results on one device.
        groups: the ranks that take part together, as positions in the mesh, one row per group; of a permutation, those
            that its pairs connect.
        axes: the mesh axes it runs over; empty if the program does not name them.
        asynchronous: whether the program may do other work between its start and its end.
        times: the number of times it runs in one call of the program.
        exact: whether `times` is certain (see `Module.trip_count`).
        direction: the forward or backward pass.
        op_name: the traced operation from which it was compiled. If XLA drops that name, as for a ragged all-to-all on
            GPUs, the name of its first operand: the operation that computed it, or a parameter.
    """

    name: str
    kind: str
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    groups: Groups
    axes: tuple[str, ...]
    asynchronous: bool
    times: int
    exact: bool
    direction: Direction
    op_name: str

    @property
    def group(self) -> int:
        """The number of ranks that take part together."""
        return len(self.groups[0])

    @property
    def sent(self) -> tuple[Shape, ...]:
        """The shapes of the operands that hold what is sent: of a ragged all-to-all the first one, because the second
        is where it writes, and the others say where runs of rows begin and how long they are; of other kinds, all."""
        return self.operands[:1] if self.kind == "ragged-all-to-all" else self.operands

    @property
    def dtype(self) -> str:
        """The element type on the wire; several types are joined by `+`."""
        return "+".join(sorted({shape.dtype for shape in self.sent}))

    @property
    def operand_bytes(self) -> int:
        """The size of what is sent, as it is on one device, in bytes per run."""
        return sum(shape.bytes for shape in self.sent)

    @property
    def result_bytes(self) -> int:
        """The size of the results on one device, in bytes per run."""
        return sum(shape.bytes for shape in self.results)

    @property
    def wire_bytes(self) -> int:
        """The number of bytes that leave each device per run, if the ranks form a ring."""
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.operand_bytes
        whole = max(self.operand_bytes, self.result_bytes)
        return _RING_PASSES.get(self.kind, 1) * whole * (self.group - 1) // self.group


def collectives(program: str | Module) -> list[Collective]:
    """Returns the collectives of a compiled program, in program order.

    Args:
        program: the text of a compiled module, or the parsed module.
    """
    module = parse(program) if isinstance(program, str) else program
    return [c for visit in module.walk() for c in launched(module, visit)]


def launched(module: Module, visit: Visit) -> Iterator[Collective]:
    """Yields the collectives that an instruction launches: one, none, or those in the fusion that it runs."""
    instruction = visit.instruction
    start = instruction.opcode.endswith("-start")
    if instruction.opcode.removesuffix("-start") in KINDS:
        pairs = [(instruction, visit.scope)]
    elif start or instruction.opcode == "fusion":
        pairs = [(v.instruction, v.scope) for v in module.inside(instruction) if v.instruction.opcode in KINDS]
    else:
        return
    for inner, scope in pairs:
        axes, groups = _ranks(inner.attributes, module)
        op_name = inner.op_name or instruction.op_name or _name_of_first(inner, scope)
        yield Collective(
            name=instruction.name,
            kind=inner.opcode.removesuffix("-start"),
            operands=tuple(shape for name in inner.operands for shape in scope[name].shapes),
            results=_results(inner, scope),
            groups=groups,
            axes=axes,
            asynchronous=start and '"is_sync":true' not in instruction.attributes,
            times=visit.times,
            exact=visit.exact,
            direction=direction_of(op_name),
            op_name=op_name,
        )


def direction_of(op_name: str) -> Direction:
    """Returns the pass to which a traced operation belongs."""
    return "backward" if "transpose(" in op_name else "forward"


def done(start: Instruction, scope: Computation) -> Instruction | None:
    """Returns the instruction that waits for an asynchronous one, or `None` if it is in another computation."""
    waiting = {start.name}
    for instruction in scope.values():
        if waiting.isdisjoint(instruction.operands):
            continue
        if instruction.opcode.endswith("-update"):
            waiting.add(instruction.name)
        elif instruction.opcode.endswith("-done"):
            return instruction
    return None


def waited_at(visits: Sequence[Visit], at: int) -> int:
    """Returns the position of the instruction that waits for the asynchronous one at `at`, or `at` if its computation
    does not wait."""
    waiting = done(visits[at].instruction, visits[at].scope)
    return next((other for other in range(at, len(visits)) if visits[other].instruction is waiting), at)


def summary(collectives: Iterable[Collective]) -> list[tuple[Collective, int]]:
    """Groups collectives of the same kind, direction, axes, synchrony and shapes. Returns one collective per group, and
    the number of times that the group runs."""
    groups: dict[tuple[object, ...], list[Collective]] = collections.defaultdict(list)
    for c in collectives:
        groups[c.kind, c.direction, c.axes or c.group, c.asynchronous, c.exact, c.operands, c.results].append(c)
    counted = [(same[0], sum(c.times for c in same)) for same in groups.values()]
    return sorted(counted, key=lambda row: (KINDS.index(row[0].kind), row[0].direction, -row[0].wire_bytes))


def table(collectives: Iterable[Collective]) -> str:
    """Returns the collectives of a program as a table, with one line per group of `summary`, and the total number of
    bytes that leave a device."""
    rows = summary(collectives)
    if not rows:
        return "no collectives"
    estimate = {True: "", False: "?"}
    cells = [
        (
            f"{times}{estimate[c.exact]}",
            c.kind,
            c.direction,
            ",".join(c.axes) or f"{c.group} ranks",
            "async" if c.asynchronous else "sync",
            c.dtype,
            alike(f"[{','.join(map(str, shape.dims))}]" for shape in c.operands),
            quantity(c.operand_bytes, "B"),
            quantity(c.result_bytes, "B"),
            quantity(times * c.wire_bytes, "B"),
        )
        for c, times in rows
    ]
    header = ("count", "kind", "pass", "over", "", "dtype", "operands per device", "in", "out", "sent in total")
    total = sum(times * c.wire_bytes for c, times in rows)
    count = sum(times for _, times in rows)
    return f"{columns(header, cells, right=(0, 7, 8, 9))}\n{count} in total; {quantity(total, 'B')} leave each device"


def _name_of_first(instruction: Instruction, scope: Computation) -> str:
    return scope[instruction.operands[0]].op_name if instruction.operands else ""


def _results(instruction: Instruction, scope: Computation) -> tuple[Shape, ...]:
    if not instruction.opcode.endswith("-start"):
        return instruction.shapes
    end = done(instruction, scope)
    if end is not None:
        return end.shapes
    return instruction.shapes[len(instruction.operands) :]  # a start's type is (operands, results)


def _ranks(text: str, module: Module) -> tuple[tuple[str, ...], Groups]:
    """Returns the mesh axes of a collective, if they are known, and the ranks of each of its groups."""
    groups = replica_groups(text, module.devices)
    named = axes_named(text)
    if named is not None:
        return named, groups
    axes = {_axes(group, module.mesh) for group in groups}
    return axes.pop() if len(axes) == 1 else (), groups


def _axes(ranks: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes along which the ranks of a group differ, if the group contains all ranks along those axes."""
    places: dict[str, set[int]] = {axis: set() for axis in mesh}
    for rank in ranks:
        for axis, size in reversed(list(mesh.items())):
            rank, place = divmod(rank, size)
            places[axis].add(place)
    axes = tuple(axis for axis, positions in places.items() if len(positions) > 1)
    return axes if math.prod(mesh[axis] for axis in axes) == len(ranks) else ()
