"""Frozen base weights exist as codes alone, travel as they are, and mean the values that they stand for (LoRA). What
cannot be frozen, or done with what is, is refused."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from messages import naming
from placed import placed
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.nn import abstract_model

from .oracles import matrix
from .test_recipe_parity import scope as mesh_scope

WIDTH, HIDDEN, VOCAB, BATCH, LENGTH = 64, 128, 32, 8, 4
DTYPES = dict(dtype="float64", param_dtype="float64")
B_INIT = nnx.initializers.normal(0.1)
TRAINED = (nnx.LoRAParam, nnx.PathContains("adapter"))
HSDP = dict(dp=2, gtp=2, tp=2)
RECIPE = gtp.NVFP4(exclude=("embed",))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.mlp = gtp.MLP(WIDTH, HIDDEN, rngs=rngs, **DTYPES)
        self.lora = nnx.LoRA(WIDTH, 2, WIDTH, b_initializer=B_INIT, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        return x + self.mlp(x) + self.lora(x)


class Model(nnx.Module):
    """Weights within a `Stack` and outside; one adapter is gtp_jax's own, whose weights are gathered."""

    def __init__(self, rngs):
        self.embed = gtp.Embed(VOCAB, WIDTH, rngs=rngs, **DTYPES)
        self.blocks = gtp.Stack(lambda rngs: Block(rngs), 2, rngs=rngs)
        self.projection = gtp.Dense(WIDTH, {"a": WIDTH, "b": WIDTH}, rngs=rngs, **DTYPES)
        self.adapter = gtp.Dense(WIDTH, WIDTH, rngs=rngs, **DTYPES)
        self.head = gtp.nn.TiedHead(self.embed, norm="layer", param_dtype="float64", rngs=rngs)

    def __call__(self, tokens):
        x = self.blocks(self.embed(tokens))
        found = self.projection(x)
        return self.head(found["a"] + jnp.tanh(found["b"]) + self.adapter(x))


def loss(model, batch):
    return gtp.cross_entropy(model(batch["tokens"]), batch["targets"])


def batch_of(seed=0):
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (BATCH, LENGTH + 1)).astype(np.int32)
    return {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}


def scope(degrees):
    return contextlib.nullcontext() if degrees is None else mesh_scope(degrees)


def frozen(recipe=RECIPE):
    return lambda rngs: gtp.nn.freeze(Model(rngs), recipe, trained=TRAINED)


def assert_close(found, wanted, tolerance=1e-12):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * np.abs(other).max())


def values_of(kernel, form):
    """What a kernel's codes stand for, by the numpy oracle; of a stack layer by layer."""
    if kernel.ndim == 2:
        return matrix(kernel.T, form, np.float64).T
    return np.stack([values_of(one, form) for one in kernel])


@functools.cache
def of_dequantized_values(recipe):
    """Loss and gradients of adapters, of a model whose base has the values of the codes, without a mesh."""
    model = gtp.init(Model, nnx.Rngs(0))
    for path, module in nnx.iter_modules(model):
        if isinstance(module, gtp.Dense) and path[-1] != "adapter" and recipe.wire is not None:
            kernels = module.kernel.values() if path[-1] in ("projection", "up") else [module.kernel]
            for kernel in kernels:
                kernel[...] = values_of(np.asarray(kernel[...]), recipe.wire)
    if recipe.wire is not None and recipe.of(("embed",)).wire is not None:
        model.embed.table[...] = matrix(np.asarray(model.embed.table[...]), recipe.wire, np.float64)
    graph, params, rest = nnx.split(model, nnx.Any(*TRAINED), ...)

    def of(params):
        total, count = loss(nnx.merge(graph, params, rest), batch_of())
        return total / count

    return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(of))(params))


CASES = [
    (dict(gtp=4), RECIPE, 2, "local"),
    (None, gtp.recipes.BF16(), 1, "global"),
    (HSDP, gtp.FP8(), 2, "global"),
    (dict(gtp=4), gtp.MXFP8(exclude=("embed",)), 1, "global"),
    (dict(dp=4, gtp=2), gtp.NVFP4(block=(1, 16)), 1, "global"),
]


@pytest.mark.parametrize("mesh, recipe, microbatches, view", others_full(CASES, CASES[:1]), ids=str)
def test_it_is_the_model_whose_base_has_the_values_of_the_codes(mesh, recipe, microbatches, view, x64):
    with scope(mesh):
        state = gtp.TrainState.create(gtp.init(frozen(recipe), nnx.Rngs(0)), optax.identity())
        run = jax.jit(lambda s, b: gtp.train.loss_and_gradients(loss, s, b, microbatches=microbatches, view=view))
        found, gradients = jax.tree.map(np.asarray, run(state, batch_of()))
    wanted, of_values = of_dequantized_values(recipe)
    assert_close(found, wanted)
    assert sorted(gradients) == ["adapter", "blocks"]  # and none of the base
    assert_close(gradients, of_values)


@pytest.fixture
def hsdp(x64):
    with scope(HSDP):
        yield


def test_a_device_stores_its_share_of_codes_and_scales_and_nothing_else_of_the_base(hsdp):
    state = gtp.TrainState.create(gtp.init(frozen(), nnx.Rngs(0)), optax.adam(1e-2))
    layer = state.frozen["blocks"]["layers"]["mlp"]
    arrays = jax.tree.leaves([module["kernel"] for module in (layer["up"], layer["down"], state.frozen["projection"])])
    assert {a.dtype.name for a in arrays} == {"uint8", "float32"}
    on_one = sum(a.addressable_shards[0].data.nbytes for a in arrays)
    # three kernels of each of two layers are over tp and gtp, two of the projection over gtp; dp has a copy of each
    elements = WIDTH * (HIDDEN * 2 * 3 / 4 + WIDTH * 2 / 2)
    amaxes = 4 * (2 * 3 + 2)
    assert on_one == elements * (1 / 2 + 1 / 256) + amaxes
    adapters = 2 * (WIDTH * 2 + 2 * WIDTH) + WIDTH * WIDTH
    assert sum(a.size for a in jax.tree.leaves(state.params)) == adapters
    assert sum(a.size for a in jax.tree.leaves(state.opt_state)) == 2 * adapters + 1  # both moments, and a count


def test_codes_travel_as_they_are_and_no_gradient_of_the_base_is_summed(x64):
    """Adapters here are whole on every rank, so that every gather and every scatter would be the base's."""
    make = lambda rngs: gtp.nn.freeze(Stacked(rngs), gtp.NVFP4())  # noqa: E731
    with scope(dict(gtp=4)):
        state = gtp.TrainState.create(abstract_model(make), optax.sgd(0.1))
        squares = lambda model, batch: (jnp.sum(model(batch) ** 2), jnp.int32(BATCH))  # noqa: E731
        x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float64)
        text = gtp.train_step(squares, optax.sgd(0.1)).lower(state, x).compile().as_text()
    found = hlo.collectives(text)
    gathers = [c for c in found if c.kind == "all-gather"]
    assert {c.dtype for c in gathers} == {"u8"}
    # forward, and again in backward: not the projection, which keeps them, nor the first layer, whose input has no
    # gradient
    codes = WIDTH * (HIDDEN * 3 * (3 + 2) + WIDTH) // 2
    scales = 4 * 16 * (3 * (3 + 2) + 1)  # of each rank and kernel up to 8 bytes, in a section of 16
    assert sum(c.result_bytes * c.times for c in gathers) == codes + scales
    assert {c.kind for c in found} <= {"all-gather", "all-reduce"}  # of adapters' gradients and the loss
    assert not any("pmax" in c.op_name for c in found)  # nothing is quantized in a step


class Stacked(nnx.Module):
    def __init__(self, rngs):
        self.blocks = gtp.Stack(lambda rngs: Block(rngs), 3, rngs=rngs)
        self.projection = gtp.Dense(WIDTH, WIDTH, rngs=rngs, **DTYPES)

    def __call__(self, x):
        return gtp.nn.run_chain(x, self.blocks, self.projection)


@pytest.mark.full
def test_a_checkpoint_restores_the_codes_on_another_mesh_bit_for_bit(tmp_path, x64):
    optimizer = optax.adam(1e-2)
    step = gtp.train_step(loss, optimizer)
    with scope(HSDP), Checkpoints(tmp_path) as checkpoints:
        state = gtp.TrainState.create(gtp.init(frozen(), nnx.Rngs(0)), optimizer)
        codes = jax.tree.map(np.asarray, state.frozen)
        state, _ = step(state, batch_of())
        checkpoints.save(1, state)
        checkpoints.wait()
        saved = jax.tree.map(np.asarray, state)
        _, wanted = step(state, batch_of(1))
    for one, other in zip(jax.tree.leaves(saved.frozen), jax.tree.leaves(codes), strict=True):
        assert one.tobytes() == other.tobytes()  # no step changes them
    with scope(dict(gtp=4)), Checkpoints(tmp_path) as checkpoints:
        like = gtp.TrainState.create(abstract_model(frozen()), optimizer)
        restored, _ = checkpoints.restore(like)
        for one, other in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
            assert np.asarray(one).tobytes() == other.tobytes()
        assert restored.frozen["projection"]["kernel"]["a"].codes.sharding.spec == PartitionSpec("gtp", None)
        _, found = step(restored, batch_of(1))
        assert_close(np.asarray(found["loss"]), np.asarray(wanted["loss"]))
        other = gtp.TrainState.create(abstract_model(frozen(gtp.MXFP8(exclude=("embed",)))), optimizer)
        with pytest.raises(ValueError, match="projection"):
            checkpoints.restore(other)


@pytest.mark.full
@pytest.mark.parametrize("recipe", [gtp.FP8(matmuls=True), gtp.NVFP4(matmuls=True, stochastic=False)], ids=str)
def test_codes_are_multiplied_as_a_recipe_has_it(recipe, x64):
    """The operands of matmuls are rounded too: as in a step of masters under the recipe, and alike on every mesh."""
    found, masters = [], dataclasses.replace(recipe, exclude=(*recipe.exclude, "adapter"))
    for mesh, make, own in ((HSDP, frozen(recipe), None), (dict(gtp=4), frozen(recipe), None), (HSDP, Model, masters)):
        with scope(mesh):
            state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optax.identity())
            run = jax.jit(lambda s, b, own=own: gtp.train.loss_and_gradients(loss, s, b, recipe=own))
            value, gradients = jax.tree.map(np.asarray, run(state, batch_of()))
            lora = gradients["blocks"]["layers"]["lora"]
            found.append((value, lora, gradients["adapter"]))
    for one, other in zip(jax.tree.leaves(found[2]), jax.tree.leaves(found[0]), strict=True):
        np.testing.assert_array_equal(one, other)
    assert_close(found[1], found[0], 1e-5)  # the amax of an activation is a rank's own


class Experts(nnx.Module):
    """Experts, whose codes have amaxes of their own, behind weights of any shape."""

    def __init__(self, rngs):
        start = nnx.initializers.normal(1.0)(rngs.params(), (1, LENGTH, WIDTH), jnp.float64)
        self.positions = gtp.Param(start)
        self.conv = gtp.nn.Conv(WIDTH, WIDTH, (3,), param_dtype=jnp.float64, rngs=rngs)
        self.moe = gtp.nn.MoE(WIDTH, WIDTH, num_experts=4, aux_loss_coeff=0.0, rngs=rngs, **DTYPES)
        self.lora = nnx.LoRA(WIDTH, 2, WIDTH, b_initializer=B_INIT, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        x = self.conv(x + self.positions.gather())
        return self.moe(x + self.lora(x))


@pytest.mark.full
@pytest.mark.parametrize("recipe", [gtp.FP8(), gtp.MXFP8()], ids=["fp8", "mxfp8"])
def test_experts_and_weights_of_any_shape_are_those_of_a_step_of_masters(recipe, hsdp):
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH))
    mean = lambda model, x: jnp.mean(jnp.sin(model(x)))  # noqa: E731
    found = []
    for make, own in ((lambda rngs: gtp.nn.freeze(Experts(rngs), recipe), None), (Experts, recipe)):
        state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optax.identity())
        run = jax.jit(lambda s, x, own=own: gtp.train.loss_and_gradients(mean, s, x, recipe=own))
        value, gradients = jax.tree.map(np.asarray, run(state, x))
        found.append((value, gradients["lora"]))
    assert_close(*found)


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.blocks = gtp.Stack(lambda rngs: gtp.MLP(WIDTH, WIDTH, rngs=rngs), 2, rngs=rngs)
        self.pair = gtp.Dense(WIDTH, {"a": WIDTH, "b": WIDTH}, rngs=rngs)
        self.lora = nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = self.blocks(x)
        return self.pair(x)["a"] + self.lora(x)


def frozen_plain(recipe=None, **options):
    return gtp.nn.freeze(placed(Plain), recipe, **options)


@pytest.fixture
def one_device():
    with scope(dict(gtp=1)):
        yield


class Narrow(nnx.Module):
    """Has shards of input features, of 24 rows each: a block and a half."""

    def __init__(self, rngs):
        self.narrow, self.lora = gtp.Dense(256, 24, rngs=rngs), nnx.LoRA(256, 2, 24, rngs=rngs)


def frozen_over(degree, make, recipe):
    with scope(dict(gtp=degree)), gtp.layout.even_shares(False):
        gtp.nn.freeze(placed(make), recipe)


REFUSED = {
    "elements of codes": (
        lambda: frozen_plain(gtp.NVFP4()).pair.kernel["a"][...],
        "NVFP4 `gtp_jax.ops.dequantize(kernel.get_value())`",
    ),
    "shards of no whole blocks": (
        lambda: frozen_over(8, Plain, gtp.NVFP4(exclude=("blocks",))),
        "(64, 64) pair NVFP4 FP8 even_shares(False)",
    ),
    "columns of no whole blocks": (lambda: frozen_over(4, Narrow, gtp.NVFP4()), "(256, 24) narrow NVFP4"),
    "nothing is trained": (lambda: frozen_plain(trained=nnx.PathContains("adapter")), "`trained` adapter none nothing"),
    "nothing is frozen": (lambda: frozen_plain(trained=nnx.Param), "all nothing"),
    "some of one gather": (
        lambda: frozen_plain(trained=nnx.Any(nnx.LoRAParam, nnx.PathContains("b"))),
        "pair `trained`",
    ),
    "stochastic rounding": (
        lambda: frozen_plain(gtp.NVFP4(matmuls=True)),
        "blocks.layers. stochastically NVFP4(matmuls=True, stochastic=False)",
    ),
    "layers that differ": (
        lambda: frozen_plain(gtp.NVFP4(high_precision_last=1)),
        "`high_precision_first` `high_precision_last` `Stack`",
    ),
    "an abstract model": (lambda: gtp.nn.freeze(abstract_model(Plain), gtp.NVFP4()), "abstract gtp_jax.nn.freeze"),
    "a frozen weight is set": (
        lambda: frozen_plain().pair.kernel["a"].set_value(jnp.zeros((WIDTH, WIDTH))),
        "`kernel[...] = pretrained` `gtp_jax.nn.freeze`",
    ),
    "a recipe of frozen weights": (lambda: gtp.explain(frozen_plain(gtp.NVFP4()), gtp.NVFP4()), "frozen quantize"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_message(name, one_device):
    call, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=naming(message)):
        call()


def test_a_frozen_kernel_that_a_layer_of_a_chain_reads_is_refused_like_a_trained_one(one_device):
    class Reads(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.adapter = gtp.Dense(WIDTH, WIDTH, rngs=rngs), nnx.LoRA(WIDTH, 2, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.adapter(x) + x @ self.dense.kernel[...]

    stack = gtp.init(lambda rngs: gtp.Stack(Reads, 2, rngs=rngs), nnx.Rngs(0))
    for model in (stack, gtp.nn.freeze(stack)):
        with pytest.raises(TypeError, match=naming("array read written `Stack`")):
            jax.eval_shape(lambda x: model(x), jnp.ones((2, WIDTH)))  # noqa: B023


def test_a_gradient_of_what_is_frozen_is_refused(one_device):
    """It would be zeros, where the codes are gathered ahead of the layer that multiplies them."""
    graph, wanted, rest = nnx.split(frozen_plain(), nnx.PathContains("blocks"), ...)

    def loss(wanted):
        return jnp.sum(nnx.merge(graph, wanted, rest)(jnp.ones((2, WIDTH))).astype(jnp.float32))

    with pytest.raises(ValueError, match=naming("gradient frozen `nnx.grad(loss)`")):
        jax.eval_shape(jax.grad(loss), wanted)


def test_the_model_is_left_as_it_is_when_a_step_donates_what_was_frozen(one_device):
    base = Plain(nnx.Rngs(0))
    step = gtp.train_step(lambda model, x: jnp.mean(model(x).astype(jnp.float32) ** 2), optax.sgd(0.1))
    step(gtp.TrainState.create(gtp.nn.freeze(base, gtp.FP8()), optax.sgd(0.1)), jnp.ones((8, WIDTH)))
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(nnx.to_pure_dict(nnx.state(base, nnx.Param))))
