"""Layers on inputs of two to four dimensions, alone and in a `Stack`, against their formulas in plain JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax.nn import Routing

F64 = dict(dtype=jnp.float64, param_dtype=jnp.float64)
SHAPES = {2: (4, 8), 3: (4, 2, 8), 4: (4, 2, 3, 8)}
MESHES = {"gtp 2 x tp 2": dict(gtp=2, tp=2), "tp 2": dict(tp=2)}


def normed(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def glu(x, gate, up, down):
    gate, up = (jnp.einsum("...i,oi->...o", x, kernel) for kernel in (gate, up))
    return jnp.einsum("...i,oi->...o", gate / (1 + jnp.exp(-gate)) * up, down)


def mlp(p, x):
    up, down = p["up"], p["down"]["kernel"]
    return glu(normed(x) * up["scale"], up["kernel"]["gate"].T, up["kernel"]["up"].T, down.T)


def moe(p, x):
    """All experts on every token, of which the two likeliest count."""
    x = normed(x) * p["scale"]
    probs = jax.nn.softmax(x @ p["router"], -1)
    best, chosen = jax.lax.top_k(probs, 2)
    share = jnp.sum(jax.nn.one_hot(chosen, 4) * (best / best.sum(-1, keepdims=True))[..., None], -2)
    up = p["up"]["kernel"]
    experts = zip(up["gate"], up["up"], p["down"]["kernel"], strict=True)
    return sum(share[..., e, None] * glu(x, *kernels) for e, kernels in enumerate(experts))


def balance(p, x):
    """The MoE's terms: of each example's load, and the z-loss."""
    logits = normed(jnp.reshape(x, (x.shape[0], -1, x.shape[-1]))) * p["scale"] @ p["router"]
    probs = jax.nn.softmax(logits, -1)
    load = jnp.sum(jax.nn.one_hot(jax.lax.top_k(probs, 2)[1], 4), -2).mean(1)
    return jnp.sum(0.1 * 2 * load[:, None] * probs) + 0.2 * jnp.sum(jnp.log(jnp.sum(jnp.exp(logits), -1)) ** 2)


def dense(p, x):
    return x @ p["kernel"]


experts = functools.partial(gtp.MoE, 8, 6, num_experts=4, aux_loss_coeff=0.1, routing=Routing(z_loss_coeff=0.2), **F64)
MODULES = {  # how it is made, its formula, and what it adds to the gradient
    "whole": (functools.partial(gtp.Dense, 8, 8, **F64), dense, None),
    "column": (functools.partial(gtp.Dense, 8, 8, parallel="column", **F64), dense, None),
    "row": (functools.partial(gtp.Dense, 8, 8, parallel="row", **F64), dense, None),
    "uneven row": (
        functools.partial(gtp.Dense, 8, 8, parallel="row", units=8, sequence_parallel=False, **F64),
        dense,
        None,
    ),
    "mlp": (functools.partial(gtp.MLP, 8, 12, **F64), mlp, None),
    "mlp of whole sequences": (functools.partial(gtp.MLP, 8, 12, sequence_parallel=False, **F64), mlp, None),
    "experts": (experts, moe, balance),
    "experts of tokens": (functools.partial(experts, parallel=None), moe, balance),
}


def values(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    "name, mesh",
    others_full(
        [(name, mesh) for name in MODULES for mesh in MESHES],
        [("uneven row", "tp 2")],
    ),
)
def test_layers_alone_and_stacked_have_the_value_and_gradient_of_their_formula(name, mesh, x64):
    make, formula, term = MODULES[name]
    rng = np.random.default_rng(0)
    # experts take long to compile, and their `Stack` is that of any other layer
    dims, length = (SHAPES, 2) if term is None else ((2, 4), 0)
    inputs = {ndim: rng.normal(size=SHAPES[ndim]) for ndim in dims}
    degrees = MESHES[mesh]
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])):
        model = gtp.init(
            lambda rngs: nnx.Dict(
                alone=make(rngs=rngs),
                **{"stack": gtp.Stack(lambda rngs: make(rngs=rngs), length, rngs=rngs)} if length else {},
            ),
            nnx.Rngs(0),
        )
        graph, state = nnx.split(model)

        def found(state, inputs):
            model = nnx.merge(graph, state)
            outputs = {ndim: [module(x) for _, module in model.items()] for ndim, x in inputs.items()}
            return sum(jnp.sum(jnp.sin(3 * y)) for y in jax.tree.leaves(outputs)), outputs

        (_, outputs), (of_state, of_inputs) = jax.jit(jax.value_and_grad(found, (0, 1), has_aux=True))(state, inputs)
        of_params = nnx.to_pure_dict(of_state)

    def wanted(params, inputs):
        total, outputs = 0.0, {}
        for ndim, x in inputs.items():
            total += 0 if term is None else term(params["alone"], x)
            outputs[ndim] = [formula(params["alone"], x)]
            y = x
            for i in range(length):
                y = formula(jax.tree.map(lambda a, i=i: a[i], params["stack"]["layers"]), y)
            outputs[ndim] += [y] if length else []
        return total + sum(jnp.sum(jnp.sin(3 * y)) for y in jax.tree.leaves(outputs)), outputs

    params = jax.tree.map(np.asarray, values(model))
    (_, plain), gradients = jax.jit(jax.value_and_grad(wanted, (0, 1), has_aux=True))(params, inputs)
    for a, b in zip(jax.tree.leaves((outputs, of_inputs)), jax.tree.leaves((plain, gradients[1])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * max(1.0, np.abs(b).max()))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-11 * max(1.0, np.abs(b).max())),
        of_params,
        gradients[0],
    )


@pytest.mark.full
@pytest.mark.parametrize("norm", others_full(["rms", "layer", None], ["rms"]))
def test_embeddings_and_heads_take_one_token_or_sequences(norm, x64):
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=2, devices=jax.devices()[:4])):
        embed = gtp.init(lambda rngs: gtp.Embed(13, 7, **F64, rngs=rngs), nnx.Rngs(0))
        head = gtp.TiedHead(embed, norm=norm, param_dtype=jnp.float64, rngs=nnx.Rngs(0))
        graph, state = nnx.split(nnx.Dict(embed=embed, head=head))

        def loss(state, tokens, chained):
            model = nnx.merge(graph, state)
            if chained:
                logits = [gtp.run_chain(ids, model["embed"], model["head"]) for ids in tokens]
            else:
                logits = [model["head"](model["embed"](ids)) for ids in tokens]
            return sum(jnp.sum(jnp.sin(30 * y)) for y in logits), logits

        tokens = [np.random.default_rng(0).integers(0, 13, shape) for shape in ((4,), (4, 2), (4, 2, 3))]
        run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=2)
        results = [run(state, tokens, chained) for chained in (False, True)]
    table = np.asarray(embed.table.get_value())

    def wanted(table):
        rows = [table[ids] for ids in tokens]
        rows = [x - x.mean(-1, keepdims=True) for x in rows] if norm == "layer" else rows
        logits = [(normed(x) if norm else x) @ table.T for x in rows]
        return sum(jnp.sum(jnp.sin(30 * y)) for y in logits), logits

    (_, plain), slope = jax.jit(jax.value_and_grad(wanted, has_aux=True))(table)
    for (_, logits), gradients in results:
        for a, b in zip(logits, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
        np.testing.assert_allclose(gradients["embed"]["table"].get_value(), slope, rtol=0, atol=1e-11)


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
        return gtp.run_chain(x, self.rows, self.stack)


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
        (lambda rngs: gtp.Dense(8, 8, rngs=rngs), (8,), "Dense (8,) 2 batch"),
        (lambda rngs: gtp.MoE(8, 8, num_experts=2, rngs=rngs), (8,), "MoE (8,) 2"),
        (lambda rngs: gtp.Attention(8, num_heads=2, rngs=rngs), (8, 8), "Attention (8, 8)"),
    ],
)
def test_an_input_without_a_batch_or_a_sequence_is_refused_by_its_own_shape(make, shape, message):
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        model = gtp.nn.abstract_model(make)
        with pytest.raises(ValueError, match=naming(message)):
            jax.eval_shape(lambda x: model(x), jax.ShapeDtypeStruct(shape, jnp.float32))
