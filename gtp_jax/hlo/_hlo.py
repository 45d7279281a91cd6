"""Parses the text of a compiled XLA module: computations, instructions, shapes, and the trip counts of loops.

Reads the output of `jax.stages.Compiled.as_text()`, for CPU and GPU (jax 0.11). Keeps only what the other modules of
this package use: names, opcodes, operands, shapes without layouts, and attributes as text.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

# The number of bits of an element, by the name that XLA prints. Tokens and opaque values have no size.
BITS = {
    **dict.fromkeys(("s2", "u2"), 2),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("pred", "s8", "u8", "f8e8m0fnu", "f8e5m2", "f8e4m3fn", "f8e4m3", "f8e3m4"), 8),
    **dict.fromkeys(("f8e4m3b11fnuz", "f8e4m3fnuz", "f8e5m2fnuz"), 8),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "c128": 128,
}

_COMMENT = re.compile(r"/\*.*?\*/")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{[^{}]*?(S\(5\))?\})?")  # 5 is the host's memory
_COMPUTATION = re.compile(r"(ENTRY )?%([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%(\S+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w-]*)\(")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%([^\s,}]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The element type of an array, by XLA's name, its dimensions on one device, and whether it is in the memory of the
    host."""

    dtype: str
    dims: tuple[int, ...]
    on_host: bool = False

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """The size on one device in bytes, with sub-byte elements packed."""
        return -(-self.elements * BITS.get(self.dtype, 0) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
        name: the name, unique within the module.
        opcode: the opcode as printed, such as `all-gather-start`.
        shapes: the shape of the result, or the shapes of all leaves if it is a tuple.
        arguments: the text between the parentheses.
        attributes: the text after the parentheses.
        root: whether it is the result of its computation.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    arguments: str
    attributes: str
    root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """The names of the operands."""
        return tuple(re.findall(r"%([^\s,)]+)", self.arguments))

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it calls; for a `while`, the condition and the body."""
        branches = _BRANCHES.search(self.attributes)
        names = _CALLED.findall(self.attributes)
        return (*names, *re.findall(r"%([^\s,]+)", branches[1] if branches else ""))

    @property
    def op_name(self) -> str:
        """The traced operation from which it was compiled, such as `jit(step)/transpose(jvp())/all_gather`."""
        return self.attribute("op_name")

    def attribute(self, name: str) -> str:
        """Returns a quoted attribute, such as `custom_call_target`; empty if there is none."""
        match = re.search(rf'\b{name}="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1] if match else ""


Computation = dict[str, Instruction]  # by name, in printed order, which is execution order in a scheduled module


@dataclasses.dataclass(frozen=True)
class Visit:
    """A visit to an instruction on a walk through the program.

    Attributes:
        instruction: the instruction.
        scope: the computation that it belongs to.
        depth: the number of loops around it.
        times: the number of times it runs in one call of the program.
        exact: whether `times` is known. Otherwise a loop around it has no printed trip count, and `times` is an
            estimate.
    """

    instruction: Instruction
    scope: Computation
    depth: int = 0
    times: int = 1
    exact: bool = True


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        computations: all computations, by name.
        entry: the name of the computation that runs first.
        devices: the number of devices that the program runs on.
        mesh: the sizes of the mesh axes, if all named replica groups are of the same mesh; empty otherwise.
        scheduled: whether the order of instructions is the order in which they are launched.
    """

    computations: dict[str, Computation]
    entry: str
    devices: int
    mesh: Mapping[str, int]
    scheduled: bool

    def walk(self) -> Iterator[Visit]:
        """Yields the instructions in program order: loop bodies once, with their trip count, and every branch of a
        conditional."""
        yield from self._walk(self.entry, depth=0, times=1, exact=True)

    def inside(self, instruction: Instruction) -> Iterator[Visit]:
        """Yields the instructions that a fusion or an asynchronous wrapper calls, at any depth."""
        for name in instruction.called:
            scope = self.computations.get(name, {})
            for inner in scope.values():
                yield Visit(inner, scope)
                yield from self.inside(inner)

    def trip_count(self, loop: Instruction) -> tuple[int, bool]:
        """Returns how often a `while` runs its body, and whether that number is certain.

        It is certain if XLA printed it. Otherwise it is the only positive constant of the condition, as if the loop
        counted from zero in steps of one; 1 if there is not exactly one such constant.
        """
        known = _TRIP_COUNT.search(loop.attributes)
        if known:
            return int(known[1]), True
        condition = self.computations.get(_called_as(loop, "condition"), {})
        bodies = [condition, *(self.computations.get(c, {}) for i in condition.values() for c in i.called)]
        constants = [int(i.arguments) for body in bodies for i in body.values() if _is_count(i)]
        return (constants[0], False) if len(constants) == 1 else (1, False)

    def _walk(self, computation: str, *, depth: int, times: int, exact: bool) -> Iterator[Visit]:
        scope = self.computations[computation]
        for instruction in scope.values():
            yield Visit(instruction, scope, depth, times, exact)
            if instruction.opcode == "while":
                count, certain = self.trip_count(instruction)
                inner = {"depth": depth + 1, "exact": exact and certain}
                yield from self._walk(_called_as(instruction, "condition"), times=times * (count + 1), **inner)
                yield from self._walk(_called_as(instruction, "body"), times=times * count, **inner)
            elif instruction.opcode in ("call", "conditional"):
                for name in instruction.called:
                    yield from self._walk(name, depth=depth, times=times, exact=exact)


def parse(text: str) -> Module:
    """Parses the text of a compiled module.

    Raises:
        ValueError: if the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    scope: Computation | None = None
    entry = ""
    for line in text.splitlines():
        if scope is None:
            header = _COMPUTATION.match(line)
            if header:
                scope = computations.setdefault(header[2], {})
                entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            scope = None
        else:
            instruction = _instruction(line)
            if instruction is not None:
                scope[instruction.name] = instruction
    if not entry:
        raise ValueError(
            "the text has no `ENTRY` computation, so it is not the text of a compiled XLA module. "
            "Pass `jax.jit(f).lower(...).compile().as_text()`."
        )
    top = text.partition("\n")[0]
    devices = math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", top))
    # if devices are permuted, there is more text between the mesh and the axes, so such a mesh does not match
    meshes = set(re.findall(r"replica_groups=mesh\[([^\]]*)\] *\{", text))
    mesh = mesh_sizes(meshes.pop()) if len(meshes) == 1 else {}
    return Module(computations, entry, devices, mesh, "is_scheduled=true" in top)


def mesh_sizes(text: str) -> dict[str, int]:
    """Returns the sizes of mesh axes by name, parsed from XLA's form `'gtp'=4,'tp'=2`."""
    return {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", text)}


def shapes(text: str) -> tuple[Shape, ...]:
    """Returns the array shapes in a printed type, in order. For example, `(f32[2,3]{1,0}, s32[])` has two."""
    return tuple(
        Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), bool(space))
        for dtype, dims, space in _SHAPE.findall(_COMMENT.sub("", text))
    )


def _is_count(instruction: Instruction) -> bool:
    return (
        instruction.opcode == "constant"
        and instruction.shapes[0].dtype in ("s32", "u32", "s64", "u64")
        and re.fullmatch(r"[1-9]\d*", instruction.arguments) is not None
    )


def _called_as(instruction: Instruction, role: str) -> str:
    match = re.search(rf"\b{role}=%([^\s,}}]+)", instruction.attributes)
    return match[1] if match else ""


def _instruction(line: str) -> Instruction | None:
    head = _INSTRUCTION.match(line)
    if not head:
        return None
    end = _closing(line, head.end()) + 1 if line[head.end()] == "(" else line.index(" ", head.end())
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    close = _closing(line, opcode.end() - 1)
    result = shapes(line[head.end() : end])
    arguments, attributes = line[opcode.end() : close], line[close + 1 :]
    return Instruction(head[2], opcode[1], result, arguments, attributes, bool(head[1]))


def _closing(line: str, start: int) -> int:
    """Returns the position of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)
