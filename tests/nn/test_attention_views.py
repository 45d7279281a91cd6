"""Attention modules against their formula without a mesh, and on meshes, in global view, against themselves."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import naming
from placed import placed
from selection import others_full, pairwise

import gtp_jax as gtp

from ..ops.one_by_one import one_by_one

FEATURES, LENGTH, MEMORY = 40, 12, 24
SIZES = dict(num_heads=8, num_kv_heads=4, head_dim=6, dtype=jnp.float64, param_dtype=jnp.float64)
SCALING = gtp.nn.RopeScaling(kind="linear", factor=2.0)
RNG = np.random.default_rng(0)
MASK = RNG.random((8, LENGTH, LENGTH)) < 0.5
MASK[:, 3] = False  # a token that sees none
SEGMENTS = np.sort(RNG.integers(0, 4, (8, LENGTH)), axis=1)
OF_MEMORY = np.sort(RNG.integers(0, 4, (8, MEMORY)), axis=1)
POSITIONS = RNG.integers(0, 50, (8, LENGTH))

CASES = {
    "causal": (gtp.Attention, {}, {}),
    "bidirectional, window, mask": (gtp.Attention, dict(causal=False, window=5), dict(mask=MASK)),
    "mask alike": (gtp.Attention, dict(causal=False, rope_theta=None), dict(mask=MASK[0])),
    "mask alike, with dimensions for batch and heads": (gtp.Attention, {}, dict(mask=MASK[:1, None])),
    "positions, partial rotation": (gtp.Attention, dict(rotary_dim=4), dict(positions=POSITIONS)),
    "positions alike": (gtp.Attention, dict(rope_scaling=SCALING), dict(positions=POSITIONS[0])),
    "everything": (
        gtp.Attention,
        dict(window=4, soft_cap=2.0, qk_norm=True, sinks=True, scale=0.5, rope_scaling=SCALING, use_bias=True),
        dict(segment_ids=SEGMENTS),
    ),
    "biases of queries, keys and values alone": (gtp.Attention, dict(window=4, qkv_bias=True), {}),
    "cross": (gtp.nn.CrossAttention, dict(memory_features=30, qk_norm=True, sinks=True), {}),
    "cross, segments": (gtp.nn.CrossAttention, dict(soft_cap=3.0), dict(segment_ids=(SEGMENTS, OF_MEMORY))),
    "cross, mask": (gtp.nn.CrossAttention, {}, dict(mask=np.repeat(MASK, 2, axis=2))),
}
MESHES = {
    "gtp 4 x tp 2, sequence parallel": (dict(gtp=4, tp=2), True),
    "gtp 2 x tp 4, sequence parallel": (dict(gtp=2, tp=4), True),
    "dp 2 x gtp 2 x tp 2, whole sequence": (dict(dp=2, gtp=2, tp=2), False),
    "gtp 2 x tp 3, heads divided unevenly": (dict(gtp=2, tp=3), True),
}


@functools.cache
def measured(name: str, mesh: str | None):
    """Parameters, output and gradients, under `jax.jit` in global view."""
    kind, options, inputs = CASES[name]
    degrees, sequence_parallel = MESHES[mesh] if mesh else (None, True)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(8, LENGTH, FEATURES)))
    size = options.get("memory_features", FEATURES)
    memory = (jnp.asarray(rng.normal(size=(8, MEMORY, size))),) if kind is gtp.nn.CrossAttention else ()
    devices = jax.devices()[: math.prod(degrees.values())] if degrees else None
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=devices)) if degrees else contextlib.nullcontext():
        make = lambda rngs: kind(FEATURES, sequence_parallel=sequence_parallel, rngs=rngs, **SIZES, **options)  # noqa: E731
        module = placed(make, 5)
        for path, v in nnx.to_flat_state(nnx.state(module)):
            if path[-1] in ("sinks", "query_scale", "key_scale"):  # else all are equal
                own = np.random.default_rng(len(path[-1])).normal(size=v.get_value().shape)
                v.set_value(jax.device_put(own, v.get_value().sharding))
        graph, state = nnx.split(module)

        def loss(state, x, memory):
            y = nnx.merge(graph, state)(x, *memory, **jax.tree.map(jnp.asarray, inputs))
            return jnp.sum(jnp.sin(3 * y)), y

        (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(state, x, memory)
        logical = lambda state: {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(state)}  # noqa: E731
        found = (y, logical(gradients[0]), gradients[1:])
        return logical(state), (x, memory), jax.tree.map(np.asarray, found)


def formula(name, params, x, memory):
    """The module's output, by its definition."""
    kind, options, inputs = CASES[name]
    norm = lambda x, scale: x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-6) * scale  # noqa: E731
    value = lambda *path: params[path]  # noqa: E731

    def projected(x, *path):
        y = x @ value(path[0], "kernel", *path[1:])
        y = y + value(path[0], "bias", *path[1:]) if options.get("qkv_bias", options.get("use_bias")) else y
        return y.reshape(*y.shape[:2], -1, 6)

    if kind is gtp.Attention:
        h = norm(x, value("qkv", "scale"))
        q, k, v = (projected(h, "qkv", which) for which in ("query", "key", "value"))
    else:
        q = projected(norm(x, value("query", "scale")), "query")
        k, v = (projected(memory[0], "kv", which) for which in ("key", "value"))
    if options.get("qk_norm"):
        q, k = norm(q, value("core", "query_scale")), norm(k, value("core", "key_scale"))
    if kind is gtp.Attention and options.get("rope_theta", 1.0):
        dims = options.get("rotary_dim", 6)
        positions = inputs.get("positions", np.arange(LENGTH))  # segments need no others: only differences count
        frequency = 1e4 ** (-np.arange(dims // 2) / (dims // 2)) / (2.0 if "rope_scaling" in options else 1.0)
        angle = np.broadcast_to(positions, (8, LENGTH))[:, :, None, None] * frequency
        q, k = (turned(t, angle, dims // 2) for t in (q, k))
    where = {n: options[n] for n in ("window", "soft_cap", "scale") if n in options}
    where |= {n: inputs[n] for n in ("segment_ids",) if n in inputs}
    if "mask" in inputs:
        where["mask"] = inputs["mask"] if inputs["mask"].ndim < 4 else inputs["mask"][0, 0]
    causal = kind is gtp.Attention and options.get("causal", True)
    mixed = one_by_one(q, k, v, causal=causal, sinks=params.get(("core", "sinks")), **where)
    y = mixed.reshape(*x.shape[:2], -1) @ value("out", "kernel")
    return y + value("out", "bias") if options.get("use_bias") else y


def turned(x, angle, half):
    pair = x[..., :half], x[..., half : 2 * half]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([pair[0] * cos - pair[1] * sin, pair[1] * cos + pair[0] * sin, x[..., 2 * half :]], -1)


def close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("name", others_full(CASES, ["everything", "cross"]))
def test_module_without_a_mesh_is_its_formula(name, x64):
    params, (x, memory), (y, *_) = measured(name, None)
    close(y, formula(name, params, np.asarray(x), [*map(np.asarray, memory)]))


@pytest.mark.parametrize(("name", "mesh"), pairwise(CASES, MESHES, usual=2))
def test_module_in_global_view_equals_itself_without_a_mesh(name, mesh, x64):
    params, _, plain = measured(name, None)
    same, _, found = measured(name, mesh)
    jax.tree.map(np.testing.assert_array_equal, same, params)
    assert all(np.abs(g).max() > 0 for g in plain[1].values())
    close(found, plain)


@pytest.mark.parametrize("degrees", [pytest.param(None, marks=pytest.mark.full), dict(gtp=4, tp=2)])
def test_dropout_is_drawn_anew_in_each_call_and_is_off_in_evaluation(degrees):
    with jax.set_mesh(gtp.make_mesh(**degrees)) if degrees else contextlib.nullcontext():
        make = lambda rngs: gtp.Attention(16, num_heads=4, dropout_rate=0.5, dtype=jnp.float32, rngs=rngs)  # noqa: E731
        model = gtp.init(make, nnx.Rngs(0, dropout=1))
        x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 16)), jnp.float32)
        call = nnx.jit(lambda model, x, **options: model(x, **options), static_argnames="deterministic")
        first, second, off = call(model, x), call(model, x), call(model, x, deterministic=True)
        assert not jnp.allclose(first, second) and not jnp.allclose(first, off)
        model.eval()
        np.testing.assert_allclose(call(model, x), off, rtol=0, atol=1e-5)
        np.testing.assert_allclose(call(nnx.view(model, deterministic=True), x), off, rtol=0, atol=1e-5)
        plain = gtp.init(lambda rngs: gtp.Attention(16, num_heads=4, dtype=jnp.float32, rngs=rngs), nnx.Rngs(0))
        np.testing.assert_allclose(call(plain, x), off, rtol=0, atol=1e-5)
        key = jax.random.key(3)
        given = [call(model, x, deterministic=False, dropout_key=key) for _ in range(2)]
        np.testing.assert_array_equal(*given)
        mean = np.mean([call(model, x, deterministic=False, dropout_key=jax.random.key(i)) for i in range(300)], axis=0)
        assert np.abs(mean - off).max() < 0.35 * np.abs(np.asarray(off)).max()


def test_ranks_with_other_examples_or_heads_drop_others():
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        core = gtp.init(
            lambda rngs: gtp.Attention(16, num_heads=4, dropout_rate=0.5, rngs=rngs), nnx.Rngs(0, dropout=1)
        ).core
        bits = lambda: jax.random.bits(core._of_rank(jax.random.key(0)))[None]  # noqa: E731
        P = jax.sharding.PartitionSpec
        every = jax.jit(jax.shard_map(bits, in_specs=(), out_specs=P(("dp", "gtp", "tp")), check_vma=False))()
    assert len(set(np.asarray(every).tolist())) == 8


def attend(kind=gtp.Attention, call=(), inputs=None, **options):
    def run():
        module = kind(16, num_heads=4, dtype=jnp.float32, rngs=nnx.Rngs(0), **options)
        return module(jnp.ones((8, 4, 16)), *call, **(inputs or {}))

    return jax.eval_shape(run)


WHOLE, SHORT, TWO_DIMS = (np.ones(shape) for shape in ((8, 4, 4, 4), (8, 3, 16), (8, 16)))
REFUSED = {  # the call, whether it is under a mesh, and what the message names
    "window": (lambda: attend(window=0), False, "`window` 0"),
    "rotation": (lambda: attend(rotary_dim=3), False, "`rotary_dim` 3 even"),
    "wide rotation": (lambda: attend(rotary_dim=6), False, "`rotary_dim` 6 `head_dim` 4"),
    "scaling": (lambda: attend(rope_scaling={"factor": 2}), False, "`gtp_jax.nn.RopeScaling` None"),
    "no rotation": (lambda: attend(rope_theta=None, rope_scaling=SCALING), False, "`rope_theta` None"),
    "masks by head": (lambda: attend(inputs=dict(mask=WHOLE > 0)), False, "heads mask"),
    "memory": (lambda: attend(gtp.nn.CrossAttention, (TWO_DIMS,)), False, "(batch, memory, features)"),
    "batch": (
        lambda: attend(inputs=dict(segment_ids=np.zeros((1, 4), int))),
        True,
        "'segment_ids' Attention (1, 4) 8 Broadcast",
    ),
    "memory over tp": (
        lambda: attend(gtp.nn.CrossAttention, (SHORT,)),
        True,
        "'memory' CrossAttention (8, 3, 16) tp 2",
    ),
    "one key-value head": (lambda: attend(num_kv_heads=1), True, "tp 2 heads 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_argument_is_named(name):
    call, on_a_mesh, message = REFUSED[name]
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)) if on_a_mesh else contextlib.nullcontext():
        with pytest.raises(ValueError, match=naming(message)):
            call()


def test_a_layer_of_ones_own_takes_further_inputs_in_every_view(x64):
    """By position and by name; arrays are sharded over the batch, other values are part of the program."""

    class Gated(gtp.nn.Layer):
        def __init__(self, rngs):
            super().__init__()
            self.dense = gtp.Dense(8, 8, parallel="column", rngs=rngs, dtype=jnp.float64, param_dtype=jnp.float64)
            self.sequence_parallel = False

        def local(self, x, gate, *, sign, shift=None):
            y = x * gate[:, None] + (0 if shift is None else shift)
            return -y if sign == "-" else y

    x, gate = RNG.normal(size=(8, 4, 8)), RNG.normal(size=(8, 8))
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        layer = Gated(nnx.Rngs(0))
        found = jax.jit(lambda x, gate: layer(x, gate, sign="-", shift=jnp.float64(2)))(x, gate)
        np.testing.assert_allclose(found, -(x * gate[:, None] + 2), rtol=0, atol=1e-15)
        with pytest.raises(ValueError, match=naming("0 Gated (4, 8)")):
            layer(x, gate[:4], sign="+")


@pytest.mark.parametrize(("rows", "heads"), [(4, 2), (3, 4)])
def test_ranks_that_compute_the_same_heads_and_examples_drop_the_same_weights(rows, heads):
    degrees = dict(cp=2, tp=4) if heads == 2 else dict(gtp=2, cp=2)
    count = math.prod(degrees.values())
    x = jax.random.normal(jax.random.key(0), (rows, 8, heads, 4))
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[:count])):
        drop = dict(dropout_rate=0.5, dropout_rng=jax.random.key(1), broadcast_dropout=False)
        y = jax.jit(lambda x: gtp.nn.attention_fn(x, x, x, **drop))(x)
    parts = {}
    for shard in y.addressable_shards:
        parts.setdefault(str(shard.index), []).append(np.asarray(shard.data).tobytes())
    assert len(parts) < count and all(len(set(copies)) == 1 for copies in parts.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(local_window_size=(2, 0)), "`local_window_size` (2, 0) `mask`"),
        (dict(mask=np.ones((2, 4, 4), bool)), "`mask` (2, 4, 4) heads"),
        (dict(module=nnx.Module()), "`module` `sow_weights`"),
        (dict(value=np.ones((2, 4, 2, 3))), "value (2, 4, 2, 3) same shape"),
    ],
)
def test_options_that_attention_fn_would_take_otherwise_than_flax_are_refused(options, message):
    x = np.ones((2, 4, 2, 4))
    with pytest.raises(ValueError, match=naming(message)):
        gtp.nn.attention_fn(**{**dict(query=x, key=x, value=x), **options})


@pytest.mark.parametrize("degrees", [{}, {"cp": 2}])
def test_a_mask_that_is_too_large_for_a_device_is_refused_and_the_option_that_needs_none_is_named(degrees):
    x, mask = (jax.ShapeDtypeStruct(*of) for of in (((2, 2**16, 2, 4), jnp.float32), ((1, 1, 2**16, 2**16), bool)))
    with jax.set_mesh(gtp.make_mesh(gtp=8 // degrees.get("cp", 1), **degrees)):
        with pytest.raises(ValueError, match=naming("`mask` 65536 queries 65536 keys 1073741824 `is_causal`")):
            jax.eval_shape(lambda x, mask: gtp.nn.attention_fn(x, x, x, mask=mask), x, mask)
        of_keys = jax.ShapeDtypeStruct((2, 1, 1, 2**16), bool)
        assert jax.eval_shape(lambda x, mask: gtp.nn.attention_fn(x, x, x, mask=mask), x, of_keys).shape == x.shape
