"""The term that balances experts counts once, in a step's `shard_map` and on global arrays alike."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import others_slow

import gtp_jax as gtp


def gradients(degrees, parallel, roles=None, reduction="sum"):
    mesh = gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))]) if degrees else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext(), gtp.use_roles(roles or gtp.Roles()):
        make = lambda rngs: gtp.MoE(  # noqa: E731
            8,
            12,
            num_experts=4,
            parallel=parallel,
            aux_loss_coeff=0.5,
            loss_reduction=reduction,
            rngs=rngs,
            dtype="float64",
            param_dtype="float64",
        )
        graph, state = nnx.split(gtp.init(make, nnx.Rngs(0)))
        x = np.random.default_rng(0).normal(size=(4, 6, 8))
        reduce = {"sum": lambda y: jnp.sum(y) / 8, "mean": lambda y: jnp.mean(y)}[
            reduction
        ]  # over tokens of 8 features
        loss = lambda state, x: reduce(jnp.sin(nnx.merge(graph, state)(x)))  # noqa: E731
        found = jax.jit(jax.grad(loss))(state, jnp.asarray(x))
        return {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(found)}


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["features", "expert", None])
def test_gradients_under_plain_jit_are_those_without_a_mesh(parallel, x64):
    expected = gradients(None, parallel)
    for degrees, roles in ((dict(tp=2), None), (dict(gtp=2), gtp.Roles(batch=("dp",)))):
        found = gradients(degrees, parallel, roles)
        for path, value in expected.items():
            np.testing.assert_allclose(found[path], value, rtol=0, atol=1e-12 * np.abs(value).max(), err_msg=str(path))


@pytest.mark.parametrize("degrees", others_slow([None, dict(dp=2, tp=2), dict(gtp=4)], [dict(dp=2, tp=2)]), ids=str)
@pytest.mark.parametrize("parallel", ["features", pytest.param(None, marks=pytest.mark.slow)])
def test_gradients_of_a_mean_are_those_of_the_sum_a_token(degrees, parallel, x64):
    of_sum, of_mean = (gradients(degrees, parallel, reduction=reduction) for reduction in ("sum", "mean"))
    for path, value in of_sum.items():
        np.testing.assert_allclose(of_mean[path] * 24, value, rtol=1e-11, atol=1e-12, err_msg=str(path))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_step_refuses_another_kind_of_loss_than_the_experts_were_built_for(reduction):
    model = gtp.init(
        lambda rngs: nnx.Dict(experts=gtp.MoE(8, 12, num_experts=4, loss_reduction=reduction, rngs=rngs)), nnx.Rngs(0)
    )
    state = gtp.TrainState.create(model, optax.sgd(0.1))
    losses = {
        "mean": lambda model, x: jnp.mean(model["experts"](x)),
        "sum": lambda model, x: (jnp.sum(model["experts"](x)), 24),
    }
    x = jnp.ones((4, 6, 8))
    other = "mean" if reduction == "sum" else "sum"
    with pytest.raises(
        ValueError, match=f"the MoE at experts .* as if it were a {reduction}.*loss_reduction='{other}'"
    ):
        gtp.train_step(losses[other], optax.sgd(0.1))(state, x)
    gtp.train_step(losses[reduction], optax.sgd(0.1))(state, x)
