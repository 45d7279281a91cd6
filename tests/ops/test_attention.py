"""Attention against one query at a time, over the keys that it may see and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.ops import attention, cudnn_lacks, rope
from gtp_jax.ops._attention import _blocks

from .one_by_one import one_by_one

BATCH, LENGTH, HEADS, WIDTH = 2, 7, 4, 8


def some_mask(*shape):
    mask = np.random.default_rng(5).random(shape) < 0.5
    mask[..., 0, 0] = True
    mask[..., 3:4, :] = False  # a query that sees no key
    return jnp.asarray(mask)


SEGMENTS = jnp.asarray([[0, 0, 0, 1, 1, 2, 2], [3, 3, 5, 5, 5, 5, 5]])
OTHER = jnp.asarray([[0, 0, 2, 2, 9], [9, 9, 9, 9, 9]])  # none of segment 1, 3 or 5
CASES = {
    "bidirectional": {},
    "causal": dict(causal=True),
    "causal window": dict(causal=True, window=3),
    "window": dict(window=2),
    "mask": dict(mask=some_mask(LENGTH, LENGTH)),
    "mask of keys": dict(mask=some_mask(BATCH, 1, LENGTH)),
    "mask of keys for all examples, in a window": dict(causal=True, window=3, mask=some_mask(1, LENGTH)),
    "mask by example": dict(mask=some_mask(BATCH, LENGTH, LENGTH)),
    "causal mask": dict(causal=True, mask=some_mask(BATCH, LENGTH, LENGTH)),
    "segments": dict(causal=True, segment_ids=SEGMENTS),
    "segments, mask and window": dict(window=3, segment_ids=SEGMENTS, mask=some_mask(LENGTH, LENGTH)),
    "soft cap": dict(causal=True, soft_cap=1.5),
    "sinks": dict(causal=True, sinks=jnp.asarray([0.5, -1.0, 2.0, 0.0])),
    "sinks and nothing seen": dict(sinks=jnp.ones(HEADS), mask=some_mask(LENGTH, LENGTH)),
    "scale": dict(scale=0.3),
    "everything": dict(causal=True, window=4, soft_cap=2.0, scale=0.7, sinks=jnp.ones(HEADS), segment_ids=SEGMENTS),
    "another sequence": dict(keys=5),
    "another sequence, window": dict(keys=3, window=2),  # the last queries see no key
    "another sequence, mask": dict(keys=5, mask=some_mask(BATCH, LENGTH, 5)),
    "another sequence, segments": dict(keys=5, segment_ids=(SEGMENTS, OTHER)),
    "cached keys": dict(keys=11, causal=True, query_position=4),
    "cached keys, places by example": dict(keys=11, causal=True, query_position=jnp.asarray([0, 3])),
    "cached keys, window and sinks": dict(
        keys=11, causal=True, window=3, sinks=jnp.ones(HEADS), query_position=jnp.asarray([4, 1])
    ),
    "cached keys, window to both sides, mask": dict(
        keys=11, window=2, mask=some_mask(BATCH, LENGTH, 11), query_position=2
    ),
    "cached keys, segments": dict(
        keys=11, causal=True, query_position=4, segment_ids=(SEGMENTS, jnp.concatenate([SEGMENTS[:, :4], SEGMENTS], 1))
    ),
}


# every case with groups; one head for all, and as many as queries, with some
OTHERS = [(name, kv) for name in ("causal", "everything", "another sequence, mask") for kv in (4, 1)]
OF_GROUPS = [(name, 2) for name in CASES]


USUAL = [("causal", 4), ("another sequence, mask", 2)]


@pytest.mark.parametrize(("name", "kv_heads"), others_full([*OTHERS, *OF_GROUPS], USUAL))
def test_output_and_gradients_are_those_of_one_query_at_a_time(name, kv_heads, x64, monkeypatch):
    options = dict(CASES[name])
    keys, rng = options.pop("keys", LENGTH), np.random.default_rng(1)
    q, of_output = (jnp.asarray(rng.normal(size=(BATCH, LENGTH, HEADS, WIDTH))) for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(BATCH, keys, kv_heads, WIDTH))) for _ in range(2))
    learned = {name: value.astype(float) for name, value in options.items() if name == "sinks"}
    fixed = {name: value for name, value in options.items() if name != "sinks"}

    def in_blocks(*given, **options):
        with monkeypatch.context() as patch:
            patch.setattr(_blocks, "MOST_SCORES", 0)
            patch.setattr(_blocks, "_LARGEST", 3)
            return attention(*given, **options)

    @jax.jit
    def run(*given):
        results = []
        for how in (attention, in_blocks, one_by_one):
            y, back = jax.vjp(lambda q, k, v, extra, how=how: how(q, k, v, **fixed, **extra), *given)
            results.append((y, *back(of_output)))
        return results

    *results, alone = run(q, k, v, learned)
    for result in results:
        assert result[0].dtype == np.float64
        for found, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12 * max(1.0, np.abs(wanted).max()))


@pytest.mark.parametrize("keys", others_full([3, 5, 6], [5]))  # with 6, the last query still sees the last key
def test_queries_beyond_the_window_of_all_keys_have_no_output_and_give_no_gradient(keys):
    rng = np.random.default_rng(6)
    q, k, v = (jnp.asarray(rng.normal(size=(1, n, 2, WIDTH)), jnp.float32) for n in (LENGTH, keys, keys))
    seeing = min(LENGTH, keys + 1)

    @jax.jit
    def run(*qkv):
        y, back = jax.vjp(lambda *qkv: attention(*qkv, window=2), *qkv)
        return y, back(jnp.zeros_like(y).at[:, seeing:].set(1))

    y, gradients = run(q, k, v)
    assert (np.asarray(y).any((0, 2, 3)) == (np.arange(LENGTH) < seeing)).all()
    for gradient in gradients:
        assert not np.asarray(gradient).any()


@pytest.mark.parametrize("window", others_full([None, 3], [3]))
def test_a_query_has_the_output_that_it_has_in_the_whole_sequence(window, x64):
    rng = np.random.default_rng(3)
    q, k = (jnp.asarray(rng.normal(size=(BATCH, LENGTH, heads, WIDTH))) for heads in (4, 2))
    whole = np.asarray(jax.jit(lambda q, k: attention(q, k, k, causal=True, window=window))(q, k))
    some = jnp.concatenate([k, jnp.full((BATCH, 2, 2, WIDTH), 1e3)], 1)  # keys of a cache that is not full yet
    call = jax.jit(lambda one, place: attention(one, some, some, causal=True, window=window, query_position=place))
    for at in range(LENGTH):
        alone = call(q[:, at : at + 1], np.full(BATCH, at))
        np.testing.assert_allclose(alone[:, 0], whole[:, at], rtol=0, atol=1e-12)


@pytest.mark.full
def test_half_precision_is_near_to_what_jax_computes():
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 64, heads, 16)), jnp.bfloat16) for heads in (4, 2, 2))
    found = attention(q, k, v, causal=True, window=9, implementation="reference")
    wanted = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(8, 0), implementation="xla")
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), rtol=0, atol=2e-2)


def test_dropout_drops_weights_at_its_rate_and_keeps_their_mean(key):
    q = k = jnp.zeros((1, 400, 2, 8))
    v = jnp.ones((1, 400, 2, 8))
    call = jax.jit(lambda rate, key: attention(q, k, v, dropout_rate=rate, dropout_key=key), static_argnums=0)
    y = np.asarray(call(0.25, key))
    kept = y[..., 0] * 0.75 * 400  # how many of 400 equal weights each query keeps
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-2)
    assert abs(kept.mean() - 300) < 3 and kept.std() == pytest.approx(np.sqrt(400 * 0.25 * 0.75), rel=0.2)
    assert not (y == call(0.25, jax.random.fold_in(key, 1))).all()
    np.testing.assert_allclose(call(0.0, None), 1, rtol=1e-6)


ZEROS = jnp.zeros((2, 6, 4, 8))
MASK = jnp.ones((6, 6), bool)
OTHER_LENGTH, TWO = ZEROS[:, :5], ZEROS[:, :2]
LONG = jax.ShapeDtypeStruct((1, 2**16, 1, 8), jnp.float32)
THREE_HEADS = ZEROS[:, :, :3]
REFUSED = {  # what the message must name: the call
    "heads `q` divides": lambda: attention(ZEROS, THREE_HEADS, THREE_HEADS),
    "`q` (6, 4, 8) (batch, sequence, heads": lambda: attention(ZEROS[0], ZEROS, ZEROS),
    "6 queries 5 keys Pass": lambda: attention(ZEROS, OTHER_LENGTH, OTHER_LENGTH, causal=True),
    "`query_position` 5 2 6 0 4": lambda: attention(TWO, ZEROS, ZEROS, causal=True, query_position=5),
    "`query_position` (3,) (2,)": lambda: attention(TWO, ZEROS, ZEROS, query_position=jnp.zeros(3, int)),
    "`window` 0": lambda: attention(ZEROS, ZEROS, ZEROS, window=0),
    "0.5 `dropout_key`": lambda: attention(ZEROS, ZEROS, ZEROS, dropout_rate=0.5),
    "`sinks` (2,)": lambda: attention(ZEROS, ZEROS, ZEROS, sinks=jnp.ones(2)),
    "`mask` (5, 6) (6, 6)": lambda: attention(ZEROS, ZEROS, ZEROS, mask=MASK[:5]),
    "`mask` 65536 queries 65536 keys `causal` `is_causal`": lambda: jax.eval_shape(
        lambda x, mask: attention(x, x, x, mask=mask), LONG, jax.ShapeDtypeStruct((1, 1, 2**16, 2**16), jnp.bool_)
    ),
    "`mask` float32 boolean": lambda: attention(ZEROS, ZEROS, ZEROS, mask=MASK * -1e9),
    "`segment_ids` (2, 5) (2, 6)": lambda: attention(ZEROS, ZEROS, ZEROS, segment_ids=jnp.zeros((2, 5), int)),
    "`factor` RopeScaling 3.402823e+38": lambda: gtp.nn.RopeScaling(kind="linear", factor=10**400),
    "`kind` RopeScaling 'ntk' 'linear'": lambda: gtp.nn.RopeScaling(kind="ntk", factor=2),
    "`factor` RopeScaling -1": lambda: gtp.nn.RopeScaling(kind="linear", factor=-1),
    "`beta_slow` 32.0 `beta_fast`": lambda: gtp.nn.RopeScaling(kind="yarn", factor=8, beta_slow=32.0),
    "`attention_factor` 1.1 `kind` 'yarn'": lambda: gtp.nn.RopeScaling(kind="llama3", factor=8, attention_factor=1.1),
    "`low_freq_factor` 4 `high_freq_factor`": lambda: gtp.nn.RopeScaling(kind="llama3", factor=8, low_freq_factor=4),
}


@pytest.mark.parametrize("named", REFUSED)
def test_bad_argument_is_named(named):
    with pytest.raises(ValueError, match=naming(named)):
        REFUSED[named]()


@pytest.mark.bad_input
def test_a_place_that_is_no_integer_is_named():
    with pytest.raises(TypeError, match=naming("`query_position` 1.0 integer")):
        attention(ZEROS, ZEROS, ZEROS, query_position=1.0)


def test_what_cudnn_does_not_compute_is_said():
    said = cudnn_lacks(jnp.bfloat16, 128, soft_cap=True, sinks=True)
    assert said == "jax.nn has no soft cap and no sinks in cuDNN's attention"
    if jax.default_backend() == "cpu":
        assert cudnn_lacks(jnp.bfloat16, 128) == "cuDNN runs on GPUs only"


def test_positions_begin_again_with_each_document():
    ids = jnp.asarray([[7, 7, 7, 2, 2, 7], [0, 1, 2, 2, 2, 2]])
    np.testing.assert_array_equal(jax.jit(gtp.ops.positions_of)(ids), [[0, 1, 2, 0, 1, 0], [0, 0, 0, 1, 2, 3]])


@pytest.mark.parametrize(
    "rotary_dim, scaling", pairwise([None, 4], [None, gtp.nn.RopeScaling(kind="linear", factor=4.0)])
)
def test_rotation_is_a_complex_product_by_position(rotary_dim, scaling, x64):
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(2, 5, 3, 8)), rng.integers(0, 1000, (2, 5))
    half = (rotary_dim or 8) // 2
    angle = positions[..., None] * 100.0 ** (-np.arange(half) / half) / (4 if scaling else 1)
    turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angle)[:, :, None]
    wanted = np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], -1)
    large = [gtp.nn.RopeScaling(kind="linear", factor=factor) for factor in (10**10, 1e10)]  # JAX's ints have 32 bits

    @jax.jit
    def run(x, positions):
        turn = functools.partial(rope, theta=100.0, rotary_dim=rotary_dim)
        found = turn(x, positions=positions, scaling=scaling)
        alike = turn(x, positions=positions[0])[0], turn(x[:1], positions=positions[:1])[0]
        return found, [rope(x, theta=100.0, scaling=one) for one in large], alike

    found, *pairs = run(x, positions)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)
