"""To Python, Flax and orbax, a sharded model is the same model as before."""

import copy
import functools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hook

from .models import GPT2, Brief, Few, mean_of, tokens
from .steps import MESHES, scope

DEPTH = 2


def make(rngs=None):
    return GPT2(nnx.Rngs(0, dropout=1) if rngs is None else rngs, depth=DEPTH, block=Brief)


drawn = nnx.jit(make)


def sharded(**options):
    return gtp.shard(drawn(), min_size=64, **options)


@nnx.jit
def logits(model, tokens):
    return model(tokens)


def output(model):
    model.eval()
    return np.asarray(logits(model, tokens()))


def test_classes_paths_and_methods_are_those_they_were(x64):
    plain = drawn()
    with scope(MESHES["gtp 8"]):
        model = sharded()
        assert isinstance(model, GPT2) and all(isinstance(block, Brief) for block in model.blocks)
        assert type(model.blocks[0]) is not Brief and type(model.blocks[0]).__name__ == "Brief"
        assert isinstance(model.blocks, nnx.List) and len(model.blocks) == DEPTH
        paths = [[path for path, _ in nnx.to_flat_state(nnx.state(m))] for m in (model, plain)]
        assert paths[0] == paths[1]


@jax.jit
def mixed(a, b):
    return 0.75 * a + 0.25 * b


def averaged(one, other):
    return jax.tree.map(mixed, nnx.state(one, nnx.Param), nnx.state(other, nnx.Param))


def test_states_of_two_blocks_and_of_twin_networks_are_mapped_together(x64):
    """As in plain Flax; what comes out is stored like the first, and has its paths."""
    found = []
    for degrees in (MESHES["gtp 8"], None):
        with scope(degrees):
            twins = [drawn(nnx.Rngs(seed)) for seed in range(2)]
            if degrees is not None:
                twins = [gtp.shard(model, min_size=64) for model in twins]
            stored = nnx.state(twins[0])
            nnx.update(twins[0], averaged(*twins))
            nnx.update(twins[1].blocks[0], averaged(*twins[1].blocks))
            found.append([np.asarray(a) for model in twins for a in jax.tree.leaves(nnx.state(model, nnx.Param))])
            if degrees is not None:
                assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, stored, nnx.state(twins[0])))
                assert np.isfinite(output(twins[0])).all()
    for one, wanted in zip(*found, strict=True):
        np.testing.assert_array_equal(one, wanted)


@nnx.jit
def called(block, x):
    return block(x)


def test_a_program_of_one_block_serves_another_only_if_the_recipe_treats_them_alike():
    x = np.random.default_rng(0).normal(size=(8, 64)).astype("float32")
    with scope(MESHES["gtp 8"]):
        block = nnx.jit(lambda: nnx.Linear(64, 64, rngs=nnx.Rngs(0)))
        model = gtp.shard(nnx.Sequential(block(), block()), nnx.Linear, min_size=64)
        plain = [np.asarray(called(layer, x)) for layer in model.layers]
        with gtp.use_recipe(gtp.MXFP8(exclude=("layers.1",))):
            coded = [np.asarray(called(layer, x)) for layer in model.layers]
            (_, state), (graph, _) = map(nnx.split, model.layers)
            coded.append(np.asarray(called(nnx.merge(graph, state), x)))  # the second, with the weights of the first
            averaged(*model.layers)
    np.testing.assert_array_equal(plain[0], plain[1])
    for one in coded[1:]:
        np.testing.assert_array_equal(one, plain[1])
    assert np.abs(coded[0] - plain[0]).max() > 1e-3


@pytest.mark.full
def test_copies_of_every_kind_compute_the_same(x64):
    with scope(MESHES["gtp 8"]):
        model = sharded()
        wanted = output(model)
        for of in (
            nnx.clone(model),
            nnx.merge(*nnx.split(model)),
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            nnx.merge(pickle.loads(pickle.dumps(nnx.split(model)[0])), nnx.split(model)[1]),
        ):
            assert isinstance(of, GPT2) and hook.unit_facts(of) == hook.unit_facts(model)
            np.testing.assert_array_equal(output(of), wanted)
        assert nnx.split(nnx.clone(model))[0] == nnx.split(model)[0]  # so that both use one program


def assert_sharded(model, optimizer):
    for state in (nnx.state(model, nnx.Param), nnx.state(optimizer)):
        for path, leaf in jax.tree_util.tree_leaves_with_path(state):
            assert leaf.size < 64 or leaf.addressable_shards[0].data.size == leaf.size // 8, path


@pytest.mark.parametrize("mesh", others_full(MESHES, ["gtp 8"]))
def test_every_matrix_is_stored_as_shards_and_so_are_the_moments(mesh, x64):
    with scope(MESHES[mesh]):
        model = sharded()
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        step = nnx.jit(lambda model, optimizer, t: optimizer.update(model, nnx.grad(mean_of("plain"))(model, t)))
        assert_sharded(model, optimizer)
        step(model, optimizer, tokens())
        assert_sharded(model, optimizer)


@pytest.mark.full
def test_an_abstract_model_is_loaded_as_shards(tmp_path, x64):
    with scope(MESHES["gtp 8"]):
        model = sharded()
        with ocp.StandardCheckpointer() as checkpointer:  # which waits until it is written
            checkpointer.save(tmp_path / "model", nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        wanted = output(model)
    with scope(MESHES["dp 2, gtp 4"]):
        abstract = gtp.shard(nnx.eval_shape(make), min_size=64)
        state = nnx.state(abstract, nnx.Param)
        loaded = ocp.StandardCheckpointer().restore(tmp_path / "model", nnx.to_pure_dict(state))
        table = loaded["embed"]["embedding"]
        assert table.addressable_shards[0].data.size == table.size // 8
        nnx.replace_by_pure_dict(state, loaded)
        fresh = make(nnx.Rngs(7, dropout=1))
        made = gtp.shard(fresh, min_size=64)
        nnx.update(made, state)
        np.testing.assert_allclose(output(made), wanted, rtol=0, atol=1e-13)


def test_a_model_is_created_as_shards(x64):
    with scope(MESHES["gtp 8"]):
        model = gtp.init(lambda rngs: gtp.shard(make(rngs), min_size=64), nnx.Rngs(0, dropout=1))
        np.testing.assert_array_equal(output(model), output(sharded()))
        assert model.embed.embedding.get_value().sharding.spec == P("gtp")

        @nnx.jit
        def create():
            return sharded()

        kernel = create().blocks[0].linear.kernel.get_value()
        assert kernel.addressable_shards[0].data.size == kernel.size // 8


def test_without_the_hook_a_model_takes_forward_mode(x64):
    with scope(MESHES["gtp 8"]):
        graph, state = nnx.split(gtp.shard(nnx.jit(Few)(), "blocks.*", min_size=64))
        function = lambda state: jnp.sin(nnx.merge(graph, state)(tokens())).mean()  # noqa: E731
        ones = jax.jit(functools.partial(jax.tree.map, jnp.ones_like))(state)
        with gtp.hook.without_hook():
            _, along = jax.jit(lambda state: jax.jvp(function, (state,), (ones,)))(state)
        wanted = sum(np.sum(g) for g in jax.tree.leaves(jax.jit(jax.grad(function))(state)))
        np.testing.assert_allclose(along, wanted, rtol=1e-12)
        with pytest.raises(TypeError, match=naming("gtp_jax.hook.without_hook")):
            jax.jvp(function, (state,), (ones,))


class Scaled(nnx.Module):
    """Has a weight outside of its block."""

    def __init__(self):
        self.block, self.scale = nnx.Linear(16, 16, rngs=nnx.Rngs(0)), nnx.Param(jnp.ones((8, 16)))

    def __call__(self, x):
        return self.scale * self.block(x)


scaled = nnx.jit(Scaled)
FORWARD = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp in jit": lambda f, x: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(x),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jvp of remat": lambda f, x: jax.jvp(jax.checkpoint(f), (x,), (x,)),
    "jvp of scan": lambda f, x: jax.jvp(lambda x: lax.scan(lambda x, _: (f(x), None), x, length=2)[0], (x,), (x,)),
    "jacfwd in jit": lambda f, x: jax.jit(jax.jacfwd(f))(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "linearize in jit": lambda f, x: jax.jit(lambda x: jax.linearize(f, x)[1](x))(x),
    "linearize, then jit": lambda f, x: jax.jit(jax.linearize(f, x)[1])(x),
    "linearize, then vmap": lambda f, x: jax.vmap(jax.linearize(f, x)[1])(x[None]),
    "vmap of jvp": lambda f, x: jax.vmap(lambda v: jax.jvp(f, (x,), (v,)))(x[None]),
    "jvp of vmap": lambda f, x: jax.jvp(jax.vmap(f), (x[None],), (x[None],)),
    "grad of jvp": lambda f, x: jax.jit(jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1].sum()))(x),
}


@pytest.mark.parametrize("way", others_full(FORWARD, ["jvp in jit", "linearize", "grad of jvp"]))
def test_every_way_to_forward_mode_leads_to_the_context_without_the_hook(way):
    x = jnp.ones((8, 16))
    with scope(MESHES["gtp 8"]):
        model = gtp.shard(scaled(), "block", min_size=64)
        graph, state = nnx.split(model)
        held: Any = state["scale"]
        with pytest.raises(TypeError, match=naming("Linear `jax.linearize` reverse gtp_jax.hook.without_hook")):
            FORWARD[way](model, x)
        of_scale = lambda scale: nnx.merge(graph, nnx.State({**state, "scale": held.replace(scale)}))(x)  # noqa: E731
        with pytest.raises(TypeError, match=naming("Scaled `jax.linearize` reverse gtp_jax.hook.without_hook")):
            FORWARD[way](of_scale, held.get_raw_value())


def test_a_gradient_in_a_forward_derivative_is_not_refused_for_a_derivative_by_weights(x64):
    x = jnp.ones((8, 16))
    with scope(MESHES["gtp 8"]):
        graph, state = nnx.split(gtp.shard(scaled(), "block", min_size=64))
        along = lambda state: jax.jvp(lambda x: nnx.merge(graph, state)(x).sum(), (x,), (x,))[1]  # noqa: E731
        with pytest.raises(TypeError, match=naming("Linear gtp_jax.hook.without_hook")):
            jax.jit(jax.grad(along)).lower(state)
        transpose = lambda x: jax.linear_transpose(jax.linearize(nnx.merge(graph, state), x)[1], x)  # noqa: E731
        gradient = jax.jit(jax.grad(lambda x: nnx.merge(graph, state)(x).sum()))(x)
        np.testing.assert_allclose(jax.jit(lambda x: transpose(x)(x))(x)[0], gradient, rtol=1e-12)


@jax.custom_vjp
def doubled(x):
    return 2 * x


def doubled_bwd(_, gradient):
    return (2 * gradient,)


doubled.defvjp(lambda x: (2 * x, None), doubled_bwd)


class Doubling(nnx.Module):
    """A block that calls a user's `jax.custom_vjp` function, and may differentiate it in forward mode itself."""

    def __init__(self, differentiates):
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.differentiates = differentiates

    def __call__(self, x):
        y = self.linear(x)
        return jax.jvp(doubled, (y,), (y,))[1] if self.differentiates else doubled(y)


class Around(nnx.Module):
    def __init__(self, outside=False, differentiates=False):
        self.layers = nnx.List([Doubling(differentiates)])
        self.outside = outside

    def __call__(self, x):
        return self.layers[0](doubled(x) if self.outside else x)


around = nnx.jit(Around, static_argnames=("outside", "differentiates"))


def test_forward_mode_is_refused_because_of_a_users_custom_vjp_where_that_is_the_cause():
    x = jnp.ones((8, 16))
    with scope(MESHES["gtp 8"]):
        outside = gtp.shard(around(outside=True), "layers.*", min_size=64)
        with pytest.raises(TypeError, match=naming("Around doubled(x) __call__")):
            jax.jvp(outside, (x,), (x,))
        within = gtp.shard(around(differentiates=True), "layers.*", min_size=64)
        with pytest.raises(TypeError, match=naming("Doubling `doubled_bwd`")):
            within(x)
        both = gtp.shard(around(), "layers.*", min_size=64)
        with pytest.raises(TypeError, match=naming("`gtp_jax.hook.without_hook` doubled")):
            jax.jvp(both, (x,), (x,))


def test_without_the_hook_local_view_is_refused_because_each_rank_would_compute_with_its_shard():
    with scope(MESHES["gtp 8"]):
        made = nnx.jit(lambda: nnx.Sequential(*[nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(2)]))
        state = gtp.TrainState.create(gtp.shard(made(), nnx.Linear, min_size=64), optax.sgd(0.1))
        step = gtp.train_step(lambda model, x: (jnp.sum(model(x)), x.shape[0]), optax.sgd(0.1), view="local")
        step.lower(state, jnp.ones((8, 16)))
        refused = naming("local view", "kernel of Linear", "(2, 16)", "global `without_hook`")
        with gtp.hook.without_hook(), pytest.raises(ValueError, match=refused):
            step.lower(state, jnp.ones((8, 16)))
