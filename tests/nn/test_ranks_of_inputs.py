"""Experts on inputs of two and four dimensions, against their formula in plain JAX, and chains that add a dimension."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import naming
from placed import placed
from selection import pairwise

import gtp_jax as gtp

SHAPES = {2: (4, 8), 4: (4, 2, 3, 8)}
MESHES = {"gtp 2 x tp 2": dict(gtp=2, tp=2), "tp 2": dict(gtp=1, tp=2)}


def normed(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def moe(p, x):
    """All experts on every token, of which the two likeliest count."""
    x = normed(x) * p["scale"]
    probs = jax.nn.softmax(x @ p["router"], -1)
    best, chosen = jax.lax.top_k(probs, 2)
    share = jnp.sum(jax.nn.one_hot(chosen, 4) * (best / best.sum(-1, keepdims=True))[..., None], -2)
    gate, up = (jnp.einsum("...i,eoi->...eo", x, p["up"]["kernel"][name]) for name in ("gate", "up"))
    return jnp.einsum("...eo,eio,...e->...i", gate / (1 + jnp.exp(-gate)) * up, p["down"]["kernel"], share)


def balance(p, x):
    """What the experts add to the gradient: a term of each example's load, and the z-loss."""
    logits = normed(jnp.reshape(x, (x.shape[0], -1, x.shape[-1]))) * p["scale"] @ p["router"]
    probs = jax.nn.softmax(logits, -1)
    load = jnp.sum(jax.nn.one_hot(jax.lax.top_k(probs, 2)[1], 4), -2).mean(1)
    return jnp.sum(0.1 * 2 * load[:, None] * probs) + 0.2 * jnp.sum(jnp.log(jnp.sum(jnp.exp(logits), -1)) ** 2)


def experts(parallel, rngs):
    balanced = dict(aux_loss_coeff=0.1, routing=gtp.nn.Routing(z_loss_coeff=0.2))
    wide = dict(dtype=jnp.float64, param_dtype=jnp.float64)
    return gtp.nn.MoE(8, 6, num_experts=4, parallel=parallel, rngs=rngs, **balanced, **wide)


@pytest.mark.parametrize(("dims", "parallel", "mesh"), pairwise(SHAPES, [None, "features"], MESHES, usual=1))
def test_experts_have_the_value_and_gradient_of_their_formula(dims, parallel, mesh, x64):
    x, degrees = np.random.default_rng(0).normal(size=SHAPES[dims]), MESHES[mesh]
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: degrees["gtp"] * degrees["tp"]])):
        graph, state = nnx.split(placed(lambda rngs: experts(parallel, rngs)))

        def found(state, x):
            y = nnx.merge(graph, state)(x)
            return jnp.sum(jnp.sin(3 * y)), y

        (_, y), gradients = jax.jit(jax.value_and_grad(found, (0, 1), has_aux=True))(state, x)

    def wanted(params, x):
        y = moe(params, x)
        return jnp.sum(jnp.sin(3 * y)) + balance(params, x), y

    params = jax.tree.map(np.asarray, nnx.to_pure_dict(state))
    (_, plain), slopes = jax.jit(jax.value_and_grad(wanted, (0, 1), has_aux=True))(params, x)
    found, wanted = (y, nnx.to_pure_dict(gradients[0]), gradients[1]), (plain, *slopes)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * max(1.0, np.abs(b).max()))


class Rows(gtp.nn.Layer):
    """Maps numbers `(batch, sequence)` to vectors, of which a rank of tp makes those of its part of the sequence."""

    def __init__(self, rngs):
        super().__init__()
        self.sequence_parallel = True
        self.row = nnx.Param(jax.random.normal(rngs.params(), (8,)))

    def local(self, x):
        axis = self.roles.tensor
        tp = gtp.mesh.degree(axis)
        if tp > 1:
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * (x.shape[1] // tp), x.shape[1] // tp, 1)
        return x[..., None] * self.row.get_value()


class Modules(nnx.Module):
    def __init__(self, rngs):
        self.rows = Rows(rngs)
        self.stack = gtp.Stack(lambda rngs: gtp.MLP(8, 12, dtype=jnp.float32, rngs=rngs), 2, rngs=rngs)

    def __call__(self, x):
        return gtp.nn.run_chain(x, self.rows, self.stack)


def test_a_chain_whose_first_layer_adds_a_dimension_is_that_of_one_device():
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    found = []
    for degrees in (dict(gtp=2, tp=2), dict(dp=1)):
        with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])):
            found.append(np.asarray(jax.jit(gtp.init(Modules, nnx.Rngs(0)).__call__)(x)))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make, shape, message",
    [
        (lambda rngs: gtp.nn.MoE(8, 8, num_experts=2, rngs=rngs), (8,), "MoE (8,) 2"),
        (lambda rngs: gtp.Attention(8, num_heads=2, rngs=rngs), (8, 8), "Attention (8, 8)"),
    ],
)
def test_an_input_without_a_batch_or_a_sequence_is_refused_by_its_own_shape(make, shape, message):
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        model = gtp.nn.abstract_model(make)
        with pytest.raises(ValueError, match=naming(message)):
            jax.eval_shape(lambda x: model(x), jax.ShapeDtypeStruct(shape, jnp.float32))
