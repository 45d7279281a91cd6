"""The term that balances experts counts once, in a step's `shard_map` and on global arrays alike."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gtp_jax as gtp


def gradients(degrees, parallel, roles=None):
    mesh = gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))]) if degrees else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext(), gtp.use_roles(roles or gtp.Roles()):
        make = lambda rngs: gtp.MoE(  # noqa: E731
            8,
            12,
            num_experts=4,
            parallel=parallel,
            aux_loss_coeff=0.5,
            rngs=rngs,
            dtype="float64",
            param_dtype="float64",
        )
        graph, state = nnx.split(gtp.init(make, nnx.Rngs(0)))
        x = np.random.default_rng(0).normal(size=(4, 6, 8))
        loss = lambda state, x: jnp.sum(jnp.sin(nnx.merge(graph, state)(x)))  # noqa: E731
        found = jax.jit(jax.grad(loss))(state, jnp.asarray(x))
        return {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(found)}


@pytest.mark.parametrize("parallel", ["features", "expert", None])
def test_gradients_under_plain_jit_are_those_without_a_mesh(parallel, x64):
    expected = gradients(None, parallel)
    for degrees, roles in ((dict(tp=2), None), (dict(gtp=2), gtp.Roles(batch=("dp",)))):
        found = gradients(degrees, parallel, roles)
        for path, value in expected.items():
            np.testing.assert_allclose(found[path], value, rtol=0, atol=1e-12 * np.abs(value).max(), err_msg=str(path))
