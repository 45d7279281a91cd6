"""A QuantizedArray is a pytree like any other, and a broken one is refused by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax.formats import FORMATS, FP8_E4M3, MXFP8, NVFP4, NVFP4_1D, QuantizedArray, validate


def made(format, shape=(33, 47), axis="row") -> QuantizedArray:
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    return gtp.ops.quantize(x, format, axis=axis, implementation="reference")


def assert_equal(a: QuantizedArray, b: QuantizedArray) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


# rows 33, columns 47: shapes of codes and scales of the row-wise and of the column-wise copy
SHAPES = {
    "NVFP4": ((33, 24), (3, 3), (47, 17), (3, 3)),
    "NVFP4_1D": ((33, 24), (33, 3), (47, 17), (47, 3)),
    "MXFP8": ((33, 47), (33, 2), (33, 47), (2, 47)),
    "FP8_E4M3": ((33, 47), None, (47, 33), None),
    "FP8_E5M2": ((33, 47), None, (47, 33), None),
}


@pytest.mark.parametrize("format", others_full(FORMATS.values(), [NVFP4, FP8_E4M3]), ids=str)
def test_shapes_and_bytes_are_the_documented_ones(format):
    row, column = jax.eval_shape(lambda: made(format, axis="both"))
    shapes = tuple(None if leaf is None else leaf.shape for q in (row, column) for leaf in (q.codes, q.scales))
    assert shapes == SHAPES[format.name]
    assert row.shape == column.shape == (33, 47)
    assert (row.amax is not None) == format.has_amax
    q = made(format, (64, 128))
    assert q.nbytes == 64 * 128 * format.bytes_per_element + 4 * format.has_amax


def test_jit_and_scan_and_vmap_carry_it():
    q = jax.vmap(lambda x: gtp.ops.quantize(x, NVFP4, implementation="reference"))(jnp.ones((3, 17, 20)))
    assert_equal(jax.jit(lambda q: q)(q), q)
    _, scanned = jax.lax.scan(lambda carry, layer: (carry, layer), 0, q)
    assert_equal(scanned, q)
    one = jax.tree.map(lambda leaf: leaf[1], q)
    validate(one)
    assert (q.shape, one.shape) == ((3, 17, 20), (17, 20))


def test_no_recompilation_for_the_same_format_and_shape():
    count = 0

    @jax.jit
    def read(q):
        nonlocal count
        count += 1
        return q.codes

    for format in (NVFP4, NVFP4, MXFP8, MXFP8):
        read(made(format))
    assert count == 2


@pytest.mark.parametrize("format", others_full(FORMATS.values(), [NVFP4]), ids=str)
def test_orbax_restores_it(format, tmp_path):
    tree = {"kernel": made(format), "column": made(format, (2, 33, 47), axis="column")}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", tree)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "step", jax.eval_shape(lambda: tree))
    for name, q in tree.items():
        assert_equal(restored[name], q)


FOUR, EIGHT, NO_BLOCKS = made(NVFP4_1D), made(MXFP8), made(FP8_E4M3)

BROKEN = {  # what the message must name: the error, and what is broken
    "`q` QuantizedArray": (TypeError, lambda: jnp.ones(3)),
    "`codes` int8 uint8": (TypeError, lambda: replace(FOUR, codes=FOUR.codes.astype(jnp.int8))),
    "`codes` NVFP4_1D (33, 47) (33, 23) (33, 24)": (ValueError, lambda: replace(FOUR, codes=FOUR.codes[:, :-1])),
    "`scales` (2, 33) (33, 2)": (ValueError, lambda: replace(EIGHT, scales=EIGHT.scales.T)),
    "`scales` missing row-wise MXFP8": (ValueError, lambda: replace(EIGHT, scales=None)),
    "`scales` not allowed FP8_E4M3": (ValueError, lambda: replace(NO_BLOCKS, scales=EIGHT.scales)),
    "`amax` missing row-wise NVFP4_1D": (ValueError, lambda: replace(FOUR, amax=None)),
    "`amax` (2,) ()": (ValueError, lambda: replace(FOUR, amax=jnp.ones(2))),
    "column-wise NVFP4_1D (47, 17)": (ValueError, lambda: replace(FOUR, columns=True)),
}


def replace(q: QuantizedArray, **changes) -> QuantizedArray:
    return dataclasses.replace(q, **changes)


@pytest.mark.bad_input
@pytest.mark.parametrize("named", BROKEN)
def test_a_broken_one_is_refused_by_name(named):
    error, make = BROKEN[named]
    for function in (validate, gtp.ops.dequantize):
        with pytest.raises(error, match=naming(named)):
            function(make())
