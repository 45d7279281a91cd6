"""Defines the number formats as data. All other Python files use these definitions; `ffi/include/gtp/formats.h` repeats
them for C++."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Element:
    """A floating-point element of 8 bits or fewer: sign, exponent and mantissa, with subnormals.

    Attributes:
        name: the name in the OCP specification of microscaling formats.
        bits: the width in bits.
        mantissa_bits: the number of explicit bits of the mantissa.
        min_exponent: the exponent of the smallest normal number; subnormals are
            `2**(min_exponent - mantissa_bits)` apart.
        max: the largest finite number, at which conversions saturate.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max: float


E2M1 = Element(name="e2m1", bits=4, mantissa_bits=1, min_exponent=0, max=6.0)
E4M3 = Element(name="e4m3", bits=8, mantissa_bits=3, min_exponent=-6, max=448.0)
E5M2 = Element(name="e5m2", bits=8, mantissa_bits=2, min_exponent=-14, max=57344.0)

# The number of elements that share the 16 random bytes of one Philox call, and the number of rows that a Hadamard
# transform mixes.
RUN = 16

ELEMENTS = {element.name: element for element in (E2M1, E4M3, E5M2)}


@runtime_checkable
class WireFormat(Protocol):
    """A format in which weights are sent: a `Format`, or a format of your own (see `gtp_jax.weights.OwnFormat`)."""

    @property
    def name(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How a matrix is quantized: its codes, optionally a scale per block, and optionally an amax of the tensor.

    Attributes:
        name: the name of the instance, in upper case.
        code: the number that identifies the format in native code; -1 for a format with kernels of its own.
        element: the name of the elements' number format, a key of `ELEMENTS`.
        block: the `(rows, columns)` of a block whose elements share a scale, with columns along the contraction; `None`
            if there are no block scales.
        scale: the number format of the block scales: `"e4m3"` or `"e8m0"` (a power of two), one byte each; `"float32"`,
            which stores the inverses of scales; or `None`.
        scale_max: the largest block scale, if it bounds the tensor's scale; otherwise `None`.
        has_amax: whether the format includes a float32 amax of the tensor.
        alignment: a number of rows: if the rows of a shard are a multiple of it, no block of either copy straddles two
            shards. 1 if shards may cut blocks (`Tiled`).
        transposed_columns: whether the column-wise copy is stored transposed.
    """

    name: str
    code: int
    element: str
    block: tuple[int, int] | None
    scale: str | None
    scale_max: float | None
    has_amax: bool
    alignment: int
    transposed_columns: bool

    @property
    def element_max(self) -> float:
        """The largest magnitude of an element."""
        return ELEMENTS[self.element].max

    @property
    def largest(self) -> float:
        """The largest magnitude of the product of an element and a block scale."""
        return self.element_max * (self.scale_max or 1.0)

    @property
    def element_bits(self) -> int:
        """The width of an element in bits. Two 4-bit codes share a byte, with the even element in the low nibble."""
        return ELEMENTS[self.element].bits

    @property
    def run(self) -> tuple[int, int]:
        """The shape of a block, `(1, 1)` if there are none. A part whose sizes are multiples of it cuts no block."""
        return self.block or (1, 1)

    @property
    def cut_by_shards(self) -> bool:
        """Whether shards may cut blocks, so that every rank needs the scales of all of them."""
        return self.block is not None and self.alignment == 1

    @property
    def bytes_per_element(self) -> float:
        """The number of bytes per element in a large array: its code and its share of a block scale."""
        codes = self.element_bits / 8
        scale = 4 if self.scale == "float32" else 1
        return codes if self.block is None else codes + scale / math.prod(self.block)

    def __repr__(self) -> str:
        return self.name


def _nvfp4(name: str, code: int, block: tuple[int, int]) -> Format:
    return Format(
        name=name,
        code=code,
        element=E2M1.name,
        block=block,
        scale=E4M3.name,
        scale_max=E4M3.max,
        has_amax=True,
        alignment=16,
        transposed_columns=True,
    )


def _fp8(name: str, code: int, element: Element) -> Format:
    return Format(
        name=name,
        code=code,
        element=element.name,
        block=None,
        scale=None,
        scale_max=None,
        has_amax=True,
        alignment=16,
        transposed_columns=True,
    )


NVFP4 = _nvfp4("NVFP4", 0, (16, 16))
NVFP4_1D = _nvfp4("NVFP4_1D", 1, (1, 16))
MXFP8 = Format(
    name="MXFP8",
    code=2,
    element=E4M3.name,
    block=(1, 32),
    scale="e8m0",
    scale_max=None,
    has_amax=False,
    alignment=32,
    transposed_columns=False,
)
FP8_E4M3 = _fp8("FP8_E4M3", 3, E4M3)
FP8_E5M2 = _fp8("FP8_E5M2", 4, E5M2)


def _fp8_blocks(name: str, block: tuple[int, int]) -> Format:
    return Format(
        name=name,
        code=-1,
        element=E4M3.name,
        block=block,
        scale="float32",
        scale_max=None,
        has_amax=False,
        alignment=1,
        transposed_columns=True,
    )


FP8_BLOCKS = _fp8_blocks("FP8_BLOCKS", (128, 128))
FP8_BLOCKS_1D = _fp8_blocks("FP8_BLOCKS_1D", (1, 128))

# The formats of `gtp_jax.ops.pack`.
FORMATS = {form.name: form for form in (NVFP4, NVFP4_1D, MXFP8, FP8_E4M3, FP8_E5M2)}
# The formats of frozen weights.
STORED = {**FORMATS, FP8_BLOCKS.name: FP8_BLOCKS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiled:
    """A wire format for weights in tiles that may lie in several shards. Only codes are sent, because every rank knows
    the scales of all tiles.

    Attributes:
        format: the format of the gathered weight.
    """

    format: Format

    @property
    def name(self) -> str:
        return self.format.name
