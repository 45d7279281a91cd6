"""Compares the quantization kernels with a copy, and with the jnp reference as XLA compiles it.

Each program runs the operation on several arrays, one after another, so that they share the launch cost and do not stay
in a cache. It returns one number of each result. All results are in memory at its end, but the host does not have to
receive hundreds of arrays, which would take longer than computing them. The copy is a program over the same arrays; it
returns them, because XLA would otherwise remove the copy. The reference runs on four arrays, because it takes long to
compile. Passing a thousand arrays takes the host too long as well. For such programs on a GPU, the profiler measures
the time spent in kernels instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from gtp_jax import ops
from gtp_jax.formats import FORMATS, Format, PackPlan, Piece
from gtp_jax.ops import Implementation

from ._choice import by_words
from ._timing import seconds_a_call, seconds_on_device

# The goals, as fractions of a copy's rate. CPU kernels have no goal; they are compared with XLA's code instead.
KERNEL_GOALS = {"gpu": 0.85}
# The default size of an array in MiB, by platform.
KERNEL_MEBIBYTES = {"gpu": 256.0, "cpu": 16.0}

_COLS = 4096
_ARRAYS = 4  # arrays per program; on a GPU there are more if they are small, so that it does not wait for the host:
_PROGRAM_BYTES = 2**30  # enough to fill this many bytes,
_MOST_ARRAYS = 64  # but at most this many, because each adds an operation to compile
_SMALL_BYTES = 64 * 1024
_SMALL_COUNT = 1000
_WEIGHTS = 4  # weights per layer
_SHARDS = 4  # shards per buffer that is unpacked
# The number of rows of an array is a multiple of this, so that each shard of a weight consists of whole blocks.
_ROWS = _WEIGHTS * _SHARDS * max(form.alignment for form in FORMATS.values())


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An operation in one format.

    Attributes:
        operation: `multi_amax`, `quantize`, `dequantize`, `pack` or `unpack`.
        variant: the variant of the operation, such as `row`, `both` or `small`; may be empty.
        format: a name in `FORMATS`; empty for `multi_amax`.
    """

    operation: str
    variant: str
    format: str = ""

    @property
    def name(self) -> str:
        """The name shown in tables."""
        return " ".join(filter(None, (self.operation, self.variant, self.format)))


_FORMATS = ("NVFP4", "NVFP4_1D", "MXFP8", "FP8_E4M3")

KERNELS: tuple[Kernel, ...] = (
    Kernel("multi_amax", "one"),
    Kernel("multi_amax", "small"),
    *(
        Kernel(operation, variant, form)
        for operation, variants in (
            ("quantize", ("row", "column", "both")),
            ("dequantize", ("row", "column")),
            ("pack", ("", "transposed")),
            ("unpack", ("",)),
        )
        for variant in variants
        for form in _FORMATS
    ),
)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measurement of one kernel on arrays of one size and dtype.

    Attributes:
        kernel: the kernel.
        dtype: the dtype of the values.
        mebibytes: the size of the values of one array, in MiB.
        microseconds: the time per array, in microseconds.
        bytes_moved: the minimum number of bytes read and written per array.
        copy_rate: the bytes read and written per second by a device-to-device copy of arrays of this size, in the same
            run.
        reference_microseconds: the time per array of the jnp reference as XLA compiles it, in microseconds; `None` if
            it was not measured.
    """

    kernel: Kernel
    dtype: str
    mebibytes: float
    microseconds: float
    bytes_moved: int
    copy_rate: float
    reference_microseconds: float | None

    @property
    def size(self) -> str:
        """The size of the values in MiB, for tables."""
        return f"{round(self.mebibytes, 2):g}"

    @property
    def rate(self) -> float:
        """The bytes moved per second."""
        return self.bytes_moved / (self.microseconds * 1e-6)

    @property
    def of_copy(self) -> float:
        """The rate as a fraction of the copy's."""
        return self.rate / self.copy_rate

    @property
    def of_reference(self) -> float | None:
        """The time of the reference divided by that of the kernel; `None` if the reference was not measured."""
        return self.reference_microseconds and self.reference_microseconds / self.microseconds

    def record(self) -> dict[str, Any]:
        """Returns the measurement as a dict that can be written as JSON."""
        return {
            **dataclasses.asdict(self.kernel),
            "dtype": self.dtype,
            "mebibytes": self.mebibytes,
            "microseconds": self.microseconds,
            "bytes_moved": self.bytes_moved,
            "bytes_a_second": self.rate,
            "copy_bytes_a_second": self.copy_rate,
            "of_copy": self.of_copy,
            "reference_microseconds": self.reference_microseconds,
        }


def kernels(only: Sequence[str]) -> list[Kernel]:
    """Returns the kernels of `KERNELS` whose names contain all the words of one entry of `only`; all kernels if `only`
    is empty.

    Raises:
        ValueError: if no kernel matches.
    """
    return by_words(KERNELS, only, "kernel")


def measure_all(
    chosen: Sequence[Kernel], *, sizes: Sequence[float], dtypes: Sequence[Any], reference: bool = True
) -> Iterator[Measurement]:
    """Measures kernels on arrays of every size (in MiB) and every dtype; see `measure`."""
    for dtype in dtypes:
        for size in sizes:
            yield from measure(chosen, mebibytes=size, dtype=dtype, reference=reference)


def measure(
    chosen: Sequence[Kernel],
    *,
    mebibytes: float,
    dtype: Any,
    reference: bool = True,
) -> Iterator[Measurement]:
    """Measures kernels one after another.

    Args:
        chosen: the kernels to measure.
        mebibytes: the size of the values of one array in MiB. It is rounded so that arrays consist of whole blocks.
        dtype: the dtype of the values: float32, bfloat16 or float16.
        reference: whether to also time the reference.
    """
    dtype = jnp.dtype(dtype)
    shape = _shape(round(mebibytes * 2**20 / dtype.itemsize))
    on_gpu = jax.default_backend() != "cpu"
    together = _PROGRAM_BYTES // (math.prod(shape) * dtype.itemsize)
    count = min(max(together, _ARRAYS), _MOST_ARRAYS) if on_gpu else _ARRAYS
    every = [jax.random.normal(jax.random.key(i), shape, dtype) for i in range(count)]
    copy = jax.jit(lambda xs: [jnp.copy(x) for x in xs])
    copy_rate = 2 * sum(x.nbytes for x in every) / seconds_a_call(copy, every)
    for kernel in chosen:
        arrays = every[:_ARRAYS] if kernel.variant == "small" else every
        program, operands, moved = _program(kernel, arrays)
        clock = seconds_on_device if kernel.variant == "small" else seconds_a_call
        native = _microseconds(clock, program("native"), operands)
        plain = _microseconds(clock, program("reference"), operands[:_ARRAYS]) if reference else None
        yield Measurement(
            kernel,
            dtype.name,
            min(moved, arrays[0].nbytes) / 2**20,
            native,
            moved,
            copy_rate,
            plain,
        )


def _microseconds(clock: Callable[..., float], program: Callable[[Any], Any], operands: Sequence[Any]) -> float:
    """Returns the microseconds per array of the program."""
    return clock(jax.jit(_sampled(program)), operands) / len(operands) * 1e6


def _sampled(program: Callable[[Any], Any]) -> Callable[[Any], jax.Array]:
    """Returns a program that computes the same results, but returns only the first number of each."""

    def sampled(operands: Any) -> jax.Array:
        # fix the layout of results; otherwise, XLA might omit a transposition inside the program
        laid = [ops.row_major(leaf) if leaf.ndim else leaf for leaf in jax.tree.leaves(program(operands))]
        made = jax.lax.optimization_barrier(laid)
        return jnp.stack([jnp.ravel(leaf)[0].astype(jnp.float32) for leaf in made])

    return sampled


_Program = Callable[[Implementation], Callable[[Any], Any]]


def _shape(size: int) -> tuple[int, int]:
    """Returns the shape of an array of about `size` elements; small arrays have fewer columns."""
    rows = max(_ROWS, size // _COLS // _ROWS * _ROWS)
    return rows, min(_COLS, max(64, size // rows // 64 * 64))


def _program(kernel: Kernel, arrays: list[jax.Array]) -> tuple[_Program, Any, int]:
    """Returns a function from an implementation to a program, the program's operands, and the minimum number of bytes
    moved per array."""
    form = FORMATS.get(kernel.format)
    if form is None:
        return _amax(kernel.variant, arrays)
    return {"quantize": _quantize, "dequantize": _dequantize, "pack": _pack, "unpack": _unpack}[kernel.operation](
        kernel.variant, form, arrays
    )


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _amax(variant: str, arrays: list[jax.Array]) -> tuple[_Program, Any, int]:
    operands: Any = [[x] for x in arrays]
    if variant == "small":
        each = _SMALL_BYTES // arrays[0].dtype.itemsize
        count = min(_SMALL_COUNT, arrays[0].size // each)
        cut = jax.jit(lambda x: jnp.split(jnp.ravel(x)[: count * each], count))
        operands = [cut(x) for x in arrays]
    moved = sum(x.nbytes for x in operands[0])
    return lambda how: lambda xs: [ops.multi_amax(x, implementation=how) for x in xs], operands, moved


def _given(form: Format, x: jax.Array) -> jax.Array | None:
    return ops.multi_amax([x])[0] if form.has_amax else None


def _quantize(axis: Any, form: Format, arrays: list[jax.Array]) -> tuple[_Program, Any, int]:
    operands = [(x, _given(form, x)) for x in arrays]

    def program(how: Implementation):
        return lambda pairs: [ops.quantize(x, form, amax=a, axis=axis, implementation=how) for x, a in pairs]

    out = jax.eval_shape(program("reference"), operands[:1])
    return program, operands, arrays[0].nbytes + _bytes(out)


def _dequantize(axis: Any, form: Format, arrays: list[jax.Array]) -> tuple[_Program, Any, int]:
    dtype = arrays[0].dtype
    operands = [ops.quantize(x, form, axis=axis) for x in arrays]

    def program(how: Implementation):
        return lambda quantized: [ops.dequantize(q, dtype, implementation=how) for q in quantized]

    return program, operands, arrays[0].nbytes + _bytes(operands[0])


def _plan(shape: tuple[int, ...], transposed: bool) -> PackPlan:
    """Returns the plan of a layer with four weights, each a quarter of the rows; the first two share an output."""
    rows, cols = shape
    each = rows // _WEIGHTS
    outs = ((0, 0), (0, each), (1, 0), (2, 0))
    return PackPlan(
        tuple(
            Piece(rows=each, cols=cols, transposed=transposed, total_rows=each, out=out, out_row=row)
            for out, row in outs
        )
    )


def _layers(arrays: list[jax.Array], transposed: bool) -> list[list[jax.Array]]:
    quarters = jax.jit(lambda x: [jnp.asarray(q.T) if transposed else q for q in jnp.split(x, _WEIGHTS)])
    return [quarters(x) for x in arrays]


def _pack(variant: str, form: Format, arrays: list[jax.Array]) -> tuple[_Program, Any, int]:
    transposed = variant == "transposed"
    plan = _plan(arrays[0].shape, transposed)
    operands = [(layer, ops.multi_amax(layer) if form.has_amax else None) for layer in _layers(arrays, transposed)]

    def program(how: Implementation):
        return lambda layers: [ops.pack(ws, form, a, plan, implementation=how) for ws, a in layers]

    return program, operands, arrays[0].nbytes + plan.bytes(form)


def _unpack(variant: str, form: Format, arrays: list[jax.Array]) -> tuple[_Program, Any, int]:
    del variant
    dtype = arrays[0].dtype
    whole = _plan(arrays[0].shape, False)
    cut = PackPlan(tuple(dataclasses.replace(p, rows=p.rows // _SHARDS) for p in whole.pieces))
    operands = []
    for layer in _layers(arrays, False):
        amax = ops.multi_amax(layer) if form.has_amax else None
        parts = [jnp.split(w, _SHARDS) for w in layer]
        buffer = jnp.stack([ops.pack([p[rank] for p in parts], form, amax, cut) for rank in range(_SHARDS)])
        operands.append((buffer, amax))

    def program(how: Implementation):
        return lambda buffers: [ops.unpack(b, form, a, cut, dtype, implementation=how) for b, a in buffers]

    return program, operands, arrays[0].nbytes + _bytes(operands[0][0])
