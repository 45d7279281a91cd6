"""`gtp_jax.Param` is the logical array wherever it is gathered, with gradients reduce-scattered to its shards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.hlo import collectives
from gtp_jax.nn import abstract_model

from .arrays import MESHES, assert_close, mesh_in_scope

normal = nnx.initializers.normal(1.0)


class Tensors(nnx.Module):
    """Weights of every rank up to 4, of sizes that degrees divide and that they do not."""

    def __init__(self, rngs, tensor_dim=None):
        def make(*shape, **options):
            return gtp.Param(normal(rngs.params(), shape, jnp.float64), **options)

        self.four = make(3, 8, 5, 16, tensor_dim=tensor_dim)
        self.one, self.none, self.odd = make(48), make(), make(8, 5, 7)

    def __call__(self, x):
        y = jnp.einsum("bi,jikl->bl", x, self.four.gather()) + self.one.gather()[:16] * self.none.gather()
        return jnp.tanh(y[:, :8] + jnp.einsum("bi,ijk->b", x, self.odd.gather())[:, None])


class Stacked(nnx.Module):
    def __init__(self, rngs, tensor_dim=None):
        self.stack = gtp.Stack(lambda rngs: Tensors(rngs, tensor_dim), 2, rngs=rngs)

    def __call__(self, x):
        return self.stack(x)


@functools.cache
def measured(mesh, kind, tensor_dim):
    with mesh_in_scope(mesh):
        graph, state = nnx.split(gtp.init(lambda rngs: kind(rngs, tensor_dim), nnx.Rngs(0)))
        x = jax.random.normal(jax.random.key(1), (24, 8), jnp.float64)

        def loss(state, x):
            return jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))

        return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss, (0, 1)))(state, x))


# tp divides dimension 1 of 8 on some meshes, 2 of 5 on none
@pytest.mark.parametrize("mesh, kind, tensor_dim", pairwise(MESHES, [Stacked, Tensors], [None, 1, -2], usual=1))
def test_value_and_gradients_are_those_without_a_mesh(mesh, kind, tensor_dim, x64):
    assert_close(measured(mesh, kind, tensor_dim), measured(None, kind, None))


@pytest.mark.parametrize("mesh", others_full(["gtp 8", "gtp 4 x tp 2", "tp 3"], ["gtp 4 x tp 2"]))
def test_in_local_view_gradients_of_shards_are_those_of_the_array(mesh, x64):
    def loss(model, x):
        return jnp.sum(jnp.sin(model(x))), x.shape[0]

    def trained(view):
        state = gtp.TrainState.create(gtp.init(Tensors, nnx.Rngs(0)), optax.sgd(0.1))
        x = jax.random.normal(jax.random.key(1), (24, 8), jnp.float64)
        return jax.tree.map(np.asarray, jax.jit(lambda s: gtp.train.loss_and_gradients(loss, s, x, view=view))(state))

    with mesh_in_scope(mesh):
        found = trained("local")
    assert_close(found, trained("global"))


def test_in_local_view_a_rank_gathers_its_part_along_the_tensor_dimension(x64):
    value = jnp.arange(8.0 * 5 * 4).reshape(8, 5, 4)
    with mesh_in_scope("gtp 4 x tp 2"):
        param = gtp.Param(value, tensor_dim=1)  # 5 over 2: parts of 3 and 2, padded to 3
        assert param.get_metadata()["array"].spec == P(("tp", "gtp"), None, None)
        local = jax.shard_map(
            lambda v: param.replace(v).gather(),
            in_specs=P(("tp", "gtp")),
            out_specs=P(None, "tp"),
            check_vma=False,
        )
        parts = jax.jit(local)(value)
    np.testing.assert_array_equal(parts[:, :5], value)
    np.testing.assert_array_equal(parts[:, 5:], 0)


class Holder(nnx.Module):
    def __init__(self, value, **options):
        self.w = gtp.Param(value, **options)

    def __call__(self, x):
        return x + jnp.sum(self.w.gather() ** 2)


def test_a_size_that_no_degree_divides_stays_whole_with_a_warning_where_nothing_pads_it():
    with mesh_in_scope("gtp 8"), gtp.layout.even_shares(False):
        with pytest.warns(UserWarning, match=naming("(7, 5) whole gtp 8")):
            gtp.Param(jnp.ones((7, 5)))


@pytest.mark.parametrize("mesh", others_full(["gtp 4 x tp 2", None], ["gtp 4 x tp 2"]))
def test_reading_it_is_the_logical_array_everywhere(mesh, x64):
    class Plain(nnx.Module):
        def __init__(self, make, rngs):
            self.w = make(normal(rngs.params(), (16, 8), jnp.float64))

        def __call__(self, x):
            return x + self.w[3] + (2 * self.w)[-1] + jnp.sum(self.w[...], 0) + self.w.shape[0]

    def measured(make, stacked):
        factory = lambda rngs: Plain(make, rngs)  # noqa: E731
        model = gtp.init((lambda rngs: gtp.Stack(factory, 2, rngs=rngs)) if stacked else factory, nnx.Rngs(0))
        graph, state = nnx.split(model)
        return jax.jit(jax.value_and_grad(lambda s: jnp.sum(jnp.sin(nnx.merge(graph, s)(jnp.ones((8, 8)))))))(state)

    for stacked in (False, True):
        with mesh_in_scope(mesh):
            found = measured(gtp.Param, stacked)
        assert_close(found, measured(nnx.Param, stacked))


@pytest.mark.parametrize("grad_reduce, view", pairwise(["float32", "bf16-wire"], ["a stack", "local"]))
def test_the_gradient_is_reduced_as_its_name_says(grad_reduce, view):
    kind, dtype = {"float32": ("reduce-scatter", "f32"), "bf16-wire": ("all-to-all", "u16")}[grad_reduce]
    options = dict(dtype=jnp.bfloat16, grad_reduce=grad_reduce)
    factory = lambda rngs: Holder(normal(rngs.params(), (16, 8, 32)), **options)  # noqa: E731
    make = factory if view == "local" else lambda rngs: gtp.Stack(factory, 2, rngs=rngs)
    loss = lambda model, x: (jnp.sum(model(x)), x.shape[0])  # noqa: E731
    with mesh_in_scope("gtp 8"):
        state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optax.sgd(0.1))
        step = gtp.train_step(loss, optax.sgd(0.1), view="local" if view == "local" else "global")
        program = step.lower(state, jnp.ones((8, 4))).compile().as_text()
    found = [one for one in collectives(program) if one.kind == kind]
    assert {one.dtype for one in found} == {dtype} and sum(one.times for one in found) == (1 if view == "local" else 2)


def test_recipes_leave_it_in_high_precision_and_explain_says_so():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up = gtp.Dense(128, 256, dtype=jnp.float32, rngs=rngs)
            self.w = gtp.Param(normal(rngs.params(), (256, 128)), dtype=jnp.float32)

        def __call__(self, x):
            return x + self.up(x) @ self.w.gather()

    loss = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
    x = jax.random.normal(jax.random.key(0), (8, 16, 128))
    with mesh_in_scope("gtp 4 x tp 2"):
        make = lambda rngs: gtp.Stack(Model, 2, rngs=rngs)  # noqa: E731
        state = gtp.TrainState.create(gtp.init(make, nnx.Rngs(0)), optax.sgd(0.1))
        losses = {}
        for recipe in (None, gtp.NVFP4()):
            step = gtp.train_step(loss, optax.sgd(0.1), recipe=recipe)
            losses[recipe] = float(step(jax.tree.map(jnp.copy, state), x)[1]["loss"])
        with gtp.use_recipe(gtp.NVFP4()):
            in_scope = float(gtp.eval_step(loss)(state, x)["loss"])
        assert losses[None] != losses[gtp.NVFP4()] == pytest.approx(in_scope, rel=1e-6)
        explained = gtp.explain(abstract_model(make), gtp.NVFP4())
        wires = {fact.module.split(".")[-1]: (fact.wire, fact.shapes, fact.matmul) for fact in explained.facts}
        assert wires["up"][0] == "NVFP4"
        assert wires["w"] == ("float32", ((256, 128),), "float32, as no recipe quantizes arrays of any shape")


@pytest.mark.parametrize(
    ("value", "options", "error", "message"),
    [
        (np.ones((4, 4)), dict(tensor_dim=2), ValueError, "`tensor_dim` (4, 4) 2"),
        (np.ones((4, 0)), {}, ValueError, "(4, 0) 1"),
        ([[1.0, 2.0]], {}, TypeError, "`value` list floating-point"),
        (np.arange(3), {}, TypeError, "`value` int64 floating-point"),
        (np.ones((4, 4)), dict(out_sharding=("tp", None)), ValueError, "`out_sharding` `tensor_dim` `nnx.Param`"),
        (np.ones((4, 4)), dict(grad_reduce="half"), ValueError, "`grad_reduce` 'half' 'float32'"),
    ],
)
def test_a_bad_argument_is_named(value, options, error, message):
    with pytest.raises(error, match=naming(message)):
        gtp.Param(value, **options)


def test_a_weight_is_not_gathered_from_another_array_or_mesh_than_its_own():
    stack = gtp.Stack(lambda rngs: Holder(np.ones((4, 4), np.float32)), 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=naming("(4, 4) (3, 4, 4) layers")):
        stack.layers.w.gather()
    param = gtp.Param(np.ones((8, 4), np.float32))
    param.set_value(jnp.ones(3))
    with pytest.raises(ValueError, match=naming("(8, 4) Param (3,)")):
        param.gather()
    with mesh_in_scope("gtp 8"):
        param = gtp.Param(np.ones((16, 16), np.float32))
    with mesh_in_scope("gtp 3"), pytest.raises(ValueError, match=naming("(16, 16) Param gtp 8 3")):
        param.gather()
