"""Degrees that divide neither heads, hidden features nor the vocabulary: the model is the one without a mesh, also if
its weights are padded, for ZeRO over dp too."""

import dataclasses
import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from padded_states import padding_of, same
from placed import placed
from selection import others_full

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

from .test_llama_parity import assert_close, batches, oracle, train

# Six query heads of three groups, 97 tokens, 100 hidden features; the width is prime times two.
ODD = LlamaConfig(
    vocab_size=97, hidden_size=26, num_layers=2, num_heads=6, num_kv_heads=3, head_dim=6, intermediate_size=100,
    dtype="float64",
)  # fmt: skip
LOOPED = dataclasses.replace(ODD, vocab_size=98, num_heads=8, num_kv_heads=4, unroll=1)
CASES = {
    # degrees, changes of the model, sequence length
    "vocabulary 97, three groups, tp 2 x gtp 4": (dict(gtp=4, tp=2), ODD, 8),
    "the same with a tied head": (dict(gtp=4, tp=2), dataclasses.replace(ODD, tie_embeddings=True), 8),
    "the same with a whole sequence": (dict(gtp=4, tp=2), dataclasses.replace(ODD, sequence_parallel=False), 7),
    "looped": (dict(gtp=2, tp=2), dataclasses.replace(ODD, unroll=1, num_layers=4), 8),
    "tp 7": (dict(gtp=1, tp=7), dataclasses.replace(ODD, num_heads=14, num_kv_heads=7), 7),
    "tp 4, one rank with no group": (dict(gtp=2, tp=4), dataclasses.replace(ODD, num_heads=5, num_kv_heads=5), 8),
    "gtp 5, dp 1": (dict(gtp=5), ODD, 4),
    "padded over gtp 7, tied": (dict(gtp=7), dataclasses.replace(ODD, tie_embeddings=True), 4),
    "padded over gtp 3, tp 2, looped": (dict(gtp=3, tp=2), LOOPED, 4),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_steps_are_those_without_a_mesh(name, x64):
    degrees, config, length = CASES[name]
    size = int(np.prod([d for axis, d in degrees.items() if axis != "tp"]))
    data = batches(config, size * 2, length)[:3]
    with gtp.layout.even_shares("padded" in name):
        start, gradient, losses, end = train(config, degrees, data)
    expected_gradient, expected_losses, expected_end = oracle(config, start, data)
    assert_close(gradient, expected_gradient, 1e-12, "gradient of ")
    assert_close(losses, expected_losses, 1e-12, "loss of step ")
    assert_close(end, expected_end, 30 * 1e-12, "after 3 steps ")


ACTIVATIONS = {  # whose value at 0 is not 0, or not finite
    "sigmoid": jax.nn.sigmoid,
    "log of magnitudes, -inf in padding": lambda x: jnp.log(jnp.abs(x)),
    "inverse, NaN in padding": lambda x: jnp.where(x == 0, jnp.nan, 1 / x),
}


def mlp_gradients(degrees, activation, **options):
    """Loss and gradients of an MLP with biases, of 100 hidden features."""
    mesh = gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
    with jax.set_mesh(mesh):

        def make(rngs):
            mlp = gtp.MLP(24, 100, gated=False, activation=activation, use_bias=True, rngs=rngs, **options)
            for bias in (mlp.up.bias["up"], mlp.down.bias):
                bias.set_value(jax.random.normal(jax.random.key(bias.get_value().size), bias.get_value().shape))
            return mlp

        state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optax.sgd(1.0))
        x = np.random.default_rng(0).normal(size=(4, 6, 24))

        def loss(mlp, batch):
            y = mlp(batch["x"])
            return jnp.sum(jnp.sin(y)), jnp.float64(1)

        value, gradients = jax.jit(lambda s, b: gtp.train.loss_and_gradients(loss, s, b))(state, {"x": x})
        return jax.tree.map(np.asarray, (value, gradients))


@pytest.mark.parametrize("name", others_full(ACTIVATIONS, ["inverse, NaN in padding"]))
def test_padding_changes_nothing_whatever_an_activation_makes_of_it(name, x64):
    options = dict(dtype="float64", param_dtype="float64", sequence_parallel=False)
    plain = mlp_gradients(dict(gtp=1), ACTIVATIONS[name], **options)
    found = mlp_gradients(dict(gtp=1, tp=3), ACTIVATIONS[name], **options)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert_close(found[1], plain[1], 1e-12, "gradient of ")


def test_logits_of_padding_are_left_out_by_softmax_maximum_and_loss(x64):
    """A bare column-parallel layer is a head: its padding is -inf."""
    with jax.set_mesh(gtp.make_mesh(tp=3, gtp=1, devices=jax.devices()[:3])):
        graph, state = nnx.split(
            gtp.init(lambda rngs: gtp.Dense(8, 97, parallel="column", dtype="float64", rngs=rngs), nnx.Rngs(0))
        )
        specs = jax.tree.map(
            lambda v: v.get_value().sharding.spec, state, is_leaf=lambda v: isinstance(v, nnx.Variable)
        )
        x = np.random.default_rng(0).normal(size=(1, 3, 8))
        P = jax.sharding.PartitionSpec
        local = jax.shard_map(
            lambda s, x: nnx.merge(graph, s)(x),
            in_specs=(specs, P(None, "tp")),
            out_specs=P(None, None, "tp"),
            check_vma=False,
        )
        logits = np.asarray(jax.jit(local)(state, x))
        whole = np.asarray(jax.jit(lambda s, x: nnx.merge(graph, s)(x))(state, x))  # global view: logical
    assert logits.shape == (1, 3, 99) and whole.shape == (1, 3, 97)
    assert np.isneginf(logits[..., 97:]).all() and np.isfinite(logits[..., :97]).all()
    np.testing.assert_array_equal(logits[..., :97], whole)


# Every contraction is at least a block long, and tp 2 divides nothing evenly: three groups of heads, 97 features.
WIDE = dataclasses.replace(ODD, hidden_size=38, head_dim=12, intermediate_size=97)
EXPERTS = dataclasses.replace(WIDE, num_experts=3, top_k=2, intermediate_size=49)
UNEVEN = {
    "dense": (dict(gtp=2, tp=2), WIDE),
    "experts of 49 features": (dict(gtp=2, tp=2), EXPERTS),
    "three experts among two ranks": (dict(gtp=2, tp=2), dataclasses.replace(EXPERTS, expert_parallel="expert")),
}


def gradients_of(config: LlamaConfig, degrees: dict[str, int], recipe):
    """Loss and gradients on a mesh, under a recipe."""
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])):
        model = gtp.init(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(3))
        state = gtp.TrainState.create(model, optax.sgd(1.0))
        run = jax.jit(lambda s, b: gtp.train.loss_and_gradients(next_token_loss, s, b, recipe=recipe))
        return jax.tree.map(np.asarray, run(state, batches(config, 4, 6)[0]))


@pytest.mark.full
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("dense", gtp.FP8()),
        ("dense", gtp.NVFP4()),
        ("experts of 49 features", gtp.NVFP4(block=(1, 16))),
        ("three experts among two ranks", gtp.MXFP8()),
        ("three experts among two ranks", None),
    ],
    ids=str,
)
def test_weights_of_uneven_parts_are_quantized_as_on_one_device(name, recipe, padded, x64):
    """Blocks are those of the whole weight, of which each rank takes its part."""
    degrees, config = UNEVEN[name]
    loss, expected = gradients_of(config, dict(gtp=1), recipe)
    with gtp.layout.even_shares(padded):
        there, found = gradients_of(config, degrees, recipe)
    shapes = [jax.tree.map(np.shape, one) for one in (expected, found)]
    assert (shapes[0] != shapes[1]) == padded, "gradients have the shapes of what is stored"
    logical = jax.tree.map(lambda a, b: a[tuple(map(slice, b.shape))], found, expected)
    assert abs(there - loss) <= 1e-12 * abs(loss)
    assert_close(logical, expected, 1e-12, "gradient of ")


WIDER = dataclasses.replace(ODD, intermediate_size=102)
MIXED = dataclasses.replace(ODD, num_experts=4, intermediate_size=34, num_layers=1)
FIVE = dataclasses.replace(ODD, num_heads=5, num_kv_heads=5, head_dim=2)
OPTIMIZER = optax.adamw(1e-2)
TWICE = dict(microbatches=2)
PADDED = {
    # degrees, the model, options of the step, and the stored shapes of the kernels of the gate and of its output
    "gtp 2 x dp 3": (dict(gtp=2, dp=3), ODD, {}, (26, 102), (102, 26)),
    "gtp 2 x dp 3 in global view": (dict(gtp=2, dp=3), ODD, dict(view="global"), (26, 102), (102, 26)),
    "gtp 3 x dp 2, two microbatches": (dict(gtp=3, dp=2), ODD, TWICE, (26, 102), (102, 26)),
    "gtp 2 x dp 3, last": (dict(gtp=2, dp=3), ODD, dict(**TWICE, reduce_over_dp="last"), (26, 102), (102, 26)),
    "gtp 2 x tp 2 x dp 2": (dict(gtp=2, tp=2, dp=2), WIDER, {}, (28, 102), (102, 28)),
    "tp 3 x gtp 2 in global view": (dict(gtp=2, tp=3), ODD, dict(view="global"), (26, 102), (102, 26)),
    "tp 3 x dp 2": (dict(dp=2, tp=3), ODD, {}, (26, 102), (102, 26)),
    "experts, gtp 2 x dp 3": (dict(gtp=2, dp=3), MIXED, {}, (4, 34, 27), (4, 26, 36)),
    "experts, gtp 3 x ep 2": (dict(gtp=3, ep=2), MIXED, {}, (4, 34, 27), (4, 27, 34)),
}


def configured(config):
    return lambda rngs: Llama(config, rngs=rngs)


@functools.cache
def trained(config, view="local", microbatches=1, reduce_over_dp="each", **degrees):
    """The logical parameters and the losses of two steps, and the stored shapes of padded parameters."""
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 12, 7)).astype(np.int32)
    mesh = gtp.make_mesh(**{"gtp": 1, **degrees}, devices=jax.devices()[: math.prod(degrees.values())])
    with jax.set_mesh(mesh), gtp.layout.even_shares(), warnings.catch_warnings():
        warnings.filterwarnings("error", "a weight of shape .* stays whole")
        state = gtp.TrainState.create(placed(configured(config)), OPTIMIZER)
        options = dict(view=view, microbatches=microbatches, reduce_over_dp=reduce_over_dp, max_grad_norm=0.5)
        step, found = gtp.train_step(next_token_loss, OPTIMIZER, **options), []
        for row in tokens:
            state, metrics = step(state, {"tokens": row[:, :-1], "targets": row[:, 1:]})
            found.append([float(metrics[key]) for key in ("loss", "grad_norm")])
        padded = {"/".join(path): layout.array_shape for path, layout in state.model_def.padded.items()}
        assert not padding_of(state).any() and bool(padded) == bool(degrees)
        return jax.tree.map(np.asarray, state.logical().params), found, padded


def check_padded(config, **options):
    """Compares with one device, and returns the stored shapes."""
    wanted, losses, _ = trained(config)
    found, own, padded = trained(config, **options)
    np.testing.assert_allclose(own, losses, rtol=1e-13)
    same(found, wanted)
    return padded


@pytest.mark.full
@pytest.mark.parametrize("case", PADDED)
def test_steps_of_padded_weights_are_those_of_one_device(case, x64):
    degrees, config, options, *shapes = PADDED[case]
    padded = check_padded(config, **degrees, **options)
    assert [padded.get(f"blocks/layers/mlp/{name}") for name in ("up/kernel/gate", "down/kernel")] == shapes


SCHEDULES = {
    "all kept": (dict(keep_gathered="all"), "local"),
    "none kept, looped": (dict(keep_gathered=0, unroll=1), "global"),
    "everything saved": (dict(remat="everything"), "local"),
    "nothing saved, looped": (dict(remat="nothing", unroll=1), "global"),
    "waited for, tied": (dict(prefetch=False, tie_embeddings=True), "local"),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_padded_weights_are_those_of_one_device(name, x64):
    fields, view = SCHEDULES[name]
    padded = check_padded(dataclasses.replace(FIVE, **fields), view=view, gtp=3)
    assert padded["blocks/layers/attention/out/kernel"] == (10, 27), "padded rows, of a matrix by itself"
