"""Quantizing shards and gathering their codes is gathering the shards and quantizing the whole, bit for bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import pairwise

import gtp_jax as gtp
from gtp_jax import formats, native
from gtp_jax.layout import Division, Layout, Split, layouts_of_kernels
from gtp_jax.weights import Bundle, WireSpec, pack_all
from gtp_jax.weights._fused import gather_weight
from gtp_jax.weights._packed import gather_packed
from gtp_jax.weights._plan import plan_of

from ..ops.bits import assert_same_bits

FORMATS = {name: formats.FORMATS[name] for name in ("NVFP4", "NVFP4_1D", "MXFP8", "FP8_E4M3")}


def bundle(shards, layouts, form) -> Bundle:
    """The kernels of one module, in a format."""
    spec = WireSpec(layouts=tuple(layouts), dtype=np.dtype(jnp.bfloat16), wire=form)
    return Bundle({"w": tuple(shards)}, {"w": spec})


def weights_of(layout: Layout, case: str) -> np.ndarray:
    rng = np.random.default_rng(len(case))
    w = rng.normal(size=layout.shape).astype(np.float32)
    if case == "unequal":  # the largest shard decides the scale of all
        w *= np.geomspace(1e-3, 1e3, w.shape[1])
    if case == "zero":
        w[:32, :32] = 0
    if case == "nan":
        w[5, 7] = np.nan
        w[40, 30] = np.inf
    return w


# whole blocks; shards of 15 and of 7 rows; shards of columns; of two axes, and of unequal parts
PLACES = [
    ((64, 128), dict(gtp=4)),
    ((64, 120), dict(gtp=8)),
    ((64, 56), dict(gtp=8)),
    ((128, 57), dict(gtp=4)),
    ((64, 128), dict(gtp=2, tp=2)),
    ((64, 100), dict(gtp=2, tp=3)),
]


@pytest.mark.parametrize("form, place, case", pairwise(FORMATS.values(), PLACES, ["nan", "zero", "unequal"]), ids=str)
def test_quantize_then_gather_is_gather_then_quantize(form, place, case):
    size, degrees = place
    count = int(np.prod(list(degrees.values())))
    mesh = gtp.make_mesh(**degrees, devices=jax.devices()[:count])
    with jax.set_mesh(mesh):
        (layout,) = layouts_of_kernels([size], rows=1, split_dim=1)
        whole = weights_of(layout, case)

        def local(w):
            (packed,) = pack_all([bundle([w], [layout], form)])
            amax = gtp.ops.multi_amax([w])[0]
            amax = jax.lax.pmax(amax, ("tp", "gtp"))
            if layout.takes_part:  # the blocks are those of the whole weight, of which a rank takes its part
                w = jax.lax.all_gather(w, layout.axes, axis=layout.gather.dim, tiled=True).T
                late = gtp.ops.dequantize(gtp.ops.quantize(w, form, amax=amax if form.has_amax else None), jnp.float32)
                late = layout.split.take(late, 0)
            else:
                late = gather_weight((w,), (layout,), jnp.float32)  # rank after rank
                late = gtp.ops.dequantize(
                    gtp.ops.quantize(late, form, amax=amax if form.has_amax else None), jnp.float32
                )
            return gather_packed(packed, [(layout,)], jnp.float32)[0], late

        mapped = jax.shard_map(local, in_specs=layout.spec, out_specs=P("tp"), check_vma=False)
        early, late = jax.jit(mapped)(jnp.asarray(whole))
    assert_same_bits(early, late)
    if case == "nan":
        assert (
            np.isnan(np.asarray(early)).sum() == {"NVFP4": 512, "NVFP4_1D": 32, "MXFP8": 64, "FP8_E4M3": 2}[form.name]
        )


def sharded(shape) -> Layout:
    """Two shards of the output features."""
    return Layout(shape, rows=1, gather=Division(1, ("gtp",), (2,)))


def test_rows_shorter_than_a_block_are_refused():
    message = naming("rows 31 32 MXFP8 `exclude`")
    assert plan_of([[sharded((32, 64))]], formats.MXFP8) and plan_of([[sharded((1, 64))]], formats.FP8_E4M3)
    halves = dict(tensor=Division(0, ("tp",), (2,)), split_dim=0, split=Split(62, 1, (31, 31), "tp"))
    for layout in (sharded((31, 64)), dataclasses.replace(sharded((62, 64)), **halves)):
        with pytest.raises(ValueError, match=message):
            plan_of([[layout]], formats.MXFP8)


def test_no_expert_is_cut_out_of_its_stack_to_be_quantized():
    # slices of what a kernel is called with are copies: those of 128 experts took 5 of 103 ms of a step on a GPU
    if not native.has("gtp_pack", "cpu"):
        pytest.skip(native.describe())
    layers, experts, shape = 2, 16, (16, 64, 96)
    with jax.set_mesh(gtp.make_mesh(gtp=4, devices=jax.devices()[:4])):
        layouts = layouts_of_kernels([shape] * 2, rows=1, split_dim=1)

        def packed(shards):
            return [one.buffer for one in pack_all([bundle(shards, layouts, formats.NVFP4)])]

        specs = P(None, *layouts[0].spec)
        mapped = jax.shard_map(packed, in_specs=(specs,), out_specs=P(None, "gtp"), check_vma=False)
        text = jax.jit(mapped).lower((jnp.zeros((layers, *shape)),) * 2).as_text()
    assert "gtp_pack" in text and text.count("stablehlo.slice") < experts
