"""A weight that `gtp.shard` stores padded is read and set in its logical shape; what cannot be right is refused."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from padded_states import same
from selection import others_full

import gtp_jax as gtp
from gtp_jax.nn import abstract_model, split_model
from gtp_jax.nonuniform import leaf_specs

from .padded import F64, WIDTH, Model, Stacked, batches, loss, make, on, sharded


def holds(variable, wanted, spec):
    """Checks the values and the padding of a variable, and where its array is."""
    raw = np.asarray(variable.get_raw_value())
    same(raw[tuple(map(slice, wanted.shape))], wanted, 0)
    assert np.count_nonzero(raw) == np.count_nonzero(wanted), "the padding is zero"
    assert variable.get_raw_value().sharding.spec == spec


@pytest.mark.full
def test_a_padded_weight_is_read_in_its_logical_shape(x64):
    with on(gtp=1):
        wanted, stacked = np.asarray(make().last.kernel[...]), np.asarray(make(Stacked).layers.kernel[...])
    with on(gtp=7):
        kernel, layers = make().last.kernel, make(Stacked).layers.kernel
        assert isinstance(kernel, nnx.Param)
        assert kernel.get_raw_value().shape == (28, 26) and kernel.shape == kernel[...].shape == (26, 26)
        assert {s.data.shape for s in kernel.get_raw_value().addressable_shards} == {(4, 26)}
        assert layers.get_raw_value().shape == (5, 26, 28) and layers.shape == (5, 26, 26)
        same((kernel[...], kernel[-1], kernel[2:4, -1]), (wanted, wanted[-1], wanted[2:4, -1]), 0)
        same((layers[...], layers[1]), (stacked, stacked[1]), 0)
        assert (2 * kernel).shape == (26, 26) and "(26, 26)" in str(kernel) and "28" not in str(kernel.shape)


@pytest.mark.full
def test_logical_arrays_that_are_put_into_padded_weights_are_padded(x64):
    new, stacked = (np.random.default_rng(0).normal(size=shape) for shape in ((26, 26), (5, 26, 26)))
    spec, of_stack = jax.P("gtp", None), jax.P(None, None, "gtp")
    with on(gtp=7):
        model, layers = make(), make(Stacked).layers.kernel
        kernel = model.last.kernel
        kernel[...] = new
        holds(kernel, new, spec)
        kernel.set_value(jnp.asarray(2 * new))
        holds(kernel, 2 * new, spec)
        kernel[-1] = jnp.ones(26)
        holds(kernel, np.concatenate([2 * new[:-1], np.ones((1, 26))]), spec)
        kernel[...] = 3.0
        holds(kernel, np.full((26, 26), 3.0), spec)
        layers[...] = stacked
        holds(layers, stacked, of_stack)
        nnx.update(model, {"last": {"kernel": jnp.asarray(new)}})
        holds(kernel, new, spec)
        state = nnx.state(model.last)
        state["kernel"] = state["kernel"].replace(jnp.asarray(-new))
        nnx.update(model.last, state)
        holds(kernel, -new, spec)
        kernel.set_raw_value(jnp.ones((21, 26)))
        named = naming("last.kernel (26, 26) (28, 26) (21, 26)", "`kernel.set_value")
        with pytest.raises(ValueError, match=named):
            model(batches(1)[0])
        kernel.set_value(jnp.asarray(new))  # as the message says
        holds(kernel, new, spec)
        model(batches(1)[0])


def test_a_whole_array_that_shard_map_is_given_for_a_padded_weight_is_refused(x64):
    tokens = batches(1)[0]
    with on(gtp=7):
        graph, state = nnx.split(make())
        call = lambda state, tokens: nnx.merge(graph, state)(tokens)  # noqa: E731
        whole = jax.shard_map(call, in_specs=(jax.P(), jax.P()), out_specs=jax.P(), check_vma=False)
        with pytest.raises(ValueError, match=naming("padded shard Pass")):
            jax.eval_shape(whole, state, tokens)


@pytest.mark.full
def test_arrays_of_an_unsharded_model_are_stored_padded_again(x64):
    tokens = batches(1)[0]
    with on(gtp=7), nnx.use_eager_sharding(False):
        plain, model = Model(nnx.Rngs(3)), make()
        wanted = np.asarray(plain(tokens))
        nnx.update(model, nnx.state(plain))
        with pytest.raises(ValueError, match=naming("`gtp_jax.shard` again")):
            model(tokens)
        assert gtp.shard(model) is model and model.last.kernel.get_raw_value().shape == (28, 26)
        same(model(tokens), wanted)
        model.last.kernel = nnx.Param(2 * plain.last.kernel[...])
        plain.last.kernel[...] = 2 * plain.last.kernel[...]
        with pytest.raises(ValueError, match=naming("kernel Linear `gtp_jax.shard` again")):
            model(tokens)
        assert gtp.shard(model).last.kernel.get_raw_value().shape == (28, 26)
        same(model(tokens), plain(tokens))


@pytest.mark.full
def test_models_that_are_abstract_or_concrete_are_padded_alike(x64):
    with on(gtp=7):
        concrete = gtp.shard(nnx.jit(Model)(nnx.Rngs(0)), "blocks.*", min_size=80)
        abstract = gtp.shard(nnx.eval_shape(lambda: Model(nnx.Rngs(0))), "blocks.*", min_size=80)
        made, planned = make(), abstract_model(sharded)
    wanted = [(v.get_raw_value().shape, v.get_raw_value().sharding.spec) for v in _params(made)]
    for model in (concrete, abstract, planned):
        found = [(v.get_raw_value().shape, v.get_raw_value().sharding.spec) for v in _params(model)]
        assert found[-1] == wanted[-1] and [one[0] for one in found] == [one[0] for one in wanted]
        assert model.last.kernel.shape == (26, 26)
    same(concrete.last.kernel.get_raw_value(), made.last.kernel.get_raw_value())


def _params(model):
    return [v for _, v in nnx.to_flat_state(nnx.state(model, nnx.Param))]


@pytest.mark.full
def test_a_padded_model_is_pickled_cloned_and_split(x64):
    tokens = batches(1)[0]
    with on(gtp=7):
        model = make()
        wanted = np.asarray(model(tokens))
        copies = [nnx.clone(model), nnx.merge(*nnx.split(model)), gtp.shard(pickle.loads(pickle.dumps(model)))]
        for copy in copies:
            assert copy.last.kernel.shape == (26, 26) and copy.last.kernel.get_raw_value().shape == (28, 26)
            same(copy(tokens), wanted)


@pytest.mark.full
@pytest.mark.parametrize("name", others_full(["sgd", "adamw", "adafactor"], ["adafactor"]))
def test_nnx_optimizer_refuses_a_padded_model(name, x64):
    optimizer = getattr(optax, name)(1e-2)
    tokens = batches(1)[0]
    with on(gtp=7):
        model = make()
        before = jax.tree.map(np.asarray, nnx.as_pure(nnx.state(model)))
        gradients = nnx.jit(nnx.grad(lambda model: loss(model, tokens)[0]))(model)
        update = nnx.jit(lambda model, optimizer: optimizer.update(model, gradients))
        with pytest.raises(ValueError, match=naming("padded `nnx.Optimizer`")):
            update(model, nnx.Optimizer(model, optimizer, wrt=nnx.Param))
        same(nnx.as_pure(nnx.state(model)), before, 0)
        with gtp.layout.even_shares(False):
            whole = make()
            assert whole.last.kernel.get_raw_value().shape == (26, 26)
            nnx.Optimizer(whole, optax.adamw(1e-2), wrt=nnx.Param)


def test_linen_refuses_to_store_a_padded_weight(x64):
    with on(gtp=7), pytest.raises(ValueError, match=naming("padded Linen")):
        jax.jit(nnx.bridge.to_linen(lambda rngs: sharded(rngs)).init)(jax.random.key(0), batches(1)[0])


def normalized(_, value):
    return value / jnp.linalg.norm(value)


class Own(nnx.Param):
    """A user's class of parameters."""


class Special(nnx.Module):
    """Parameters that are never padded: of a user's class, with a hook that sees every array that is read."""

    def __init__(self, rngs):
        value = lambda: jax.random.normal(rngs.params(), (WIDTH, WIDTH), jnp.float64)  # noqa: E731
        self.own = Own(value())
        self.hooked = nnx.Param(value(), on_get_value=normalized)
        self.plain = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)

    def __call__(self, x):
        return self.plain(x @ self.own[...] @ self.hooked[...])


def test_parameters_of_other_classes_or_with_hooks_are_stored_whole(x64):
    x, found = jnp.ones((7, WIDTH)), []
    for degree in (1, 7):
        with on(gtp=degree):
            model = gtp.init(lambda rngs: gtp.shard(Special(rngs), Special, min_size=80), nnx.Rngs(0))
            found.append(np.asarray(nnx.jit(lambda model: model(x))(model)))
    assert [v.get_raw_value().shape for v in (model.own, model.hooked, model.plain.kernel)] == [(26, 26)] * 2 + [
        (28, 26)
    ]
    same(found[1], found[0])


@pytest.mark.full
def test_weights_that_the_core_and_a_replica_pad_differently_move_by_their_logical_shapes(x64):
    models = []
    for degree in (1, 7, 5):
        with on(gtp=degree):
            models.append(split_model(make()))
    alone, *models = models
    found = leaf_specs(models[0].model_def, models[0].params, models[1].model_def)
    assert [leaf.shape for leaf in found] == [array.shape for array in jax.tree.leaves(alone.params)]
    stored = [[array.shape for array in jax.tree.leaves(model.params)] for model in models]
    assert [[leaf.core_shape for leaf in found], [leaf.replica_shape for leaf in found]] == stored
    assert any(len({leaf.shape, leaf.core_shape, leaf.replica_shape}) == 3 for leaf in found)


def test_a_partition_by_name_that_does_not_divide_a_weight_is_refused_rather_than_padded(x64):
    with on(gtp=7), pytest.raises(ValueError, match=naming("7 ranks gtp dimension 0")):
        gtp.shard(nnx.jit(Model)(nnx.Rngs(0)), "blocks.*", min_size=80, specs={"last.kernel": jax.P("gtp")})
