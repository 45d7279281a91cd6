"""A layer's buffer: its bytes, and that packing shards and unpacking the gathered buffers is quantizing the whole."""

import dataclasses
import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.formats import FORMATS, FP8_E4M3, FP8_E5M2, MXFP8, NVFP4, PackPlan, Piece
from gtp_jax.ops import pack_apart

from . import oracle
from .bits import assert_same_bits, device


def every_format(*usual):
    """Every format; by default the usual ones, if any."""
    return pytest.mark.parametrize("format", others_full(FORMATS.values(), usual), ids=str)


# Two outputs: 0 is a fused weight of two pieces, one of them stored transposed; 1 is a weight of odd sizes.
LOGICAL = [(70, 48, 0), (33, 48, 0), (45, 19, 1)]
TRANSPOSED = [False, True, False]


def weights(dtype, seed=0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [(random.normal(size=(r, c)) * 10.0**i).astype(dtype) for i, (r, c, _) in enumerate(LOGICAL)]


def plan_for(format, shards: int) -> PackPlan:
    pieces, next_row = [], {}
    for (rows, cols, out), transposed in zip(LOGICAL, TRANSPOSED, strict=True):
        step = format.alignment * shards if shards > 1 else 1
        per_shard = -(-rows // step) * step // shards
        pieces.append(
            Piece(
                rows=per_shard, cols=cols, transposed=transposed, total_rows=rows, out=out, out_row=next_row.get(out, 0)
            )
        )
        next_row[out] = pieces[-1].out_row + rows
    return PackPlan(tuple(pieces))


def shard_of(weight: np.ndarray, piece: Piece, shards: int, rank: int) -> np.ndarray:
    padded = np.zeros((piece.rows * shards, piece.cols), weight.dtype)
    padded[: len(weight)] = weight
    mine = padded[rank * piece.rows : (rank + 1) * piece.rows]
    return np.ascontiguousarray(mine.T) if piece.transposed else mine


def gathered(format, dtype, shards: int, implementation):
    plan, whole = plan_for(format, shards), weights(dtype)
    amax = jnp.array([oracle.amax(w) for w in whole])
    buffers = [
        gtp.ops.pack(
            [device(shard_of(w, p, shards, rank)) for w, p in zip(whole, plan.pieces, strict=True)],
            format,
            amax,
            plan,
            implementation=implementation,
        )
        for rank in range(shards)
    ]
    return plan, whole, amax, jnp.stack(buffers)


@pytest.mark.parametrize(
    "format, dtype, shards, into",
    pairwise(
        FORMATS.values(),
        [ml_dtypes.bfloat16, np.float32, np.float16],
        [3, 1, 2],
        [oracle.BFLOAT16, np.float32],
        usual=1,
    ),
)
def test_unpacking_the_gathered_slices_is_dequantizing_the_whole_weight(format, dtype, shards, into, implementation):
    plan, whole, amax, buffer = gathered(format, dtype, shards, implementation)
    outputs = gtp.ops.unpack(buffer, format, amax, plan, into, implementation=implementation)
    assert len(outputs) == 2
    expected = [value_of(format, weight, into) for weight in whole]
    assert_same_bits(outputs[0], np.concatenate(expected[:2]), "output 0")
    assert_same_bits(outputs[1], expected[2], "output 1")


def value_of(format, weight: np.ndarray, dtype=oracle.BFLOAT16) -> np.ndarray:
    """The whole weight, quantized and dequantized."""
    whole = oracle.amax(weight)
    codes, scales = oracle.quantize(format.name, weight[None], whole)
    return oracle.dequantize(format.name, codes, scales, whole[None], weight.shape, dtype)[0]


@every_format(NVFP4, FP8_E5M2)
def test_the_buffer_is_the_documented_one_byte_for_byte(format, implementation):
    plan, whole, amax, buffer = gathered(format, np.float32, 2, implementation)
    for rank in range(2):
        shards = []
        for weight, piece in zip(whole, plan.pieces, strict=True):
            stored = shard_of(weight, piece, 2, rank)
            shards.append(stored.T if piece.transposed else stored)
        expected = np.frombuffer(oracle.pack(format.name, shards, np.asarray(amax)), np.uint8)
        assert_same_bits(buffer[rank], expected, f"shard {rank}")
    assert buffer.shape == (2, plan.bytes(format))


@every_format()
def test_a_stack_of_layers_packs_as_its_layers_do(format, implementation):
    plan = plan_for(format, 2)
    layers = [
        [device(shard_of(w, p, 2, 0)) for w, p in zip(weights(np.float32, seed), plan.pieces, strict=True)]
        for seed in (0, 1)
    ]
    amaxes = jnp.stack([gtp.ops.multi_amax(layer) for layer in layers])
    stacked = [jnp.stack(arrays) for arrays in zip(*layers, strict=True)]
    together = gtp.ops.pack(stacked, format, amaxes, plan, implementation=implementation)
    for index, layer in enumerate(layers):
        alone = gtp.ops.pack(layer, format, amaxes[index], plan, implementation=implementation)
        assert_same_bits(together[index], alone, f"layer {index}")
    apart = pack_apart(stacked, format, amaxes, plan, implementation=implementation)
    assert [buffer.shape for buffer in apart] == [(1, plan.bytes(format))] * 2
    assert_same_bits(jnp.concatenate(apart), together, "buffers of their own")


@pytest.mark.parametrize(
    "format, lead", others_full(itertools.product([NVFP4, MXFP8, FP8_E4M3], [(), (2,)]), [(NVFP4, (2,))]), ids=str
)
def test_pieces_that_share_an_array_pack_as_arrays_of_their_own_do(format, lead, implementation):
    # gate and up of two experts in turns, of which up is stored transposed, and a weight that is no expert
    common = dict(rows=32, cols=48, total_rows=32, out=0)
    turns = [
        Piece(**common, transposed=array == 1, out_row=64 * expert + 32 * array, source=(array, expert))
        for expert in range(2)
        for array in range(2)
    ]
    turns.append(Piece(rows=20, cols=35, transposed=False, total_rows=20, out=1, out_row=0, source=(2, 0)))
    plan = PackPlan(tuple(turns))
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(*lead, *shape)).astype(np.float32) for shape in plan.arrays]
    pieces = [arrays[array][..., index, :, :] for array, index in plan.sources]
    amax = jnp.asarray(np.stack([np.max(np.abs(x), axis=(-2, -1)) for x in pieces], axis=-1))
    arrays = [device(x) for x in arrays]
    found = gtp.ops.pack(arrays, format, amax, plan, implementation=implementation)
    for layer in np.ndindex(*lead):
        stored = [np.asarray(x[layer]) for x in pieces]
        alone = [x.T if piece.transposed else x for x, piece in zip(stored, turns, strict=True)]
        expected = np.frombuffer(oracle.pack(format.name, alone, np.asarray(amax[layer])), np.uint8)
        assert_same_bits(found[layer], expected, f"layer {layer}")
    if lead:
        apart = pack_apart(arrays, format, amax, plan, implementation=implementation)
        assert_same_bits(jnp.concatenate(apart), found, "buffers of their own")


def test_a_nan_spoils_its_block_of_its_weight(implementation):
    plan, whole = plan_for(NVFP4, 1), weights(np.float32)
    whole[1][20, 40] = np.nan
    shards = [jnp.asarray(shard_of(w, p, 1, 0)) for w, p in zip(whole, plan.pieces, strict=True)]
    amax = gtp.ops.multi_amax(shards, implementation=implementation)
    buffer = gtp.ops.pack(shards, NVFP4, amax, plan, implementation=implementation)
    fused, other = gtp.ops.unpack(buffer[None], NVFP4, amax, plan, implementation=implementation)
    bad = np.isnan(np.asarray(fused, np.float32))
    assert (
        bad[70 + 16 : 70 + 32, 32:48].all() and bad.sum() == 256 and not np.isnan(np.asarray(other, np.float32)).any()
    )


def test_a_piece_without_rows(implementation):
    plan = PackPlan((Piece(rows=0, cols=16, transposed=False, total_rows=0, out=0, out_row=0),))
    buffer = gtp.ops.pack([jnp.zeros((0, 16))], NVFP4, jnp.zeros(1), plan, implementation=implementation)
    assert buffer.shape == (0,)
    (out,) = gtp.ops.unpack(buffer[None], NVFP4, jnp.zeros(1), plan, implementation=implementation)
    assert out.shape == (0, 16)


@every_format(MXFP8)
def test_by_shard_the_weights_lie_as_a_gather_of_their_shards_would_leave_them(format, implementation):
    plan, whole, amax, buffer = gathered(format, ml_dtypes.bfloat16, 3, implementation)
    fused = [p for p in plan.pieces if p.out == 0]
    rows = [p.rows for p in plan.pieces]
    starts = {0: 0, 1: fused[0].rows, 2: 0}
    by_shard = PackPlan(
        tuple(dataclasses.replace(p, total_rows=p.rows, out_row=starts[i]) for i, p in enumerate(plan.pieces)),
        by_shard=True,
    )
    outputs = gtp.ops.unpack(buffer, format, amax, by_shard, implementation=implementation)
    assert [o.shape for o in outputs] == [(3 * (rows[0] + rows[1]), 48), (3 * rows[2], 19)]
    for out, members in ((0, (0, 1)), (1, (2,))):
        parts = []
        for rank in range(3):
            for index in members:
                padded = np.zeros((3 * rows[index], LOGICAL[index][1]), oracle.BFLOAT16)
                padded[: LOGICAL[index][0]] = value_of(format, whole[index])
                parts.append(padded[rank * rows[index] : (rank + 1) * rows[index]])
        assert_same_bits(outputs[out], np.concatenate(parts), f"output {out}")
