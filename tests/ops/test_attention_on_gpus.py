"""cuDNN's attention against the one written out, on this machine's GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gtp_jax as gtp
from gtp_jax.formats import FP8_E4M3
from gtp_jax.ops import (
    attention,
    attention_backward,
    attention_fp8,
    attention_with_lse,
    multi_amax,
    packed_lacks,
    power_of_two_amax,
)
from gtp_jax.ops._attention import _blocks, _packed

pytestmark = pytest.mark.gpu

LENGTH, MEMORY = 512, 384
RNG = np.random.default_rng(0)
SEGMENTS = jnp.asarray(np.sort(RNG.integers(0, 6, (2, LENGTH)), axis=1))
OF_MEMORY = jnp.asarray(np.sort(RNG.integers(2, 8, (2, MEMORY)), axis=1))  # none of segments 0 and 1
MASK = RNG.random((2, LENGTH, LENGTH)) < 0.5
MASK[:, 7] = False  # a query that sees no key
MASK = jnp.asarray(MASK)

CASES = {
    "causal": dict(causal=True),
    "bidirectional": {},
    "causal window": dict(causal=True, window=100),
    "window to both sides": dict(window=100),
    "mask": dict(mask=MASK),
    "causal mask": dict(causal=True, mask=MASK),
    "mask alike": dict(mask=MASK[0]),
    "segments": dict(causal=True, segment_ids=SEGMENTS),
    "segments in a window": dict(causal=True, segment_ids=SEGMENTS, window=50),
    "scale": dict(causal=True, scale=0.2),
    "another sequence": dict(keys=MEMORY),
    "another sequence, window": dict(keys=MEMORY, window=100),  # the last queries see no key
    "another sequence, segments": dict(keys=MEMORY, segment_ids=(SEGMENTS, OF_MEMORY)),
    "cached keys": dict(keys=2 * LENGTH, causal=True, query_position=jnp.asarray([LENGTH, 7])),
}


def error(found, wanted):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 128), (8, 64), (1, 128)])
@pytest.mark.parametrize("name", CASES)
def test_cudnn_agrees_with_the_written_out_one(name, kv_heads, head_dim, key):
    options = dict(CASES[name])
    keys = options.pop("keys", LENGTH)
    shapes = ((2, LENGTH, 8, head_dim), *((2, keys, kv_heads, head_dim),) * 2, (2, LENGTH, 8, head_dim))
    drawn = (jax.random.normal(one, shape) for one, shape in zip(jax.random.split(key, 4), shapes, strict=True))
    *half, of_output = (t.astype(jnp.bfloat16) for t in drawn)

    def measured(how, operands, of_output):
        y, back = jax.vjp(lambda *t: attention(*t, implementation=how, **options), *operands)
        return y, *back(of_output)

    found = jax.jit(lambda *t: measured("native", *t))(half, of_output)
    with jax.default_matmul_precision("highest"):
        wide = [t.astype(jnp.float32) for t in half]
        wanted = jax.jit(lambda *t: measured("reference", *t))(wide, of_output.astype(jnp.float32))
    for what, one, other in zip(("output", "q", "k", "v"), found, wanted, strict=True):
        assert error(one, other) < 1e-2, what
    unseen = np.asarray(wanted[0] == 0).all((2, 3))
    unseeing = ("mask", "causal mask", "mask alike", "another sequence, window", "another sequence, segments")
    assert unseen.any() == (name in unseeing)
    for array in found[:2]:  # the output, and the gradient of queries
        assert (np.asarray(array, np.float32)[unseen] == 0).all()


@pytest.mark.parametrize("how", ["native", "reference"])
def test_parts_of_the_keys_make_attention_to_all_of_them(how, key):
    shapes = ((2, LENGTH, 8, 128), *((2, LENGTH, 2, 128),) * 2, (2, LENGTH, 8, 128))
    of_each = zip(jax.random.split(key, 4), shapes, strict=True)
    q, k, v, of_output = (jax.random.normal(one, shape, jnp.bfloat16) for one, shape in of_each)

    @jax.jit
    def in_parts(q, k, v, of_output):
        parts = [(k[:, at], v[:, at]) for at in (slice(0, MEMORY), slice(MEMORY, None))]
        outputs, sums = zip(*(attention_with_lse(q, *part, implementation=how) for part in parts), strict=True)
        lse = functools.reduce(jnp.logaddexp, sums)
        shares = [jnp.swapaxes(jnp.exp(own - lse), 1, 2)[..., None] for own in sums]
        y = sum(share * own for share, own in zip(shares, outputs, strict=True)).astype(q.dtype)
        gradients = [attention_backward(q, *part, y, lse, of_output, implementation=how) for part in parts]
        of_q, of_k, of_v = zip(*gradients, strict=True)
        return y, of_q[0].astype(jnp.float32) + of_q[1], jnp.concatenate(of_k, 1), jnp.concatenate(of_v, 1)

    def whole(*given):
        y, back = jax.vjp(functools.partial(attention, implementation="reference"), *given[:3])
        return y, *back(given[3])

    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])):
        found = in_parts(q, k, v, of_output)
        with jax.default_matmul_precision("highest"):
            wanted = jax.jit(whole)(*(x.astype(jnp.float32) for x in (q, k, v, of_output)))
    for what, one, other in zip(("output", "q", "k", "v"), found, wanted, strict=True):
        assert error(one, other) < 1e-2, what


BLOCKS = {
    "soft cap": dict(causal=True, soft_cap=30.0),
    "sinks in a window": dict(causal=True, window=1000, sinks=jnp.linspace(-1.0, 1.0, 8)),
    "window to both sides": dict(window=700),
    "segments": dict(segment_ids=(jnp.arange(2304)[None] // 700, jnp.arange(2304)[None] // 500)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_agree_with_the_written_out_form(name, key, monkeypatch):
    shapes = ((1, 2304, 8, 128), *((1, 2304, 2, 128),) * 2, (1, 2304, 8, 128))
    of_each = zip(jax.random.split(key, 4), shapes, strict=True)
    given = [jax.random.normal(one, shape, jnp.bfloat16) for one, shape in of_each]

    def measured(q, k, v, of_output):
        how = functools.partial(attention, implementation="reference", **BLOCKS[name])
        y, back = jax.vjp(how, q, k, v)
        return y, *back(of_output)

    found = jax.jit(measured)(*given)
    monkeypatch.setattr(_blocks, "MOST_SCORES", 2304**2)
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(lambda *t: measured(*t))(*(x.astype(jnp.float32) for x in given))
    for what, one, other in zip(("output", "q", "k", "v"), found, wanted, strict=True):
        assert error(one, other) < 1e-2, what


@pytest.mark.parametrize("head_dim", [8, 256])
def test_sizes_that_explain_promises_run(head_dim):
    if head_dim == 256 and jax.devices()[0].compute_capability < "9.0":
        pytest.skip("heads of 256 need compute capability 9.0")
    x = jnp.ones((1, 64, 2, head_dim), jnp.bfloat16)
    run = jax.jit(jax.grad(lambda x: attention(x, x, x, causal=True, implementation="native").astype(float).sum()))
    assert jnp.isfinite(run(x)).all()


ROW = 2048
ONE = np.zeros(ROW, int)


def runs(*lengths):
    return np.repeat(np.arange(len(lengths)), lengths)


PACKED = {  # ids of two rows, which way they take, other options
    "one document": ([ONE, ONE], 0, {}),
    "two": ([runs(1500, 548), ONE], 1, {}),
    "one-token documents": ([runs(1, 1, 2045, 1), ONE], 1, {}),
    "one-token documents at the end of a batch": ([ONE, runs(2046, 1, 1)], 1, {}),
    "twelve": ([runs(*[170] * 11, 178), runs(*[100] * 11, 948)], 2, {}),
    "a long one among short": ([runs(*[8] * 10, 1968), runs(600, *[3] * 5, 1433)], 2, {}),
    "padding at the end": ([runs(900, 700, 300, 100, 48), runs(600, 600, 600, 200, 48)], 2, {}),
    "fifty": ([runs(*[40] * 49, 88), runs(700, *[20] * 49, 368)], 3, {}),
    "of all lengths": ([runs(600, 513, 130, 129, 128, 127, *[1] * 20, 401), ONE], 2, {}),
    "more than there is room for": ([runs(*[10] * 200, 48), runs(*[10] * 200, 48)], 4, {}),
    "an id comes back": ([runs(1000, 500, 548) % 2, ONE], 4, {}),
    "bidirectional": ([runs(600, *[30] * 30, 548), ONE], 3, dict(causal=False)),
    "window": ([runs(600, *[30] * 30, 548), ONE], 3, dict(window=200)),
    "window in the mask": ([runs(1000, 500, 548) % 2, ONE], 4, dict(window=200)),
    "float16": ([runs(600, *[30] * 30, 548), ONE], 3, dict(dtype=jnp.float16)),
    "float16 in the mask": ([runs(1000, 500, 548) % 2, ONE], 4, dict(dtype=jnp.float16)),
}


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 128), (8, 64)])
@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_agree_with_the_written_out_ones(name, kv_heads, head_dim, key):
    rows, way, options = PACKED[name]
    ids, options = jnp.asarray(np.stack(rows)), {"causal": True, **options}
    dtype = options.pop("dtype", jnp.bfloat16)
    shapes = [(2, ROW, heads, head_dim) for heads in (8, kv_heads, kv_heads, 8)]
    drawn = [jax.random.normal(one, shape, dtype) for one, shape in zip(jax.random.split(key, 4), shapes, strict=True)]

    def measured(how, q, k, v, of_output):
        y, back = jax.vjp(lambda *t: attention(*t, implementation=how, segment_ids=ids, **options), q, k, v)
        return y, *back(of_output)

    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])):
        if packed_lacks(drawn[0], causal=True, window=None):
            pytest.skip("needs compute capability 9.0")
        assert _packed.documents_of(ids).way == way
        found = jax.jit(lambda *t: measured("native", *t))(*drawn)
        with jax.default_matmul_precision("highest"):
            wide = [t.astype(jnp.float32) for t in drawn]
            wanted = jax.jit(lambda *t: measured("reference", *t))(*wide)
    for what, one, other in zip(("output", "q", "k", "v"), found, wanted, strict=True):
        assert np.isfinite(np.asarray(one, np.float32)).all(), what
        # in each row by itself, and in the last tokens, so that a small part of a batch counts
        for part in (np.s_[0], np.s_[1], np.s_[:, -64:]):
            assert error(one[part], other[part]) < 1e-2, (what, part)


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("options", [dict(causal=True), {}, dict(scale=0.2), dict(keys=MEMORY)], ids=str)
def test_cudnn_in_fp8_is_as_near_to_exact_attention_as_the_written_out_one(options, kv_heads, key):
    options = dict(options)
    keys = options.pop("keys", LENGTH)
    shapes = ((2, LENGTH, 8, 128), *((2, keys, kv_heads, 128),) * 2, (2, LENGTH, 8, 128))
    of_each = zip(jax.random.split(key, 4), shapes, strict=True)
    *operands, of_output = (jax.random.normal(one, shape, jnp.bfloat16) for one, shape in of_each)

    def measured(function, operands, of_output):
        y, back = jax.vjp(functools.partial(function, **options), *operands)
        return y, *back(of_output)

    in_fp8 = (functools.partial(attention_fp8, implementation=how) for how in ("native", "reference"))
    with jax.default_matmul_precision("highest"):
        found, written = (jax.jit(functools.partial(measured, how))(operands, of_output) for how in in_fp8)
        # of the same rounded operands, with a softmax and an output that are not rounded
        rounded = [decoded(x) for x in operands]
        exact = jax.jit(functools.partial(measured, functools.partial(attention, implementation="reference")))(
            rounded, of_output.astype(jnp.float32)
        )
    for what, one, other, wanted in zip(("output", "q", "k", "v"), found, written, exact, strict=True):
        # Both round the weights of the softmax, but cuDNN relative to the maximum of the keys so far. E4M3 rounds such
        # weights independently, so the two are as far from each other as from exact attention.
        # cuDNN's backward also rounds to bfloat16 between its matmuls
        assert error(one, wanted) < 1.1 * error(other, wanted) + 2e-3, what
        assert error(other, wanted) < 0.04, what


def decoded(x):
    q = gtp.ops.quantize(x, FP8_E4M3, amax=power_of_two_amax(multi_amax([x])[0], FP8_E4M3))
    return gtp.ops.dequantize(q, jnp.float32)


def test_vmap_of_cudnn_in_fp8_scales_each_example_by_itself(key):
    q, k, v = (jax.random.normal(one, (3, 1, 256, 4, 128), jnp.bfloat16) for one in jax.random.split(key, 3))
    q = q * jnp.asarray([1, 64, 1 / 64], q.dtype).reshape(3, 1, 1, 1, 1)
    run = functools.partial(attention_fp8, causal=True, implementation="native")
    np.testing.assert_array_equal(jax.vmap(run)(q, k, v), jnp.stack([run(*one) for one in zip(q, k, v, strict=True)]))
