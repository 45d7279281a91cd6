"""Adapters of low rank: what they compute, what a step computes of the base (nothing), and what is refused."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from placed import placed
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.models import Llama, LlamaConfig
from gtp_jax.nn import abstract_model
from gtp_jax.train import never_skip

from .arrays import mesh_in_scope

RANK, ALPHA, VOCAB, BATCH, LENGTH = 3, 6, 48, 8, 6
# heads and hidden features that tp 3 divides unevenly
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    intermediate_size=40,
    dtype="float64",
)
PROJECTIONS = ("qkv/query", "qkv/key", "qkv/value", "out", "up/gate", "up/up", "down")


def loss(model, batch):
    return gtp.cross_entropy(model(batch["tokens"]), batch["targets"], vocab_size=VOCAB)


def batch_of(seed=0):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    return {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}


def with_b(model):
    """Other values than zeros in every `b`, the same on every mesh."""
    for path, v in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == "b":
            shape = v.get_value().shape
            value = np.random.default_rng(sum(map(ord, "/".join(map(str, path))))).normal(0, 0.3, shape)
            set_at(model, path, jax.device_put(value, v.get_value().sharding))
    return model


def set_at(model, path, value):
    for key in path[:-1]:
        model = model[key] if isinstance(model, nnx.Dict) else getattr(model, key)
    getattr(model, path[-1]).set_raw_value(value)


def plain_llama(rngs):
    return Llama(CONFIG, rngs=rngs)


def adapted(rngs, config=CONFIG, **options) -> Any:
    return gtp.nn.lora(Llama(config, rngs=rngs), RANK, ALPHA, rngs=rngs, **options)


def layers_of(model) -> Any:
    return model.blocks.layers


def dense_of(model, name):
    block = layers_of(model)
    layer, _, kernel = name.partition("/")
    return getattr(block.attention if layer in ("qkv", "out") else block.mlp, layer), kernel


@functools.cache
def found_on(name, view):
    with mesh_in_scope(name):
        state = gtp.TrainState.create(with_b(placed(adapted)), optax.sgd(0.1))
        value, gradients = jax.jit(lambda state: gtp.train.loss_and_gradients(loss, state, batch_of(), view=view))(
            state
        )
        return float(value), jax.tree.map(np.asarray, gradients)


def merged(model, values):
    """A model without adapters, whose kernels are the `values` of those of `model` plus its adapters' products; and the
    adapters' matrices."""
    plain, factors = placed(plain_llama), {}
    for name in PROJECTIONS:
        (layer, key), (target, _) = dense_of(model, name), dense_of(plain, name)
        own, kernel, to = (layer.lora, layer.kernel, target.kernel)
        own, kernel, to = (own[key], kernel[key], to[key]) if key else (own, kernel, to)
        factors[name] = a, b = np.asarray(own.a.get_value()), np.asarray(own.b.get_value())
        to.set_raw_value(jnp.asarray(values(kernel) + ALPHA / RANK * a @ b))
    return plain, factors


@functools.cache
def merged_gradients():
    """The loss of the model with merged kernels and, by the chain rule, the gradients of adapters; without a mesh."""
    plain, factors = merged(with_b(placed(adapted)), lambda kernel: np.asarray(kernel.get_value()))

    def mean(model):
        total, count = loss(model, batch_of())
        return total / count

    value, gradients = nnx.jit(nnx.value_and_grad(mean))(plain)
    found = {}
    for name, (a, b) in factors.items():
        layer, kernel = dense_of(gradients, name)
        of_kernel = np.asarray((layer.kernel[kernel] if kernel else layer.kernel).get_value())
        scaled = ALPHA / RANK * of_kernel
        found[name] = scaled @ b.swapaxes(1, 2), a.swapaxes(1, 2) @ scaled
    return float(value), found


pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(
    ("mesh", "view"),
    others_full(
        [("gtp 4 x tp 2", "local"), (None, "local"), ("gtp 8", "local"), ("gtp 4 x tp 2", "global"), ("tp 3", "local")],
        [("gtp 4 x tp 2", "local")],
    ),
)
def test_loss_and_gradients_are_those_of_merged_kernels_on_every_mesh(mesh, view):
    wanted, factors = merged_gradients()
    value, gradients = found_on(mesh, view)
    assert value == pytest.approx(wanted, rel=1e-12)
    layers = gradients["blocks"]["layers"]
    assert set(gradients) == {"blocks"}
    for name in PROJECTIONS:
        layer, _, kernel = name.partition("/")
        own = layers["attention" if layer in ("qkv", "out") else "mlp"][layer]["lora"]
        own = own[kernel] if kernel else own
        for one, other in zip((own["a"], own["b"]), factors[name], strict=True):
            assert np.abs(other).max() > 1e-6
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * max(1, np.abs(other).max()))


def test_before_the_first_step_outputs_are_equal_bit_for_bit_and_a_is_kaiming_uniform():
    with mesh_in_scope("gtp 4 x tp 2"):
        plain = placed(plain_llama)
        model = gtp.nn.lora(plain, RANK, ALPHA, rngs=nnx.Rngs(5))
        tokens = batch_of()["tokens"]
        wanted, found = (nnx.jit(lambda model, tokens: model(tokens))(one, tokens) for one in (plain, model))
        np.testing.assert_array_equal(found, wanted)
        a = np.asarray(layers_of(model).mlp.down.lora.a.get_value())
    bound = 40**-0.5
    assert a.shape == (2, 40, RANK) and bound * 0.9 < np.abs(a).max() <= bound and np.std(a) > 0.5 * bound
    assert not np.array_equal(a[0], a[1])
    assert not np.asarray(layers_of(model).mlp.down.lora.b.get_value()).any()
    assert layers_of(plain).mlp.down.lora is None  # left as it was


def test_matrices_are_sharded_over_tp_like_the_kernels_side_and_else_whole():
    with mesh_in_scope("gtp 4 x tp 2"):
        layers = layers_of(abstract_model(adapted))
        spec = lambda v: tuple(v.get_raw_value().sharding.spec)  # noqa: E731
        query, down = layers.attention.qkv.lora["query"], layers.mlp.down.lora
        assert [spec(query.a), spec(query.b)] == [(None, None, None), (None, None, "tp")]
        assert [spec(down.a), spec(down.b)] == [(None, "tp", None), (None, None, None)]
        assert (query.a.get_raw_value().shape, query.b.get_raw_value().shape) == ((2, 32, RANK), (2, RANK, 32))


@pytest.mark.parametrize("mesh", others_full(["gtp 8", "dp 2 x gtp 2"], ["gtp 8"]))
def test_a_step_reduces_the_gradients_of_adapters_alone(mesh):
    with mesh_in_scope(mesh):
        optimizer = optax.adam(1e-3)
        state = gtp.TrainState.create(abstract_model(adapted), optimizer)
        step: Any = gtp.train_step(loss, optimizer, view="local")
        text = step.lower(state, batch_of(), never_skip(jax.sharding.get_mesh())).compile().as_text()
    adapters = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state.params))
    moments = [a for a in jax.tree.leaves(state.opt_state) if a.ndim]
    assert len(moments) == 2 * len(jax.tree.leaves(state.params)) == 28
    found = hlo.collectives(text)
    assert not [c for c in found if c.kind in ("reduce-scatter", "all-to-all")]
    reduced = sum(c.operand_bytes * c.times for c in found if c.kind == "all-reduce")
    assert adapters <= reduced <= adapters + 64  # and the loss, the tokens
    assert [c for c in found if c.kind == "all-gather"]  # the base travels


@pytest.mark.full
def test_a_frozen_base_of_codes_has_the_values_of_its_codes():
    recipe = gtp.FP8()
    with mesh_in_scope("gtp 4 x tp 2"):
        model = gtp.init(
            lambda rngs: gtp.nn.lora(Llama(CONFIG, rngs=rngs), RANK, ALPHA, recipe=recipe, rngs=rngs), nnx.Rngs(0)
        )
        kernel = layers_of(model).mlp.down.kernel
        assert isinstance(kernel.get_value(), gtp.formats.QuantizedArray)
        logits = nnx.jit(lambda model, tokens: model(tokens))(with_b(model), batch_of()["tokens"])
        # added to a model that has been frozen before, which stays as it is
        again = gtp.nn.freeze(placed(plain_llama), recipe, trained=nnx.PathContains("head"))
        again = gtp.nn.lora(again, RANK, ALPHA, rngs=nnx.Rngs(3))
        own = layers_of(again).mlp.down.kernel.get_value()
        assert np.array_equal(np.asarray(own.codes), np.asarray(kernel.get_value().codes))

    def values(kernel):
        return np.asarray(gtp.ops.dequantize(kernel.get_value(), jnp.float32).swapaxes(1, 2), np.float64)

    plain, _ = merged(model, values)
    wanted = nnx.jit(lambda model, tokens: model(tokens))(plain, batch_of()["tokens"])
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


class Probe(nnx.Module):
    """Kernels that tp divides by columns and by rows, behind a table."""

    def __init__(self, rngs, dropout):
        wide = dict(dtype="float64", param_dtype="float64", rngs=rngs)
        self.embed, mlp = gtp.Embed(VOCAB, 16, **wide), gtp.MLP(16, 24, **wide)
        self.mlp = gtp.nn.lora(mlp, RANK, ALPHA, dropout=dropout, rngs=rngs)

    def __call__(self, tokens):
        return self.mlp(self.embed(tokens))


def sum_of_squares(model, batch):
    y = model(batch["tokens"])
    copies = batch["tokens"].shape[1] // y.shape[1]  # in local view, a rank of tp has its own part of the sequence
    return copies * jnp.sum(y**2), jnp.float64(batch["tokens"].size)


@pytest.mark.full
@pytest.mark.parametrize("view", others_full(["local", "global"], ["local"]))
def test_dropout_is_of_a_step_and_of_nothing_else(view):
    with mesh_in_scope("gtp 4 x tp 2"):
        model, undropped = (with_b(placed(lambda rngs, p=p: Probe(rngs, p))) for p in (0.5, 0.0))
        state, plain = (gtp.TrainState.create(each, optax.sgd(0.0)) for each in (model, undropped))
        evaluate = gtp.eval_step(sum_of_squares, view="local")
        evaluated, without = (float(evaluate(each, batch_of())["loss"]) for each in (state, plain))

        def dropped(view, seed=0):
            """Losses of the same parameters and the same batch in two steps of learning rate 0."""
            step = gtp.train_step(sum_of_squares, optax.sgd(0.0), view=view, seed=seed)
            own, losses = jax.tree.map(jnp.copy, state), []  # a step donates its state
            for _ in range(2):
                own, metrics = step(own, batch_of())
                losses.append(float(metrics["loss"]))
            return losses

        losses = dropped("local")
        if view == "global":
            assert dropped("global") == pytest.approx(losses, rel=1e-12)
            assert dropped("local", seed=1) != losses
    assert evaluated == pytest.approx(without, rel=1e-12)  # nothing is dropped
    assert len({*losses, evaluated}) == 3


def test_ranks_that_divide_no_sequence_drop_the_same():
    with jax.set_mesh(gtp.make_mesh(cp=2, devices=jax.devices()[:2])):
        dense = placed(lambda rngs: gtp.Dense(8, 4, rngs=rngs))
        layer = gtp.nn.lora(dense, 2, 2, dropout=0.5, rngs=nnx.Rngs(1))
        layer.lora.b.set_value(jnp.ones((2, 4)))
        words = np.array([0, 3], np.uint32)
        y = jax.jit(lambda x: gtp.nn.with_dropout(layer, words)(x))(np.ones((4, 8)))
    first, second = (np.asarray(shard.data) for shard in y.addressable_shards)
    np.testing.assert_array_equal(first, second)


def test_dropout_keeps_the_mean_of_what_an_adapter_adds():
    @jax.jit
    def with_and_without_dropout():
        layer = gtp.nn.lora(gtp.Dense(64, 4, dtype="float64", rngs=nnx.Rngs(0)), 2, 2, dropout=0.25, rngs=nnx.Rngs(1))
        layer.lora.b.set_raw_value(jnp.ones((2, 4)))
        x = jnp.ones((4, 64))
        base = layer(x) - layer.lora.output(layer.lora.low(x, layer.layouts[0], (), 0), layer.layouts[0])
        keys = jax.random.bits(jax.random.key(0), (512, 2), jnp.uint32)
        return jax.vmap(lambda key: gtp.nn.with_dropout(layer, key)(x) - base)(keys), layer(x) - base

    found, wanted = map(np.asarray, with_and_without_dropout())
    np.testing.assert_allclose(np.mean(found, axis=(0, 1)), wanted[0], atol=0.05 * np.abs(wanted).max() + 0.02)
    assert np.std(found) > 0.01


MOE = dataclasses.replace(CONFIG, num_layers=1, num_experts=2)


def moe_llama(rngs):
    return Llama(MOE, rngs=rngs)


def adapted_queries(rngs):
    return gtp.nn.lora(plain_llama(rngs), 2, 2, targets=["query"], rngs=rngs)


def linear(rngs):
    return nnx.Linear(8, 8, rngs=rngs)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (plain_llama, dict(rank=0), "`rank` 0 whole"),
        (plain_llama, dict(alpha=0), "`alpha` 0 finite"),
        (plain_llama, dict(dropout=1.0), "`dropout` 1.0"),
        (plain_llama, dict(targets="query"), "`targets` 'query' list"),
        (plain_llama, dict(targets=["q_proj"]), "`targets` 'q_proj' blocks.layers.attention.qkv"),
        (moe_llama, dict(targets=["mlp"]), "blocks.layers.mlp.down (GroupedDense)"),
        (linear, {}, "Linear gtp_jax.Dense"),
        (adapted_queries, {}, "blocks.layers.attention.qkv once `gtp_jax.nn.lora`"),
    ],
)
def test_mistakes_are_named(make, options, message):
    options = {"rank": 2, "alpha": 4, **options}
    with pytest.raises(ValueError, match=naming(message)):
        gtp.nn.lora(placed(make), options.pop("rank"), options.pop("alpha"), rngs=nnx.Rngs(0), **options)


def test_an_abstract_model_is_refused():
    with pytest.raises(ValueError, match="abstract"):
        gtp.nn.lora(abstract_model(plain_llama), 2, 4, rngs=nnx.Rngs(0))


def test_targets_choose_projections_and_by_default_all_but_heads():
    def paths(make, **options):
        model = nnx.eval_shape(lambda: gtp.nn.lora(make(nnx.Rngs(0)), 2, 2, rngs=nnx.Rngs(0), **options))
        return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))}

    some = paths(plain_llama, targets=["value", "mlp.down"])
    assert some == {
        f"blocks.layers.{name}.{part}" for name in ("attention.qkv.lora.value", "mlp.down.lora") for part in "ab"
    }
    assert len(paths(plain_llama)) == 2 * len(PROJECTIONS)
    assert len(paths(moe_llama)) == 8  # attention alone
