"""The number formats, as data. Every other file reads these facts; `ffi/include/gtp/formats.h` repeats them for C++."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Element:
    """A number of 8 bits or fewer: sign, exponent, mantissa, with subnormals.

    Attributes:
        name: as the OCP specification of microscaling formats calls it.
        bits: width.
        mantissa_bits: explicit bits of the mantissa.
        min_exponent: exponent of the smallest normal number; the step of the subnormals is
            `2**(min_exponent - mantissa_bits)`.
        max: largest finite number; conversions saturate there.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max: float


E2M1 = Element(name="e2m1", bits=4, mantissa_bits=1, min_exponent=0, max=6.0)
E4M3 = Element(name="e4m3", bits=8, mantissa_bits=3, min_exponent=-6, max=448.0)
E5M2 = Element(name="e5m2", bits=8, mantissa_bits=2, min_exponent=-14, max=57344.0)

# Elements that share the 16 random bytes of one Philox call, and rows that a Hadamard transform mixes.
RUN = 16

ELEMENTS = {element.name: element for element in (E2M1, E4M3, E5M2)}


@runtime_checkable
class WireFormat(Protocol):
    """Names what weights are encoded in on the wire: a `Format`, or a format of your own, see
    `gtp_jax.weights.OwnFormat`."""

    @property
    def name(self) -> str: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """How a matrix is written with few bits: codes, a scale a block of them, and perhaps an amax of the tensor.

    Attributes:
        name: upper case, the name of the instance.
        code: the number by which native code knows it.
        element: name of the code's number format, a key of `ELEMENTS`.
        block: `(rows, columns)` that share a scale, columns along the contraction; `None`: no block scales.
        scale: `"e4m3"`, `"e8m0"` (a power of two) or `None`: number format of the block scales, one byte each.
        scale_max: largest block scale, where that bounds the tensor's scale.
        has_amax: whether a float32 amax of the tensor belongs to it.
        alignment: rows of a shard are a multiple of this, so that no block straddles two shards.
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
        """The element's largest magnitude."""
        return ELEMENTS[self.element].max

    @property
    def largest(self) -> float:
        """The largest magnitude of an element times a block scale."""
        return self.element_max * (self.scale_max or 1.0)

    @property
    def element_bits(self) -> int:
        """The element's width; two codes of four bits share a byte, the even one in the low nibble."""
        return ELEMENTS[self.element].bits

    @property
    def bytes_per_element(self) -> float:
        """Bytes an element takes in a large array: its code and its share of a block scale."""
        codes = self.element_bits / 8
        return codes if self.block is None else codes + 1 / math.prod(self.block)

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

FORMATS = {form.name: form for form in (NVFP4, NVFP4_1D, MXFP8, FP8_E4M3, FP8_E5M2)}
