"""Attention in blocks of queries and keys, against one query at a time and against the written-out form."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming
from selection import pairwise

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.chain._policy import with_remat
from gtp_jax.ops import attention, attention_backward, attention_with_lse
from gtp_jax.ops._attention._blocks import Dropout, Rule, forward_in_blocks

from ..hlo.programs import needs_target
from .one_by_one import one_by_one

P = jax.sharding.PartitionSpec

BATCH, QUERIES, KEYS, HEADS, WIDTH = 2, 7, 11, 4, 8
SIDES = (3, 4)  # neither divides its length
RNG = np.random.default_rng(0)
OF_QUERIES = jnp.asarray(np.array([[0, 0, 0, 1, 1, 2, 2], [3, 3, 5, 5, 5, 5, 5]]))
OF_KEYS = jnp.asarray(
    np.array([[0, 0, 0, 0, 2, 2, 2, 9, 2, 2, 2], [5, 3, 3, 5, 5, 5, 5, 9, 9, 9, 9]])
)  # none of segment 1
MASK = RNG.random((BATCH, 1, QUERIES, KEYS)) < 0.6
MASK[:, :, 3] = False  # a query that sees no key
SEEING = np.array([0, 1, 2, 4, 5, 6])
PADDING = (np.arange(KEYS) < 6) & (RNG.random((BATCH, 1, 1, KEYS)) < 0.8)  # whole blocks of keys are padding


def drawn(kv_heads, rng=RNG):
    shapes = [(BATCH, QUERIES, HEADS, WIDTH), *((BATCH, KEYS, kv_heads, WIDTH),) * 2, (BATCH, QUERIES, HEADS, WIDTH)]
    return [jnp.asarray(rng.normal(size=shape)) for shape in shapes]


def assert_near(found, wanted, tolerance=1e-12):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * max(1.0, np.abs(other).max(initial=0)))


@pytest.mark.parametrize(
    ("causal", "window", "mask", "segments", "place", "soft_cap", "sinks", "kv_heads"),
    pairwise(
        [False, True],
        [None, 3],
        [None, MASK, PADDING],
        [False, True],
        [None, 4, np.array([0, 3])],
        [None, 1.5],
        [False, True],
        [2, 1, 4],
        usual=2,
    ),
    ids=lambda value: str(getattr(value, "shape", value)),
)
def test_output_and_gradients_are_those_of_one_query_at_a_time(
    causal, window, mask, segments, place, soft_cap, sinks, kv_heads, x64
):
    q, k, v, of_out = drawn(kv_heads)
    pair = (OF_QUERIES, OF_KEYS) if segments else None
    place = 0 if place is None else place
    known = isinstance(place, int)
    shift, seen = (None if x is None else jnp.asarray(x) for x in (None if known else place, mask))
    rule = Rule(causal, window, place if known else 0, shift, seen, pair)
    options = {"scale": 0.3, "soft_cap": soft_cap}
    extra = {"sinks": jnp.asarray([0.5, -1.0, 2.0, -jnp.inf])} if sinks else {}
    where = {"causal": causal, "window": window, "segment_ids": pair, "query_position": place}
    where["mask"] = None if mask is None else np.broadcast_to(mask[:, 0], (BATCH, QUERIES, KEYS))

    def blocks(q, k, v, extra):
        return forward_in_blocks(q, k, v, rule, sides=SIDES, **options, **extra)[0]

    def alone(q, k, v, extra):
        return one_by_one(q, k, v, **where, **options, **extra)

    @jax.jit
    def run(*given):
        results = []
        for how in (blocks, alone):
            y, back = jax.vjp(how, *given)
            results.append((y, back(of_out)))
        return results

    found, wanted = run(q, k, v, extra)
    assert found[0].dtype == np.float64
    assert_near(found, wanted)


def test_a_batch_without_examples_has_an_output_and_gradients():
    none = jnp.zeros((0, QUERIES, HEADS, WIDTH))
    loss = lambda q: jnp.sum(forward_in_blocks(q, q, q, Rule(causal=True), scale=1.0, sides=SIDES)[0])  # noqa: E731
    assert jax.eval_shape(jax.grad(loss), none).shape == none.shape


def test_parts_of_the_keys_make_attention_to_all_of_them(x64):
    q, k, v, of_out = drawn(2)
    options = {"scale": 0.3, "implementation": "reference"}

    @jax.jit
    def run(q, k, v):
        parts = [(k[:, at], v[:, at]) for at in (slice(0, 4), slice(4, None))]
        outs, sums = zip(*(attention_with_lse(q, *part, **options) for part in parts), strict=True)
        lse = functools.reduce(jnp.logaddexp, sums)
        shares = [jnp.swapaxes(jnp.exp(own - lse), 1, 2)[..., None] for own in sums]
        out = sum(share * own for share, own in zip(shares, outs, strict=True))
        gradients = [attention_backward(q, *part, out, lse, of_out, **options) for part in parts]
        of_q, of_k, of_v = zip(*gradients, strict=True)
        whole, back = jax.vjp(functools.partial(attention, **options), q, k, v)
        found = out, sum(of_q), jnp.concatenate(of_k, 1), jnp.concatenate(of_v, 1)
        return found, (whole, *back(of_out))

    assert_near(*run(q, k, v))


def test_log_sum_exp_is_minus_infinity_where_nothing_is_seen_and_has_a_gradient_elsewhere(x64):
    q, k, v, _ = drawn(4)

    def blocks(q, k):
        return forward_in_blocks(q, k, v, Rule(mask=jnp.asarray(MASK)), scale=0.3, sides=SIDES)[1]

    def written_out(q, k):
        scores = jnp.einsum("bqhd,bkhd->bhqk", q[:, SEEING], k) * 0.3
        return jax.nn.logsumexp(jnp.where(MASK[:, :, SEEING], scores, -jnp.inf), axis=-1)

    @jax.jit
    def run(q, k):
        lse = blocks(q, k)
        results = [lse]
        for how in (lambda *t: blocks(*t)[:, :, SEEING], written_out):
            results.append(jax.value_and_grad(lambda *t, how=how: jnp.sum(jnp.sin(how(*t))), (0, 1))(q, k))
        return results

    lse, found, wanted = run(q, k)
    np.testing.assert_array_equal(np.isneginf(lse).all((0, 1)), ~np.isin(np.arange(QUERIES), SEEING))
    assert_near(found, wanted)


@pytest.mark.parametrize("mode", [pytest.param("reverse", marks=pytest.mark.full), "forward"])
def test_gradients_have_gradients(mode, x64):
    q, k, v, weights = drawn(2)
    rule, options = Rule(True, 5, 4, segments=(OF_QUERIES, OF_KEYS)), {"scale": 0.3, "soft_cap": 1.5}

    def loss(how):
        return lambda *t: jnp.sum(weights * jnp.sin(how(*t)))

    def again(function, *t):
        first = jax.grad(function, (0, 1, 2))
        if mode == "forward":
            return jax.jvp(first, t, jax.tree.map(jnp.cos, t))
        return jax.grad(lambda *t: sum(jnp.sum(jnp.sin(g)) for g in first(*t)), (0, 1, 2))(*t)

    @jax.jit
    def run(*t):
        blocks = lambda *t: forward_in_blocks(*t, rule, sides=SIDES, **options)[0]  # noqa: E731
        where = {"causal": True, "window": 5, "query_position": 4, "segment_ids": rule.segments}
        return [again(loss(how), *t) for how in (blocks, functools.partial(attention, **where, **options))]

    assert_near(*run(q, k, v))


def test_dropout_drops_the_same_weights_in_backward_and_others_in_each_block(key, x64):
    q, k, v, of_out = drawn(2)
    directions, drop = [RNG.normal(size=x.shape) for x in (q, k, v)], Dropout(0.25, key)

    @jax.jit
    def run(q, k, v, way):
        def along(step):
            moved = (x + step * y for x, y in zip((q, k, v), way, strict=True))
            return jnp.sum(of_out * forward_in_blocks(*moved, Rule(), scale=0.3, dropout=drop, sides=SIDES)[0])

        alike = forward_in_blocks(
            jnp.zeros((1, 64, 2, 8)), jnp.zeros((1, 64, 2, 8)), jnp.ones((1, 64, 2, 8)), Rule(), scale=1.0,
            dropout=drop, sides=(16, 16),
        )[0]  # fmt: skip
        return jax.grad(along)(0.0), (along(1e-6) - along(-1e-6)) / 2e-6, alike[0, :, 0, 0] * 0.75 * 64

    slope, measured, kept = map(np.asarray, run(q, k, v, directions))
    np.testing.assert_allclose(slope, measured, rtol=1e-7)
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-9)  # how many of 64 equal weights each query keeps
    assert abs(kept.mean() - 48) < 2
    assert (np.ptp(kept.reshape(4, 16), axis=0) > 0).all()  # blocks of queries draw bits of their own


def test_keys_of_a_query_may_vary_over_a_mesh_whose_axes_are_checked(x64):
    q, k, v, of_out = drawn(2)

    def local(q, k, v, of_out):
        y, back = jax.vjp(lambda *t: forward_in_blocks(*t, Rule(True, first=4), scale=0.3, sides=SIDES)[0], q, k, v)
        return y, *back(of_out)

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P("data"), P(), P(), P("data"))  # all examples share keys and values, whose gradients are summed
    with jax.set_mesh(mesh):
        found = jax.jit(jax.shard_map(local, in_specs=specs, out_specs=(P("data"), P("data"), P(), P())))(
            q, k[:1], v[:1], of_out
        )

    @jax.jit
    def one_device(q, k, v):
        def shared(q, k, v):
            k, v = (jnp.repeat(x, BATCH, 0) for x in (k, v))
            return attention(q, k, v, causal=True, query_position=4, scale=0.3)

        y, back = jax.vjp(shared, q, k, v)
        return y, *back(of_out)

    assert_near(found, one_device(q, k[:1], v[:1]))


def scans(jaxpr):
    """The loops of a program, those of what it calls too."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == "scan"
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            found += scans(inner) if hasattr(inner, "eqns") else 0
    return found


@pytest.mark.parametrize(("remat", "loops"), [("nothing", 3), ("matmuls", 2), ("activations", 2), ("everything", 2)])
def test_recomputation_does_not_run_blocks_again_where_products_are_saved(remat, loops):
    q, k, v, of_out = drawn(2)

    def run(*given):
        attend = lambda *t: forward_in_blocks(*t, Rule(True, first=4), scale=0.3, sides=SIDES)[0]  # noqa: E731
        return jax.vjp(with_remat(attend, remat), *given)[1](of_out)

    assert scans(jax.make_jaxpr(run)(q, k, v).jaxpr) == loops


LONG = 16384


def long_rows(length, heads, kv_heads, width):
    q, k = (jax.ShapeDtypeStruct((1, length, count, width), jnp.bfloat16) for count in (heads, kv_heads))
    return {"q": q, "k": k, "v": k, "segment_ids": jax.ShapeDtypeStruct((1, length), jnp.int32)}


def largest_array(text):
    shapes = re.findall(r"\b(?:pred|[a-z]+\d+)\[([\d,]+)\]", text)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


def test_no_array_of_a_program_has_queries_x_keys_elements():
    others = {
        "mask": jax.ShapeDtypeStruct((1, 1, 1, LONG), jnp.bool_),
        "sinks": jax.ShapeDtypeStruct((2,), jnp.float32),
        "dropout_key": jax.eval_shape(lambda: jax.random.key(0)),
    }

    def gradients(q, k, v, **given):
        how = functools.partial(attention, causal=True, window=5000, soft_cap=30.0, dropout_rate=0.1, **given)
        return jax.grad(lambda *t: jnp.sum(how(*t).astype(jnp.float32)), (0, 1, 2))(q, k, v)

    compiled = jax.jit(gradients).lower(**long_rows(LONG, 2, 2, 16), **others).compile()
    assert LONG < largest_array(compiled.as_text()) < LONG**2 / 2


ON_GPUS = {  # options, given segment ids; whether cuDNN computes some branch
    "packed": (lambda ids: {"segment_ids": ids}, True),
    "packed, window": (lambda ids: {"segment_ids": ids, "window": 4096}, True),
    "segments of queries and of keys": (lambda ids: {"segment_ids": (ids, ids)}, False),
    "window to both sides": (lambda ids: {"causal": False, "window": 4096}, False),
    "mask of keys": (lambda ids: {"mask": (ids > 0)[:, None, None]}, False),
    "positions": (lambda ids: {"query_position": ids[:, 0]}, False),
    "soft cap": (lambda ids: {"soft_cap": 30.0, "segment_ids": ids}, False),
    "dropout": (lambda ids: {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, False),
}


@needs_target
@pytest.mark.full
@pytest.mark.parametrize("name", ON_GPUS)
def test_a_program_for_gpus_needs_memory_that_is_linear_in_tokens(name):
    """Packed rows, whose last branch is for any ids, and what cuDNN would read as an array or does not compute."""
    make, in_cudnn = ON_GPUS[name]
    length = 2**17

    def local(q, k, v, ids):
        how = functools.partial(attention, **{"causal": True, **make(ids)})
        return jax.grad(lambda *t: jnp.sum(how(*t).astype(jnp.float32)), (0, 1, 2))(q, k, v)

    mesh = gtp.make_mesh(devices=hlo.topology_devices(hlo.parse_target("h200:1")))
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(local, in_specs=P(), out_specs=P(), check_vma=False)
        lowered = jax.jit(mapped).lower(*long_rows(length, 4, 1, 128).values())
        compiled = lowered.compile(compiler_options=dict(hlo.COMPILE_OPTIONS))
    text = compiled.as_text()
    assert ("__cudnn$fmha" in text) == in_cudnn
    assert length < largest_array(text) < length**2 / 2
    assert compiled.memory_analysis().temp_size_in_bytes < 1e9


ZEROS = jnp.zeros((2, 6, 4, 8))
REFUSED = {  # what the message must name: the call
    "`k` (2, 5, 4, 8) `v` (2, 6, 4, 8)": lambda: attention_with_lse(ZEROS, ZEROS[:, :5], ZEROS),
    "`causal` 6 queries 5 keys": lambda: attention_with_lse(ZEROS, ZEROS[:, :5], ZEROS[:, :5], causal=True),
    "`lse` (2, 6, 4) (2, 4, 6)": lambda: attention_backward(ZEROS, ZEROS, ZEROS, ZEROS, ZEROS[..., 0], ZEROS),
}


@pytest.mark.parametrize("named", REFUSED)
def test_bad_argument_is_named(named):
    with pytest.raises(ValueError, match=naming(named)):
        REFUSED[named]()
