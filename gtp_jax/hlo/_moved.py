"""Counts the bytes that an elementwise kernel reads and writes: a fusion, a copy, or a library call."""

from __future__ import annotations

import collections
import math

from ._hlo import Instruction, Module, Shape, Visit

_KERNELS = frozenset(("fusion", "copy", "custom-call", "sort"))
_SLICES = frozenset(("slice", "dynamic-slice", "gather"))
_UPDATE = "dynamic-update-slice"


def moved_bytes(module: Module, visit: Visit) -> int:
    """Returns the bytes that an instruction moves in the memory of its device; 0 unless it is a kernel of its own.

    Of a fusion's operand, only what reaches the results counts: the slice of an array that is sliced, and nothing of an
    array that is updated in place.
    """
    i = visit.instruction
    if i.opcode not in _KERNELS:
        return 0
    body = module.computations.get(i.called[0]) if i.opcode == "fusion" and i.called else None
    if body is not None:
        return _fused(body)
    read = {name: visit.scope[name] for name in i.operands if name in visit.scope}
    return _size(i) + sum(map(_size, read.values()))


def _fused(body: dict[str, Instruction]) -> int:
    root = next(i for i in body.values() if i.root)
    needed: collections.Counter[str] = collections.Counter()  # elements, by the name of an instruction
    written = 0
    for name in root.operands if root.opcode == "tuple" else (root.name,):
        result = body[name]
        while result.opcode == "bitcast":
            result = body[result.operands[0]]
        result = body[result.operands[1]] if result.opcode == _UPDATE else result
        needed[result.name] = _elements(result)
        written += _size(result)
    read = 0
    for i in reversed(body.values()):  # an instruction comes after its operands
        whole = _elements(i)
        some = min(needed[i.name], whole)
        if i.opcode == "parameter" and some:
            read += math.ceil(_size(i) * some / whole)
        for position, name in enumerate(i.operands if some else ()):
            alike = i.opcode in _SLICES and position == 0 or _elements(body[name]) == whole
            needed[name] += some if alike else _elements(body[name])
    return written + read


def _elements(instruction: Instruction) -> int:
    return sum(shape.elements for shape in instruction.shapes)


def _size(instruction: Instruction) -> int:
    return sum(map(_on_device, instruction.shapes))


def _on_device(shape: Shape) -> int:
    return 0 if shape.on_host else shape.bytes
