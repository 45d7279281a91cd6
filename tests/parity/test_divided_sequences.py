"""Sequences that the ranks of cp divide: the numbers of one device, or a refusal of what takes a part for a whole."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from messages import naming
from placed import placed
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.collectives import whole_sequences_of
from gtp_jax.inspect._offload import _as_on_gpus
from gtp_jax.models import Llama, LlamaConfig, next_token_loss
from gtp_jax.nn import abstract_model

from ..ops.test_packed_attention import equations

ROWS, SEQ, VOCAB = 4, 32, 64
CONFIG = LlamaConfig(
    vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=8, intermediate_size=48
)
CONFIG = dataclasses.replace(CONFIG, dtype="float64", remat="nothing")
KINDS = {
    "packed": {},
    "window": dict(window=9),
    "tied, no logits": dict(tie_embeddings=True, loss_chunk=16),
    "experts": dict(num_experts=4, top_k=2, aux_loss_coeff=0.1),
    "norms of heads": dict(qk_norm=True),
    "keys": dict(sequence_exchange="keys", tie_embeddings=True, loss_chunk=16),
    "keys, packed": dict(sequence_exchange="keys"),
    "keys, window": dict(sequence_exchange="keys", window=9, num_heads=6),
}
MESHES = {
    "gtp 2, cp 2": dict(gtp=2, cp=2),
    "cp 4": dict(cp=4),  # more ranks than key-value heads
    "gtp 2, cp 2, tp 2": dict(gtp=2, cp=2, tp=2),
    "dp 2, cp 2": dict(dp=2, cp=2),
    "cp 2, ep 2": dict(cp=2, ep=2),
}


def mesh_of(degrees):
    size = int(np.prod(list(degrees.values())))
    return gtp.make_mesh(**{"dp": 1, **degrees}, devices=jax.devices()[:size])


def batch_of(kind):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": np.where(rng.random((ROWS, SEQ)) < 0.1, -1, tokens[:, 1:])}
    return (
        batch
        if kind in ("window", "keys", "keys, window")
        else {**batch, "segment_ids": np.cumsum(rng.random((ROWS, SEQ)) < 0.1, axis=1)}
    )


WIRES = {"no recipe": None, "FP8": gtp.FP8(), "NVFP4": gtp.NVFP4()}


@functools.cache
def trained(kind, degrees=(), view="global", wire="no recipe"):
    """Metrics and parameters after a step on a mesh, in logical order."""
    config = dataclasses.replace(CONFIG, **KINDS[kind])
    with jax.set_mesh(mesh_of(dict(degrees) or dict(gtp=1))):
        optimizer = optax.sgd(0.1)
        state = gtp.TrainState.create(placed(lambda rngs: Llama(config, rngs=rngs)), optimizer, recipe=WIRES[wire])
        step = gtp.train_step(next_token_loss, optimizer, view=view, recipe=WIRES[wire])
        state, metrics = step(state, batch_of(kind))
        return {name: float(metrics[name]) for name in ("loss", "grad_norm", "tokens")}, jax.tree.map(
            np.asarray, state.params
        )


CASES = list(itertools.product(KINDS, MESHES, ("global", "local")))
USUAL = [("packed", "gtp 2, cp 2, tp 2", "global")]


@pytest.mark.parametrize("kind, mesh, view", others_full(CASES, USUAL))
def test_a_step_is_that_of_one_device(kind, mesh, view, x64):
    found, wanted = trained(kind, tuple(MESHES[mesh].items()), view), trained(kind)
    assert found[0] == pytest.approx(wanted[0], rel=1e-12)
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


@pytest.mark.full
@pytest.mark.parametrize("view", ["global", "local"])
@pytest.mark.parametrize("wire", ["FP8", "NVFP4"])
def test_weights_travel_in_a_format_as_over_as_many_ranks_that_divide_no_sequences(wire, view, x64):
    """Shards of four ranks have the same codes, whichever axes these ranks belong to."""
    found, wanted = (
        trained("window", tuple(degrees.items()), view, wire) for degrees in (MESHES["gtp 2, cp 2"], dict(gtp=4))
    )
    assert found[0] == pytest.approx(wanted[0], rel=1e-12)
    assert found[0]["loss"] != pytest.approx(trained("window")[0]["loss"], rel=1e-6)
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


@functools.cache
def adapted(degrees, view):
    """The loss of each of three steps of adapters on a mesh, and the adapters after them, in logical order.

    The first step changes only what begins as zeros."""
    with jax.set_mesh(mesh_of(dict(degrees))):
        optimizer = optax.sgd(0.5)
        model = placed(lambda rngs: gtp.nn.lora(Llama(CONFIG, rngs=rngs), 2, 4, rngs=rngs))
        state, losses = gtp.TrainState.create(model, optimizer), []
        step = gtp.train_step(next_token_loss, optimizer, view=view)
        for _ in range(3):
            state, metrics = step(state, batch_of("packed"))
            losses.append(float(metrics["loss"]))
        return losses, jax.tree.map(np.asarray, state.params)


@pytest.mark.full
@pytest.mark.parametrize("view", ["global", "local"])
@pytest.mark.parametrize("mesh", ["gtp 2, cp 2, tp 2", "cp 4"])
def test_steps_of_adapters_are_those_of_one_device(mesh, view, x64):
    found, wanted = adapted(tuple(MESHES[mesh].items()), view), adapted((("gtp", 1),), "global")
    assert found[0] == pytest.approx(wanted[0], rel=1e-12) and len(set(wanted[0])) == 3
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


F64 = dict(dtype=jnp.float64, param_dtype=jnp.float64)
CAUSAL = functools.partial(gtp.nn.attention_fn, is_causal=True)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(32, rngs=rngs, **F64)
        self.attention = nnx.MultiHeadAttention(8, 32, decode=False, attention_fn=CAUSAL, rngs=rngs, **F64)
        self.up = nnx.Linear(32, 32, rngs=rngs, **F64)

    def __call__(self, x):
        return x + self.up(jnp.tanh(self.attention(self.norm(x))))


class Stock(nnx.Module):
    """A model that shifts tokens and counts positions by its own code."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, 32, rngs=rngs, **F64)
        self.positions = nnx.Embed(SEQ, 32, rngs=rngs, **F64)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(32, VOCAB, rngs=rngs, **F64)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1])) + jnp.roll(self.embed(tokens), 1, axis=1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def stock_loss(model, batch):
    return gtp.cross_entropy(model(batch["ids"]), jnp.roll(batch["ids"], -1, axis=1))


def sharded(rngs):
    return gtp.shard(Stock(rngs), min_size=64)


def stock_step(recipe=None):
    state = gtp.TrainState.create(placed(sharded), optax.sgd(0.1), recipe=recipe)
    step = gtp.train_step(stock_loss, optax.sgd(0.1), recipe=recipe)
    return step, state, {"ids": np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ))}


def test_a_model_of_stock_layers_trains_as_on_one_device_and_gathers_no_sequence(x64):
    found = []
    for degrees in (dict(gtp=1), dict(gtp=2, cp=2)):
        with jax.set_mesh(mesh_of(degrees)):
            step, state, batch = stock_step()
            compiled = step.lower(state, batch).compile()
            found.append(float(step(state, batch)[1]["grad_norm"]))
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    collectives = hlo.collectives(compiled.as_text())
    # in each of two layers: queries, keys and values there and the result back, in forward and in backward
    assert sum(c.times for c in collectives if c.kind == "all-to-all") == 2 * 4
    weights = {array.shape for array in jax.tree.leaves(state.params)}
    gathered = {
        shape.dims for c in collectives if c.kind == "all-gather" for shape in c.results if shape.dtype == "f64"
    }
    assert gathered <= weights


# the exchanges of a layer in a step, and how often cuDNN's forward runs
AGAIN = {"nothing": (6, 2), "attention": (6, 1), "matmuls": (4, 1), "activations": (4, 1), "everything": (4, 1)}


@pytest.mark.parametrize("remat", AGAIN)
def test_a_layer_exchanges_and_attends_again_only_what_its_policy_does_not_save(remat):
    config = dataclasses.replace(CONFIG, dtype="bfloat16", remat=remat)
    batch = {"tokens": jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)}
    batch |= {"targets": batch["tokens"]}
    with jax.set_mesh(mesh_of(dict(gtp=2, cp=2))), _as_on_gpus():
        state = gtp.TrainState.create(gtp.nn.abstract_model(lambda rngs: Llama(config, rngs=rngs)), optax.sgd(0.1))
        made = jax.make_jaxpr(functools.partial(gtp.train.loss_and_gradients, next_token_loss, view="local"))(
            state, batch
        )
    names = [equation.primitive.name for equation in equations(made.jaxpr)]
    forward = sum("dot_product_attention_fwd" in name for name in names)
    assert (names.count("all_to_all"), forward) == tuple(2 * n for n in AGAIN[remat])


@pytest.mark.parametrize("remat", ["nothing", "everything"])
def test_a_stock_block_exchanges_again_only_what_its_policy_does_not_save(remat, x64):
    with jax.set_mesh(mesh_of(dict(gtp=2, cp=2))):
        model = gtp.nn.abstract_model(lambda rngs: gtp.shard(Stock(rngs), min_size=64, remat=remat))
        state = gtp.TrainState.create(model, optax.sgd(0.1))
        batch = {"ids": jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)}
        made = jax.make_jaxpr(functools.partial(gtp.train.loss_and_gradients, stock_loss))(state, batch)
    names = [equation.primitive.name for equation in equations(made.jaxpr)]
    assert names.count("all_to_all") == 2 * AGAIN[remat][0]


RECIPES = {"FP8": gtp.FP8(matmuls=True), "NVFP4": gtp.NVFP4(matmuls=True)}


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_stock_layers_multiply_a_part_of_a_sequence_in_a_format(name, monkeypatch):
    for kind in F64:
        monkeypatch.setitem(F64, kind, jnp.float32)
    found = []
    for degrees in (dict(gtp=4), dict(gtp=2, cp=2)):
        with jax.set_mesh(mesh_of(degrees)):
            step, state, batch = stock_step(RECIPES[name])
            compiled = step.lower(state, batch).compile()
            metrics = step(state, batch)[1]
            found.append([float(metrics[one]) for one in ("loss", "grad_norm")])
    # gradients in NVFP4 are rounded at random
    assert found[1] == pytest.approx(found[0], rel=1e-6 if name == "FP8" else 0.05)
    gathered = [c for c in hlo.collectives(compiled.as_text()) if c.kind == "all-gather"]
    assert gathered and not [s for c in gathered for s in c.results if s.dims[:2] == (ROWS // 2, SEQ)]


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def heads(seed, count, sequence=SEQ):
    return np.random.default_rng(seed).normal(size=(ROWS, sequence, count, 8))


OPTIONS = {
    "causal": dict(is_causal=True),
    "whole": {},
    "a window and a scale": dict(is_causal=True, local_window_size=5, scale=0.3),
    "a window to both sides": dict(local_window_size=3),
    "a mask": dict(mask=np.tril(np.random.default_rng(9).random((ROWS, 1, SEQ, SEQ)) < 0.7) | np.eye(SEQ, dtype=bool)),
    "a mask of keys": dict(mask=np.arange(SEQ) < np.linspace(SEQ - 8, SEQ, ROWS, dtype=int)[:, None, None, None]),
}


WAYS = list(itertools.product(OPTIONS, (8, 2)))


@pytest.mark.parametrize("options, kv", others_full(WAYS, [("a mask of keys", 2)]))
def test_attention_fn_is_that_of_jax_with_and_without_divided_sequences(options, kv, x64):
    given = OPTIONS[options]
    q, k, v = heads(0, 8), heads(1, kv), heads(2, kv)

    def of(function):
        def loss(q, k, v):
            return jnp.sum(jnp.sin(function(q, k, v, **given)))

        return [np.asarray(a) for a in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)]

    wanted = of(jax.nn.dot_product_attention)  # which computes scores in float32
    alone = of(gtp.nn.attention_fn)
    with jax.set_mesh(mesh_of(dict(gtp=2, cp=4))):
        divided = [of(functools.partial(gtp.nn.attention_fn, sequence_exchange=what)) for what in ("heads", "keys")]
    for one, by_heads, by_keys, jaxs in zip(alone, *divided, wanted, strict=True):
        np.testing.assert_allclose(by_heads, one, rtol=0, atol=1e-13)
        np.testing.assert_allclose(by_keys, one, rtol=0, atol=1e-13)
        np.testing.assert_allclose(one, jaxs, rtol=0, atol=2e-5)


HEADS, KV_HEADS, PART = 14, 7, 6


def sent_for_keys(ranks):
    """The bytes in float64 that a rank sends forward, and backward: keys and values to all others, and halves of the
    queries, of what backward also needs of them, and of results."""
    q, kv, statistics = (8 * ROWS * PART * count for count in (HEADS * 8, 2 * KV_HEADS * 8, HEADS))
    share = 0.5 if ranks == 2 else 1  # each of two ranks works on one of its own halves
    return (ranks - 1) * kv + share * (2 * q + statistics), 2 * (ranks - 1) * kv + share * (4 * q + statistics)


@pytest.mark.parametrize("ranks", others_full((2, 3, 4, 5, 8), (3,)))
def test_ranks_that_do_not_divide_heads_exchange_keys_and_halves_of_queries(ranks, x64):
    arrays = [heads(n, count, ranks * PART) for n, count in enumerate((HEADS, KV_HEADS, KV_HEADS))]

    def loss(q, k, v):
        return jnp.sum(jnp.sin(CAUSAL(q, k, v)))

    wanted = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays)
    with jax.set_mesh(mesh_of(dict(cp=ranks))):
        divided = [jax.device_put(a, jax.NamedSharding(jax.sharding.get_mesh(), P(None, "cp"))) for a in arrays]
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*divided).compile()
    for one, other in zip(compiled(*divided), wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)
    collectives = hlo.collectives(compiled.as_text())
    sent = [sum(c.wire_bytes * c.times for c in collectives if c.direction == way) for way in ("forward", "backward")]
    assert sent == list(sent_for_keys(ranks))


@pytest.mark.full
def test_parts_in_bf16_are_rounded_little_more_than_what_one_device_computes():
    """The gradient of queries most: that of another rank is sent in bfloat16."""
    arrays = [heads(n, count).astype(jnp.bfloat16) for n, count in enumerate((HEADS, KV_HEADS, KV_HEADS))]

    def of(dtype):
        def loss(q, k, v):
            out = CAUSAL(q, k, v)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(
            *(a.astype(dtype) for a in arrays)
        )
        return [np.asarray(a, np.float32) for a in (out, *gradients)]

    exact, alone = of(jnp.float32), of(jnp.bfloat16)
    with jax.set_mesh(mesh_of(dict(cp=4))):
        divided = of(jnp.bfloat16)
    for one, other, right, most in zip(divided, alone, exact, (1.1, 1.5, 1.2, 1.1), strict=True):
        errors = [np.sqrt(np.mean((found - right) ** 2)) for found in (one, other)]
        assert errors[0] < most * errors[1]


def test_the_gradients_of_copies_of_a_key_head_are_summed_in_float32():
    factors = np.array([256.0] + [1.0] * 7, jnp.bfloat16)  # a sum in bfloat16 would stay at 256

    def of_rank(k):
        _, whole, _ = whole_sequences_of(jnp.zeros((1, 1, 8, 1), k.dtype), k, k, "cp")
        return jnp.sum(whole * jnp.asarray(factors)[jax.lax.axis_index("cp")])[None]

    with jax.set_mesh(mesh_of(dict(cp=8))):
        local = jax.shard_map(of_rank, in_specs=P(None, "cp"), out_specs=P("cp"), check_vma=False)
        gradient = jax.jit(jax.grad(lambda k: jnp.sum(local(k))))(np.ones((1, 8, 1, 1), jnp.bfloat16))
    np.testing.assert_array_equal(np.asarray(gradient, np.float32).ravel(), 264)


@pytest.mark.parametrize("exchange", ["heads", "keys"])
@pytest.mark.parametrize("options", [dict(is_causal=True), dict(is_causal=True, local_window_size=5)], ids=str)
def test_a_shard_map_may_check_how_values_vary(exchange, options):
    attend = functools.partial(gtp.nn.attention_fn, sequence_exchange=exchange, **options)
    q = floats(ROWS, SEQ, 4, 8)
    with jax.set_mesh(mesh_of(dict(cp=4))):
        local = jax.shard_map(attend, in_specs=P(None, "cp"), out_specs=P(None, "cp"))
        assert jax.eval_shape(jax.grad(lambda q: jnp.sum(local(q, q, q))), q).shape == q.shape


def test_the_size_of_a_window_may_be_a_number_of_numpy():
    q = floats(ROWS, SEQ, 4, 8)
    attend = functools.partial(gtp.nn.attention_fn, local_window_size=np.int64(5))
    assert jax.eval_shape(attend, q, q, q).shape == q.shape


def with_heads(count, sequence=SEQ, **options):
    attend = functools.partial(gtp.nn.attention_fn, **options)
    return lambda: jax.eval_shape(attend, *(floats(4, sequence, count, 8),) * 3)


call = functools.partial(with_heads, 8)


def on_ranks(**options):
    """Attention of arrays that are a rank's part of sequences."""

    def run():
        keys = options.pop("keys", 8)
        part = P(None, "cp")
        attend = functools.partial(gtp.nn.attention_fn, sequence_exchange="keys", **options)
        local = jax.shard_map(attend, in_specs=(part,) * 3, out_specs=part, check_vma=False)
        jax.eval_shape(local, floats(4, 32, 8, 8), *(floats(4, 4 * keys, 8, 8),) * 2)

    return run


def in_fp8():
    with gtp.use_recipe(gtp.FP8(matmuls=True, attention=True)):
        layer = abstract_model(lambda rngs: gtp.Attention(64, num_heads=8, sequence_exchange="keys", rngs=rngs))
        jax.eval_shape(layer, floats(4, SEQ, 64))


def local_step(batch):
    def run():
        optimizer = optax.sgd(0.1)
        state = gtp.TrainState.create(abstract_model(lambda rngs: Llama(CONFIG, rngs=rngs)), optimizer)
        gtp.train_step(next_token_loss, optimizer, view="local").lower(state, batch)

    return run


def local_stock():
    loss = functools.partial(lambda model, batch: (jnp.sum(model(batch["tokens"])), 1))
    loss.context_parallel = True
    local_loss(loss)


def local_loss(loss=stock_loss):
    optimizer = optax.sgd(0.1)
    state = gtp.TrainState.create(abstract_model(sharded), optimizer)
    gtp.train_step(loss, optimizer, view="local").lower(state, {"tokens": np.zeros((ROWS, SEQ), int)})


class Shift(gtp.nn.Layer):
    sequence_parallel = False

    def local(self, x):
        return jnp.roll(x, 1, axis=1)


class ShiftedMLP(gtp.MLP):
    def local(self, x):
        return super().local(jnp.roll(x, 1, axis=1))


REFUSED = {
    "a bias": (call(bias=np.zeros(())), "`bias` `mask`"),
    "one mask of dropout": (call(dropout_rate=0.1, dropout_rng=jax.random.key(0)), "`broadcast_dropout=False`"),
    "an unknown option": (call(return_residual=True), "return_residual=True"),
    "a mask per head": (call(mask=np.ones((4, 8, SEQ, SEQ), bool)), "`mask` (4, 8, 32, 32) cp = 4 dimension 1"),
    "too few heads": (with_heads(6, sequence_exchange="heads"), "cp = 4 6 query heads `sequence_exchange='keys'`"),
    "an unknown exchange": (with_heads(8, sequence_exchange="values"), "`sequence_exchange` 'values' 'heads' 'keys'"),
    "keys of another length": (on_ranks(is_causal=True, keys=4), "`causal` 32 queries 16 keys"),
    "segments of a part": (on_ranks(segment_ids=np.ones((4, 8), np.int32)), "`segment_ids` (4, 8) (4, 32)"),
    "a mask of a part": (on_ranks(mask=np.ones((8, 32), bool)), "`mask` (8, 32) (32, 32)"),
    "FP8": (in_fp8, "FP8 cp = 4 `sequence_exchange='heads'` `attention=False`"),
    "a sequence of another length": (with_heads(8, 30), "`query` (4, 30, 8, 8) cp = 4 Pad"),
    "an array of an unknown name": (
        local_step({"tokens": np.ones((4, 32), int), "targets": np.ones((4, 32), int), "y": np.ones((4, 32))}),
        "['y'] cp = 4 'tokens' 'positions' view='global'",
    ),
    "stock layers in local view": (local_stock, "Stock `gtp_jax.shard` local view cp = 4 `view='global'`"),
    "a loss in local view": (local_loss, "loss cp = 4 `view='global'` `loss.context_parallel = True`"),
    "a layer of one's own": (
        lambda: jax.eval_shape(Shift(), floats(4, SEQ, 8)),
        "Shift cp = 4 `context_parallel = True`",
    ),
    "a layer that derives from one that knows": (
        lambda: jax.eval_shape(abstract_model(lambda rngs: ShiftedMLP(32, 48, rngs=rngs)), floats(4, SEQ, 32)),
        "ShiftedMLP cp = 4 `context_parallel = True`",
    ),
    "roles": (lambda: gtp.mesh.Roles(sequence="gtp"), "`sequence` 'gtp' `batch`"),
    "another name of the axis": (lambda: gtp.make_mesh(context_parallel=2), "`context_parallel` `cp=2`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_take_a_part_for_the_whole_is_refused_by_name(case):
    run, message = REFUSED[case]
    with jax.set_mesh(mesh_of(dict(cp=4))), pytest.raises((ValueError, TypeError), match=naming(message)):
        run()


def test_attention_of_a_rank_drops_what_no_other_rank_drops():
    @jax.jit
    def attend(x):
        options = dict(dropout_rate=0.5, broadcast_dropout=False, dropout_rng=jax.random.key(0))
        return gtp.nn.attention_fn(x, x, x, **options)

    with jax.set_mesh(mesh_of(dict(cp=8))):
        found = np.asarray(attend(np.ones((1, 8, 8, 4), np.float32)))[0, :, :, 0]
    assert len({tuple(column) for column in found.T}) > 1  # a head for each rank
    assert found.mean() == pytest.approx(1.0, abs=0.3)


def test_a_batch_lies_where_its_tokens_are_computed():
    with jax.set_mesh(mesh_of(dict(gtp=2, cp=2))):
        assert gtp.mesh.spec_of_tokens(gtp.mesh.current_roles(), (4, 32)) == P(("dp", "gtp"), "cp")
        assert gtp.mesh.spec_of_tokens(gtp.mesh.current_roles(), (4, 31)) == P(("dp", "gtp"))
