"""Weights that gtp does not divide are stored padded, and are what they are without a mesh."""

import contextlib
import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec
from messages import naming
from padded_states import moved, padding_of, same
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.nn import abstract_model
from gtp_jax.train._optimizer import of_model


class Model(nnx.Module):
    """A table of 34 rows, a stack with 26 features, and a head; 3, 5 and 7 divide none of their dimensions."""

    def __init__(self, rngs, dim=26, ids=34, dtype=jnp.float64):
        options = dict(dtype=dtype, param_dtype=jnp.promote_types(dtype, jnp.float32))
        self.embed = gtp.Embed(ids, dim, rngs=rngs, **options)
        self.blocks = gtp.Stack(lambda rngs: gtp.Dense(dim, dim, rngs=rngs, **options), 2, rngs=rngs)
        self.head = gtp.Dense(dim, {"a": ids, "b": 8}, use_bias=True, rngs=rngs, **options)

    def __call__(self, tokens):
        made = self.head(self.blocks(self.embed(tokens)))
        return jnp.concatenate([made["a"], made["b"]], -1)


@contextlib.contextmanager
def on(gtp_degree, dp=1, *, at_once=True):
    with jax.set_mesh(gtp.make_mesh(gtp=gtp_degree, dp=dp, devices=jax.devices()[: gtp_degree * dp])):
        with gtp.layout.even_shares() if at_once else contextlib.nullcontext():
            yield


def made(seed=0):
    return gtp.init(Model, nnx.Rngs(seed))


@nnx.jit
def call(module, x):
    return module(x)


def test_a_padded_weight_is_read_in_its_logical_shape(x64):
    plain = made()
    with on(7):
        model = made()
        kernel = model.head.kernel["a"]
        assert isinstance(kernel, nnx.Param)
        assert kernel.get_raw_value().shape == (28, 34) and kernel.shape == kernel[...].shape == (26, 34)
        assert {s.data.shape for s in kernel.get_raw_value().addressable_shards} == {(4, 34)}
        same(kernel[...], plain.head.kernel["a"][...], atol=0)
        same(kernel[-1], plain.head.kernel["a"][-1], atol=0)
        same(kernel[-1, 2:4], plain.head.kernel["a"][-1, 2:4], atol=0)
        same(model.blocks.layers.kernel[1], plain.blocks.layers.kernel[1], atol=0)
        assert (2 * kernel).shape == (26, 34) and "(26, 34)" in str(kernel) and "28" not in str(kernel.shape)
        assert jax.tree.leaves(nnx.state(model.head))[-2].shape == (28, 34), "`nnx.state` has what is stored"


def test_a_logical_array_that_is_put_into_a_padded_weight_is_padded(x64):
    new = np.random.default_rng(0).normal(size=(26, 34))
    stacked = np.random.default_rng(1).normal(size=(2, 26, 26))
    with on(7):
        model = made()
        kernel, layers = model.head.kernel["a"], model.blocks.layers.kernel
        where = {id(one): one.get_raw_value().sharding for one in (kernel, layers)}

        def holds(variable, wanted):
            raw = np.asarray(variable.get_raw_value())
            same(raw[tuple(map(slice, wanted.shape))], wanted, atol=0)
            assert np.count_nonzero(raw) == np.count_nonzero(wanted), "the padding is zero"
            assert variable.get_raw_value().sharding == where[id(variable)]

        kernel[...] = new
        holds(kernel, new)
        kernel.set_value(jnp.asarray(2 * new))
        holds(kernel, 2 * new)
        kernel[...] = kernel[...].at[-1].set(jnp.ones(34))
        holds(kernel, np.concatenate([2 * new[:-1], np.ones((1, 34))]))
        kernel[...] = 3.0
        holds(kernel, np.full((26, 34), 3.0))
        layers[...] = stacked
        holds(layers, stacked)
        nnx.update(model.head, {"kernel": {"a": jnp.asarray(new)}})
        holds(kernel, new)
        state = nnx.state(model.head)
        state["kernel"]["a"] = state["kernel"]["a"].replace(jnp.asarray(-new))
        nnx.update(model.head, state)
        holds(kernel, -new)
        with pytest.raises(ValueError, match=naming("(34,) (26, 34)")):
            kernel[...] = jnp.ones(34)
        holds(kernel, -new)
        kernel.set_raw_value(jnp.ones((5, 34)))
        x = jnp.ones((7, 26))
        with pytest.raises(ValueError, match=naming("(26, 34) (5, 34)")):
            call(model.head, x)
        kernel.set_value(jnp.asarray(new))  # as the message says
        holds(kernel, new)
        call(model.head, x)


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "rms": lambda: optax.masked(  # the padding's mean square is 0, of which `rsqrt` makes Inf, and Inf * 0 is NaN
        optax.rmsprop(1e-2, eps=0.0), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.9, jax.random.key(0)), optax.sgd(1e-2)),
    "power": lambda: optax.stateless(lambda grads, _: jax.tree.map(lambda g: 1e-2 * g ** (g.shape[-1] % 5), grads)),
}


@pytest.mark.parametrize("name", others_full(OPTIMIZERS, ["rms"]))
@pytest.mark.filterwarnings("ignore:the optimizer treats the layers")
def test_optimizers_see_logical_arrays_and_leave_the_padding_zero(name, x64):
    found = []
    for degree in (1, 7):
        with on(degree):
            optimizer = OPTIMIZERS[name]()
            state = gtp.TrainState.create(made(), optimizer)

            @jax.jit
            def update(state, optimizer=optimizer):
                grads = jax.tree.map(lambda p: jnp.cos(7 * p) * (p != 0), state.params)
                updates, opt_state = of_model(optimizer, state.model_def).update(grads, state.opt_state, state.params)
                return optax.apply_updates(state.params, updates), opt_state

            for _ in range(3):
                params, opt_state = update(state)
                state = gtp.TrainState(params, opt_state, state.step, state.model_def, state.model_state)
            assert not padding_of(state).any()
            logical = state.logical()
            floats = [x for x in jax.tree.leaves(logical.opt_state) if jnp.issubdtype(x.dtype, jnp.floating)]
            found.append(jax.tree.map(np.asarray, (logical.params, floats)))
    same(found[1], found[0], atol=1e-13)


@pytest.mark.full
@pytest.mark.skipif(bool(hlo.missing_packages()), reason="compiling for a GPU needs its packages")
def test_a_step_on_h200_pads_each_gradient_once_and_no_activation_and_copies_no_padded_layer():
    mesh = gtp.make_mesh(gtp=7, devices=hlo.topology_devices(hlo.parse_target("h200:7")))
    with jax.set_mesh(mesh), gtp.layout.even_shares():
        # in whole blocks of the matmuls, which would be padded otherwise
        model = abstract_model(lambda rngs: Model(rngs, dim=272, ids=344, dtype=jnp.bfloat16))
        state = gtp.TrainState.create(model, optax.adamw(1e-3))
        tokens = jax.ShapeDtypeStruct((7, 512), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec("gtp")))
        lowered = gtp.train_step(loss_of_batch, optax.adamw(1e-3), view="local").lower(state, tokens)
        text = str(lowered.compile(compiler_options=dict(hlo.COMPILE_OPTIONS)).as_text())
    stored = [x.shape for x in jax.tree.leaves(state.params)]
    assert stored == [(2, 272, 273), (344, 273), (344,), (8,), (273, 344), (273, 8)]
    found = sorted(re.findall(r"= (\w+\[[\d,]*\])\S* pad\(", text))
    assert found == ["f32[273,272]", "f32[273,272]", "f32[344,273]", "f32[344,273]", "f32[8,273]"]
    slicing = [one for one in text.split("\n\n") if re.search(r"= bf16\[272,272\]\S* slice\(", one)]
    assert len(slicing) == 4 and all("custom-call(" in one for one in slicing), "matmuls read the weights in place"


@pytest.mark.parametrize("degrees", others_full([[8, 7], [8, 7, 5, 8]], [[8, 7]]), ids=str)
def test_a_checkpoint_is_logical_and_moves_between_meshes(degrees, tmp_path, x64):
    optimizer = optax.adamw(1e-2)
    with Checkpoints(tmp_path) as checkpoints:
        kept = moved(checkpoints, map(on, degrees), lambda number: gtp.TrainState.create(made(seed=number), optimizer))
        stored = checkpoints.arrays(1)["params/embed/table"]
        assert stored.shape == (34, 26) and stored.open().shape == (34, 26)
        same(stored.read(0, 34), kept.params["embed"]["table"], atol=0)


def loss_of(model, tokens):
    return jnp.sum(jnp.sin(model(tokens)))


def loss_of_batch(model, tokens):
    return loss_of(model, tokens), jnp.asarray(float(tokens.size))


def test_nnx_optimizer_refuses_a_padded_model_and_is_right_for_one_that_is_stored_whole(x64):
    optimizer = optax.chain(optax.centralize(), optax.sgd(1e-2))
    tokens, found = jnp.arange(70).reshape(35, 2) % 34, []

    @nnx.jit
    def step(model, own):
        own.update(model, nnx.grad(loss_of)(model, tokens))

    for degree in (1, 7):
        with on(degree, at_once=False):
            model = made()
            step(model, nnx.Optimizer(model, optimizer, wrt=nnx.Param))
            found.append(jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model, nnx.Param))))
    same(found[1], found[0], atol=1e-13)
    with on(7):
        model = made()
        before = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model)))
        with pytest.raises(ValueError, match=naming("padded `nnx.Optimizer` gtp_jax.layout.even_shares")):
            step(model, nnx.Optimizer(model, optimizer, wrt=nnx.Param))
        same(nnx.as_pure(nnx.state(model)), before, atol=0)


class Mixed(nnx.Module):
    """A table and an array of gtp_jax's own layers, and Flax layers that `gtp.shard` has sharded."""

    def __init__(self, rngs):
        options = dict(dtype=jnp.float64, param_dtype=jnp.float64)
        self.embed = gtp.Embed(34, 260, rngs=rngs, **options)
        self.scale = gtp.Param(jax.random.normal(rngs.params(), (260, 26, 10), jnp.float64))
        self.layers = nnx.List([nnx.Linear(260, 260, rngs=rngs, **options) for _ in range(2)])

    def __call__(self, tokens):
        x = jnp.einsum("...i,ijk->...jk", self.embed(tokens), self.scale.gather()).reshape(*tokens.shape, 260)
        for layer in self.layers:
            x = jnp.sin(layer(x))
        return x


def test_own_layers_and_sharded_flax_layers_are_padded_together_and_train_as_on_one_device(x64):
    tokens, optimizer, found = jnp.arange(70).reshape(35, 2) % 34, optax.adamw(1e-2), []
    for degree in (1, 7):
        with on(degree, at_once=False), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = gtp.shard(gtp.init(Mixed, nnx.Rngs(0)), blocks="layers.*")
            state = gtp.TrainState.create(model, optimizer)
            assert model.embed.table.get_raw_value().shape == (34, 260), "the model stays as it was"
            nnx.Optimizer(model, optimizer, wrt=nnx.Param)
            shapes = jax.tree.map(jnp.shape, state.params)
            state, metrics = gtp.train_step(loss_of_batch, optimizer)(state, tokens)
            found.append(jax.tree.map(np.asarray, (state.logical().params, metrics["loss"])))
    assert shapes["embed"]["table"] == (34, 266) and shapes["scale"] == (266, 26, 10), "the last mesh pads these"
    assert shapes["layers"]["1"]["kernel"] == (266, 260)
    (told,) = {str(one.message) for one in caught if "state stores padded" in str(one.message)}
    assert not any("stays whole" in str(one.message) for one in caught)
    assert re.search(naming("embed.table padded `train_step` even_shares(False)"), told)
    same(found[1], found[0], atol=1e-12)


@pytest.mark.parametrize("layer", [gtp.Dense, nnx.Linear], ids=["own", "stock"])
def test_padded_arrays_of_a_state_are_refused_in_a_model_that_is_not_padded(layer):
    class Head(nnx.Module):
        def __init__(self, rngs):
            self.layer = layer(26, 34, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.layer(x)

    x = jnp.ones((7, 26))
    with on(7, at_once=False):
        model = gtp.init(Head, nnx.Rngs(0))
        model = gtp.shard(model, "layer", min_size=1) if layer is nnx.Linear else model
        wanted = np.asarray(call(model, x))
        state = gtp.TrainState.create(model, optax.sgd(0.1))
        same(call(state.model(), x), wanted, atol=1e-6)
        nnx.update(model, state.logical().params)
        same(call(model, x), wanted, atol=1e-6)
        nnx.update(model, state.params)
        with pytest.raises(ValueError, match=naming("(26, 34) padded `state.model()` `state.logical()`")):
            call(model, x)


@pytest.mark.full
def test_a_gradient_of_padded_weights_is_differentiated_again_as_on_one_device(x64):
    x, found = jax.random.normal(jax.random.key(0), (7, 26)), []

    def penalty(state, graph):
        def of_input(x):
            return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))

        gradient = jax.grad(of_input)(x)
        return jnp.sum(gradient**2) + of_input(x)

    def made_stack(rngs):
        options = dict(dtype=jnp.float64, param_dtype=jnp.float64, rngs=rngs)
        return gtp.Stack(lambda rngs: gtp.Dense(26, 26, **{**options, "rngs": rngs}), 2, rngs=rngs)

    for degree in (1, 7):
        with on(degree):
            graph, state = nnx.split(gtp.init(made_stack, nnx.Rngs(0)))
            gradients = jax.jit(jax.grad(functools.partial(penalty, graph=graph)))(state)
            stored = jax.tree.leaves(gradients)[0]
            assert stored.shape == (2, 26, 26 if degree == 1 else 28) and not np.asarray(stored)[..., 26:].any()
            found.append(np.asarray(stored)[..., :26])
    assert np.abs(found[0]).max() > 0.1
    same(found[1], found[0], atol=1e-12)


@pytest.mark.full
def test_check_compares_padded_gradients_with_one_device(x64):
    with on(7):
        errors = gtp.train.check(loss_of_batch, Model, jnp.arange(70).reshape(35, 2) % 34, tolerance=1e-12)
    assert {name for name in errors if name.startswith("gradient")} >= {"gradient embed.table"}


def test_linen_refuses_to_store_a_padded_weight():
    x = jnp.ones((7, 26))
    bridged = nnx.bridge.to_linen(gtp.Dense, 26, 34, dtype=jnp.float32)
    with on(7), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a weight of shape .* stays whole")
        with pytest.raises(ValueError, match=naming("(26, 34) (26, 35) Linen")):
            jax.jit(bridged.init)(jax.random.key(0), x)
        with gtp.layout.even_shares(False):
            variables = jax.jit(bridged.init)(jax.random.key(0), x)
        assert linen.meta.unbox(variables)["params"]["kernel"].shape == (26, 34)
        assert jax.jit(bridged.apply)(variables, x).shape == (7, 34), "outside of `init`, the scope changes nothing"


@pytest.mark.full
def test_models_of_one_class_in_and_out_of_even_shares_do_not_share_a_program(x64):
    with on(7), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a weight of shape .* stays whole")
        shapes = []
        for pad in (False, True, False):
            with gtp.layout.even_shares(pad):
                shapes.append(made().embed.table.get_raw_value().shape)
    assert shapes == [(34, 26), (35, 26), (34, 26)]


@pytest.mark.parametrize("recipe", others_full([gtp.FP8(), None], [gtp.FP8()]), ids=["FP8", "bf16"])
def test_a_weight_that_is_padded_for_dp_alone_is_frozen_without_padding(recipe, x64):
    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.dense = gtp.Dense(26, 34, dtype=jnp.bfloat16, rngs=rngs)
            self.adapter = nnx.LoRAParam(jnp.ones(3))

    found = []
    for degrees in ((1,), (2, 3)):
        with on(*degrees):
            model = gtp.init(Adapted, nnx.Rngs(0))
            stored = model.dense.kernel.get_raw_value().shape
            dense = gtp.nn.freeze(model, recipe).dense
            arrays = jax.tree.map(np.asarray, dense.kernel.get_raw_value())
            found.append((arrays, np.asarray(call(dense, np.ones((6, 26), jnp.bfloat16)))))
    assert stored == (27, 34)
    assert jax.tree.all(jax.tree.map(np.array_equal, *found))
