"""The term that balances experts counts once, in a step's `shard_map` and on global arrays alike."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from selection import pairwise

import gtp_jax as gtp
from gtp_jax.nn import Routing


def gradients(degrees, parallel, roles=None):
    mesh = gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))]) if degrees else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext(), gtp.mesh.use_roles(roles or gtp.mesh.Roles()):
        options = dict(num_experts=4, parallel=parallel, aux_loss_coeff=0.5, loss_reduction="sum")
        dtypes = dict(dtype="float64", param_dtype="float64")
        graph, state = nnx.split(gtp.init(lambda rngs: gtp.nn.MoE(8, 12, **options, **dtypes, rngs=rngs), nnx.Rngs(0)))
        x = np.random.default_rng(0).normal(size=(4, 6, 8))
        loss = lambda state, x: jnp.sum(jnp.sin(nnx.merge(graph, state)(x))) / 8  # noqa: E731  tokens of 8 features
        found = jax.jit(jax.grad(loss))(state, x)
        return {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(found)}


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["features", "expert", None])
def test_gradients_under_plain_jit_are_those_without_a_mesh(parallel, x64):
    expected = gradients(None, parallel)
    for degrees, roles in ((dict(tp=2), None), (dict(gtp=2), gtp.mesh.Roles(batch=("dp",)))):
        found = gradients(degrees, parallel, roles)
        for path, value in expected.items():
            np.testing.assert_allclose(found[path], value, rtol=0, atol=1e-12 * np.abs(value).max(), err_msg=str(path))


INPUT = np.random.default_rng(0).normal(size=(4, 6, 8))
LOSSES = {
    "mean": lambda model, x: jnp.mean(jnp.sin(model["experts"](x))),
    "sum": lambda model, x: (jnp.sum(jnp.sin(model["experts"](x))) / 8, 24),  # of 24 tokens of 8 features
}
TERMS = {
    "aux_loss_coeff": dict(aux_loss_coeff=0.5),
    "routing.z_loss_coeff": dict(aux_loss_coeff=0, routing=Routing(z_loss_coeff=0.5)),
    "none": dict(aux_loss_coeff=0),
}


def term_by_formula(router, x, term):
    """The mean of one term over all tokens, in plain JAX."""
    logits = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) @ router
    if term == "routing.z_loss_coeff":
        return 0.5 * jnp.mean(jnp.log(jnp.sum(jnp.exp(logits), -1)) ** 2)
    probs = jax.nn.softmax(logits, -1)
    taken = jnp.sum(jax.nn.one_hot(jax.lax.top_k(probs, 2)[1], 4), -2)
    return 0.5 * 4 / 2 * jnp.mean(jnp.sum(taken.mean(1) * probs.mean(1), -1))  # of each sequence


def step_state(reduction, term):
    make = functools.partial(gtp.nn.MoE, 8, 12, num_experts=4, dtype="float64", param_dtype="float64")
    experts = lambda rngs: make(loss_reduction=reduction, rngs=rngs, **TERMS[term])  # noqa: E731
    return gtp.TrainState.create(gtp.init(lambda rngs: nnx.Dict(experts=experts(rngs)), nnx.Rngs(0)), optax.sgd(0.1))


@functools.cache
def router_and_gradient(reduction, term):
    state = step_state(reduction, term)
    found = jax.jit(lambda state: gtp.train.loss_and_gradients(LOSSES[reduction], state, INPUT)[1])(state)
    return state.params["experts"]["router"], found["experts"]["router"]


@pytest.mark.parametrize(
    "reduction, term", pairwise(["mean", "sum"], ["aux_loss_coeff", "routing.z_loss_coeff"], usual=1)
)
def test_a_step_adds_the_mean_of_each_term_over_tokens_and_refuses_a_loss_of_the_other_kind(reduction, term, x64):
    (router, found), (_, without) = (router_and_gradient(reduction, name) for name in (term, "none"))
    wanted = jax.jit(jax.grad(term_by_formula), static_argnums=2)(router, INPUT, term)
    np.testing.assert_allclose(found - without, wanted, rtol=1e-9, atol=1e-12)
    other = "mean" if reduction == "sum" else "sum"
    refused = lambda state: gtp.train.loss_and_gradients(LOSSES[other], state, INPUT)  # noqa: E731
    with pytest.raises(ValueError, match=naming("experts", reduction, f"='{other}'`", f"`{term}` of 0")):
        jax.eval_shape(refused, step_state(reduction, term))
    jax.eval_shape(refused, step_state(reduction, "none"))  # nothing is added


OF_EXAMPLES = {
    "a number": lambda x: x.shape[0],
    "a mask of examples": lambda x: jnp.sum(x[:, 0, 0] > 0),
    "of one": lambda x: 1.0,
    "examples with a token": lambda x: jnp.sum(jnp.any(x[..., 0] > 0, axis=-1)),
    "targets of examples": lambda x: gtp.cross_entropy(x[:, 0], jnp.int32(x[:, 0, 0] > 0))[1],
}
OF_TOKENS = {
    "a number": lambda x: x.shape[0] * x.shape[1],
    "a mask of tokens": lambda x: jnp.sum(x[..., 0] > 0),
    "numbers of tokens": lambda x: jnp.sum(jnp.argmax(x, -1)[:, 0]),
    "all tokens but the first": lambda x: gtp.cross_entropy(x[:, 1:], jnp.int32(x[:, 1:, 0] > 0))[1],
    "declared": lambda x: gtp.train.as_count(jnp.float64(x.shape[0])),
}


@pytest.mark.full
@pytest.mark.parametrize("view, microbatches", pairwise(["global", "local"], [1, 2]))
def test_terms_are_not_divided_by_a_number_of_examples(view, microbatches, x64):
    def traced(count, term="aux_loss_coeff"):
        loss = lambda model, x: (jnp.sum(model["experts"](x)), count(x))  # noqa: E731
        call = functools.partial(gtp.train.loss_and_gradients, loss, view=view, microbatches=microbatches)
        jax.eval_shape(call, step_state("sum", term), INPUT)

    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        for count in OF_EXAMPLES.values():
            with pytest.raises(ValueError, match=naming("count example 6 tokens `loss_reduction='mean'` as_count")):
                traced(count)
        for count in OF_TOKENS.values():
            traced(count)
        traced(OF_EXAMPLES["a number"], "none")  # nothing is added
