"""Codes of frozen weights that are stored padded are those of one device, and are used, trained over and saved so."""

import contextlib
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
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.nn import abstract_model

from ..recipes.oracles import matrix

OPTIONS = dict(dtype=jnp.float64, param_dtype=jnp.float64)
RECIPES = {
    "NVFP4": gtp.NVFP4(exclude=()),
    "NVFP4, 1 x 16": gtp.NVFP4(block=(1, 16), exclude=()),
    "MXFP8": gtp.MXFP8(exclude=()),
    "FP8": gtp.FP8(exclude=()),
}
MESHES = [dict(gtp=7), dict(gtp=2, dp=4), dict(gtp=3, tp=2), dict(gtp=2, tp=3)]


class Block(nnx.Module):
    """tp 2 divides 128 hidden features into whole blocks of every format; tp 3, 5 and 7 divide nothing."""

    def __init__(self, rngs):
        self.mlp = gtp.MLP(66, 128, rngs=rngs, **OPTIONS)
        start = nnx.initializers.normal(0.1)
        self.lora = nnx.LoRA(66, 2, 66, b_initializer=start, param_dtype=jnp.float64, rngs=rngs)

    def __call__(self, x):
        return x + self.mlp(x) + self.lora(x)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = gtp.Embed(32, 66, rngs=rngs, **OPTIONS)
        self.pair = gtp.Dense(66, {"a": 160, "b": 66}, rngs=rngs, **OPTIONS)
        self.wide = gtp.Dense(160, 66, rngs=rngs, **OPTIONS)
        self.blocks = gtp.Stack(lambda rngs: Block(rngs), 2, rngs=rngs)

    def __call__(self, tokens):
        made = self.pair(self.embed(tokens))
        return self.blocks(self.wide(jnp.tanh(made["a"])) + made["b"])


def loss(model, tokens):
    return jnp.sum(jnp.sin(model(tokens))), jnp.float64(tokens.size)


def tokens_of(seed, rows=336):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 32, (rows, 6)), jnp.int32)


@contextlib.contextmanager
def on(**degrees):
    devices = jax.devices()[: math.prod(degrees.values())]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no weight stays whole
        with jax.set_mesh(gtp.make_mesh(**{"gtp": 1, **degrees}, devices=devices)), gtp.layout.even_shares():
            yield


def with_large_ends(rngs):
    """A model whose largest numbers are in the last rows and columns of its weights, next to the padding."""
    model = Model(rngs)
    for _, v in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if (layout := v.get_metadata().get("layout")) is not None:
            for dim, size in enumerate(layout.shape, -2):
                last = jnp.arange(size) >= size - 2
                v[...] = v[...] * jnp.where(jnp.expand_dims(last, -1) if dim == -2 else last, 3.7, 1.0)
    return model


def frozen(recipe, make=Model):
    return lambda rngs: gtp.nn.freeze(make(rngs), recipe)


def codes_of(model):
    """Every frozen weight that is stored as codes, by path."""
    found = nnx.to_flat_state(nnx.state(model, gtp.nn.Frozen))
    return {path: v for path, v in found if isinstance(v.get_raw_value(), gtp.formats.QuantizedArray)}


@functools.cache
def masters_of_one_device():
    model = gtp.init(with_large_ends, nnx.Rngs(0))
    found = {}
    for path, v in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if (layout := v.get_metadata().get("layout")) is not None:
            found[path] = np.asarray(v[...] if layout.rows < layout.cols else jnp.swapaxes(v[...], -1, -2))
    return found


def host(model):
    """The codes, scales and amaxes of a model, in logical shapes."""
    return {path: jax.tree.map(np.asarray, v.get_value()) for path, v in codes_of(model).items()}


@pytest.mark.parametrize(("name", "degrees"), pairwise(RECIPES, MESHES, usual=1))
def test_codes_are_those_of_one_device_bit_for_bit_and_of_the_whole_weight_by_the_oracle(name, degrees, x64):
    recipe, masters = RECIPES[name], masters_of_one_device()
    with on():
        wanted = host(gtp.init(frozen(recipe, with_large_ends), nnx.Rngs(0)))
    with on(**degrees):
        model = gtp.init(frozen(recipe, with_large_ends), nnx.Rngs(0))
        found = host(model)
        for v in codes_of(model).values():
            codes = v.get_raw_value().codes
            shares = {shard.data.nbytes for shard in codes.addressable_shards}
            assert shares == {codes.nbytes // v.get_metadata()["layout"].shards}, "every device stores an even share"
    assert found.keys() == masters.keys() and jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert (one.shape, one.tobytes()) == (other.shape, other.tobytes())
    for path, codes in found.items():
        each = masters[path].reshape(-1, *masters[path].shape[-2:])
        values = [matrix(one, recipe.wire, np.float32) for one in each]
        back = np.asarray(gtp.ops.dequantize(codes, dtype=jnp.float32))
        np.testing.assert_array_equal(back.reshape(np.shape(values)), values, err_msg=str(path))


def train(steps, degrees, recipe, **options):
    with on(**degrees):
        optimizer = optax.adamw(1e-2)
        state = gtp.TrainState.create(gtp.init(frozen(recipe), nnx.Rngs(0)), optimizer)
        step = gtp.train_step(loss, optimizer, **options)
        losses = []
        for number in range(steps):
            state, metrics = step(state, tokens_of(number))
            losses.append(float(metrics["loss"]))
        return losses, jax.tree.map(np.asarray, state.params), jax.tree.map(np.asarray, state.logical().frozen)


VIEWS = [dict(view="global"), dict(view="local"), dict(view="global", microbatches=2)]


@pytest.mark.full
@pytest.mark.parametrize(("name", "degrees", "options"), pairwise(RECIPES, MESHES, VIEWS))
def test_adapters_over_padded_codes_train_as_on_one_device(name, degrees, options, x64):
    if "tp" in degrees and options["view"] == "local":
        options = dict(view="global")  # in local view, `nnx.LoRA` would get parts of features
    wanted = train(2, {}, RECIPES[name])
    found = train(2, degrees, RECIPES[name], **options)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-10), found[1], wanted[1])
    jax.tree.map(np.testing.assert_array_equal, found[2], wanted[2])
    assert abs(wanted[0][0] - wanted[0][-1]) > 1e-4


@pytest.mark.parametrize("recipe", others_full([gtp.FP8(matmuls=True), gtp.NVFP4(matmuls=True, stochastic=False)], []))
def test_padded_codes_are_multiplied_as_a_step_of_masters_under_the_recipe(recipe, x64):
    recipe = dataclasses.replace(recipe, exclude=("embed",))
    found = []
    for make, own in ((frozen(recipe), None), (Model, recipe)):
        with on(gtp=7):
            state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optax.identity())
            run = jax.jit(lambda s, x, own=own: gtp.train.loss_and_gradients(loss, s, x, recipe=own))
            value, gradients = run(state, tokens_of(0))
            found.append(jax.tree.map(np.asarray, (value, gradients["blocks"]["layers"]["lora"])))
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.full
@pytest.mark.parametrize("name", ["NVFP4", "FP8"])
def test_checkpoints_of_padded_codes_are_logical(name, tmp_path, x64):
    optimizer, recipe = optax.adamw(1e-2), RECIPES[name]
    whole, names = [], []
    with Checkpoints(tmp_path) as checkpoints:
        for number, degrees in enumerate([dict(gtp=7), {}, dict(gtp=5), dict(gtp=3, tp=2)]):
            with on(**degrees):
                like = gtp.TrainState.create(abstract_model(frozen(recipe)), optimizer)
                if number:
                    state, _ = checkpoints.restore(like)
                else:
                    state = gtp.TrainState.create(gtp.init(frozen(recipe), nnx.Rngs(0)), optimizer)
                losses = gtp.eval_step(loss)(state, tokens_of(0, rows=210))["loss"]
                whole.append((float(losses), jax.tree.map(np.asarray, state.logical().frozen)))
                checkpoints.save(number, state)
                checkpoints.wait()
                content = checkpoints.manifest()
                names.append({key: one["digest"] for key, one in content["leaves"].items()})
                kernel = content["leaves"]["frozen/pair/kernel/a/codes"]
                assert kernel["shape"] == [160, 33 if name == "NVFP4" else 66]
    assert all(one == names[0] for one in names), "the digests do not depend on the mesh"
    for one in whole[1:]:
        assert one[0] == pytest.approx(whole[0][0], rel=1e-13)
        jax.tree.map(np.testing.assert_array_equal, one[1], whole[0][1])


@pytest.mark.full
def test_an_nnx_state_of_padded_codes_is_saved_in_logical_shapes(tmp_path, x64):
    recipe = RECIPES["NVFP4"]
    with Checkpoints(tmp_path) as checkpoints:
        with on(gtp=7):
            model = gtp.init(frozen(recipe), nnx.Rngs(0))
            checkpoints.save(0, nnx.state(model))
            checkpoints.wait()
            wanted = host(model)
        with on(gtp=5):
            model = gtp.init(frozen(recipe), nnx.Rngs(1))
            state, _ = checkpoints.restore(nnx.state(model))
            nnx.update(model, state)
    jax.tree.map(np.testing.assert_array_equal, host(model), wanted)


@pytest.mark.full
def test_codes_of_experts_are_padded(x64):
    class Experts(nnx.Module):
        def __init__(self, rngs):
            self.moe = gtp.nn.MoE(66, 50, num_experts=4, aux_loss_coeff=0.0, rngs=rngs, **OPTIONS)
            self.lora = nnx.LoRA(66, 2, 66, param_dtype=jnp.float64, rngs=rngs)

        def __call__(self, x):
            return self.moe(x) + self.lora(x)

    x = np.random.default_rng(0).normal(size=(30, 2, 66))
    for recipe in (gtp.NVFP4(block=(1, 16)), gtp.FP8()):
        found = []
        for degrees in ({}, dict(gtp=5), dict(gtp=3, ep=2)):
            with on(**degrees):
                model = gtp.init(lambda rngs, recipe=recipe: gtp.nn.freeze(Experts(rngs), recipe), nnx.Rngs(0))
                codes = [jax.tree.map(np.asarray, v.get_value()) for v in codes_of(model).values()]
                found.append((codes, np.asarray(jax.jit(lambda model, x: model(x))(model, x))))
        assert len(found[0][0]) == 3
        for codes, y in found[1:]:
            jax.tree.map(np.testing.assert_array_equal, codes, found[0][0])
            np.testing.assert_allclose(y, found[0][1], rtol=0, atol=1e-12)


def test_blocks_that_tp_cuts_are_refused(x64):
    class Cut(nnx.Module):
        def __init__(self, rngs):
            self.mlp = gtp.MLP(66, 100, rngs=rngs, **OPTIONS)
            self.lora = nnx.LoRA(66, 2, 66, param_dtype=jnp.float64, rngs=rngs)

    with on(gtp=3, tp=2):
        with pytest.raises(ValueError, match=naming("mlp.down MXFP8 whole blocks recipe's")):
            gtp.init(lambda rngs: gtp.nn.freeze(Cut(rngs), gtp.MXFP8()), nnx.Rngs(0))
        gtp.init(lambda rngs: gtp.nn.freeze(Cut(rngs), gtp.FP8()), nnx.Rngs(0))


def test_shards_that_would_cut_blocks_are_padded_unless_even_shares_are_off(x64):
    """8 rows per rank are half a block, although 8 divides 64."""

    class Narrow(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.lora = gtp.Dense(64, 64, rngs=rngs), nnx.LoRA(64, 2, 64, rngs=rngs)

    with on(gtp=8):
        model = gtp.init(lambda rngs: gtp.nn.freeze(Narrow(rngs), gtp.NVFP4()), nnx.Rngs(0))
        assert model.dense.kernel.get_raw_value().codes.shape == (128, 32)
        assert model.dense.kernel.get_value().shape == (64, 64)
        with (
            gtp.layout.even_shares(False),
            pytest.raises(ValueError, match=naming("`gtp_jax.layout.even_shares(False)`")),
        ):
            gtp.init(lambda rngs: gtp.nn.freeze(Narrow(rngs), gtp.NVFP4()), nnx.Rngs(0))
