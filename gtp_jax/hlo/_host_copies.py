"""Finds what a scheduled program copies between the memories of a device and of its host."""

from __future__ import annotations

from ..mesh import UPDATE_IN_BLOCKS
from ._collectives import waited_at
from ._hlo import Computation, Instruction, Module, Shape
from ._launch_order import Event

TO_HOST, FROM_HOST = "to host", "from host"


def host_copies(module: Module) -> tuple[Event, ...]:
    """Returns the copies of activations between a device and its host, in the order in which they are launched. Leaves
    out those of a training state on the host, which are copies of the program's arguments and in its update.

    Their kind is `TO_HOST` or `FROM_HOST`, and their only shape is that of what is copied. Positions are those of
    `launch_order`, so that `LaunchOrder.under` says what runs meanwhile. Programs for a CPU have no such copies.
    """
    visits = list(module.walk())
    found = []
    for at, visit in enumerate(visits):
        i = visit.instruction
        copied = _copied(i)
        if copied is not None and not _is_of_state(i, visit.scope):
            kind, shape = copied
            found.append(Event(kind, i.name, at, waited_at(visits, at), (shape,), visit.depth, visit.times, ""))
    return tuple(found)


def _copied(instruction: Instruction) -> tuple[str, Shape] | None:
    """Returns the direction and the shape of a copy that the instruction starts.

    A loop copies a part of an array on the host: it starts a fusion, whose shapes are those of the operands, the
    result and a context. To the host, this is an update of the first operand by the second.
    """
    if instruction.opcode == "copy-start":
        into, out_of, *_ = instruction.shapes
        if into.on_host != out_of.on_host:
            return (TO_HOST, into) if into.on_host else (FROM_HOST, into)
    elif instruction.opcode == "fusion-start" and instruction.shapes[0].on_host:
        *operands, result, _ = instruction.shapes
        return (TO_HOST, operands[1]) if result.on_host else (FROM_HOST, result)
    return None


def _is_of_state(instruction: Instruction, scope: Computation) -> bool:
    operand = scope.get(instruction.operands[0])
    return UPDATE_IN_BLOCKS in instruction.op_name or (operand is not None and operand.opcode == "parameter")
