"""The text of a compiled XLA module, parsed: computations, instructions, shapes, and how often a loop runs.

Reads what `jax.stages.Compiled.as_text()` prints, for CPU and GPU (jax 0.11). Only what the planner asks for is
kept: names, opcodes, operands, shapes without layouts, and the attributes as text.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

# Bits of an element, by the name XLA prints. Tokens and opaque values weigh nothing.
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
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%([^\s(]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%(\S+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w-]*)\(")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%([^\s,}]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's element type, as XLA names it, and its dimensions on one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes on one device, sub-byte elements packed."""
        return -(-self.elements * BITS.get(self.dtype, 0) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
        name: unique within the module.
        opcode: as printed, `all-gather-start` for instance.
        shapes: shapes of the result; of all leaves if it is a tuple.
        arguments: what stands between the parentheses.
        attributes: what follows them.
        root: whether it is its computation's result.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    arguments: str
    attributes: str
    root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands."""
        return tuple(re.findall(r"%([^\s,)]+)", self.arguments))

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it calls; of a `while` the condition and the body."""
        branches = _BRANCHES.search(self.attributes)
        names = _CALLED.findall(self.attributes)
        return (*names, *re.findall(r"%([^\s,]+)", branches[1] if branches else ""))

    @property
    def op_name(self) -> str:
        """The traced operation it came from, `jit(step)/transpose(jvp())/all_gather` for instance."""
        return self.attribute("op_name")

    def attribute(self, name: str) -> str:
        """Returns a quoted attribute such as `custom_call_target`; empty if absent."""
        match = re.search(rf'\b{name}="((?:[^"\\]|\\.)*)"', self.attributes)
        return match[1] if match else ""


Computation = dict[str, Instruction]  # by name, in the order printed: in a scheduled module, of execution


@dataclasses.dataclass(frozen=True)
class Visit:
    """An instruction met on a walk through the program.

    Attributes:
        instruction: the instruction.
        scope: the computation that it belongs to.
        depth: loops around it.
        times: how often it runs in one call of the program.
        exact: whether `times` is known; otherwise a loop around it prints no trip count and `times` is an estimate.
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
        computations: all of them, by name.
        entry: name of the one that runs.
        devices: number of devices it runs on.
        mesh: sizes of their mesh's axes, if collectives name one mesh; empty otherwise.
        scheduled: whether the order of instructions is the order in which they are launched.
    """

    computations: dict[str, Computation]
    entry: str
    devices: int
    mesh: Mapping[str, int]
    scheduled: bool

    def walk(self) -> Iterator[Visit]:
        """Instructions in program order: loop bodies once, with their trip count, and every branch of a conditional."""
        yield from self._walk(self.entry, depth=0, times=1, exact=True)

    def inside(self, instruction: Instruction) -> Iterator[Visit]:
        """Instructions of what a fusion or an asynchronous wrapper calls, at any depth."""
        for name in instruction.called:
            scope = self.computations.get(name, {})
            for inner in scope.values():
                yield Visit(inner, scope)
                yield from self.inside(inner)

    def trip_count(self, loop: Instruction) -> tuple[int, bool]:
        """Returns how often a `while` runs its body, and whether that is certain.

        Certain if XLA printed it. Otherwise the constant that the condition compares with, as if counting up
        from zero by one; 1 if there is none.
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
        ValueError: if the text holds no entry computation.
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
            "the text holds no `ENTRY` computation, so it is not that of a compiled XLA module. "
            "Pass `jax.jit(f).lower(...).compile().as_text()`."
        )
    top = text.partition("\n")[0]
    devices = math.prod(int(n) for n in re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", top))
    # with devices in another order than theirs, more stands between mesh and axes
    meshes = set(re.findall(r"replica_groups=mesh\[([^\]]*)\] *\{", text))
    mesh = mesh_sizes(meshes.pop()) if len(meshes) == 1 else {}
    return Module(computations, entry, devices, mesh, "is_scheduled=true" in top)


def mesh_sizes(text: str) -> dict[str, int]:
    """Sizes of a mesh's axes by name, `'gtp'=4,'tp'=2` as XLA prints them."""
    return {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", text)}


def shapes(text: str) -> tuple[Shape, ...]:
    """Returns the array shapes in a printed type, in order: `(f32[2,3]{1,0}, s32[])` has two."""
    return tuple(
        Shape(dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _SHAPE.findall(_COMMENT.sub("", text))
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
    """Returns where the parenthesis that opens at `start` closes."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(line)
