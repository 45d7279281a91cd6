"""Experts that ranks divide, on GPUs: a layer alone gives the same bits whenever it runs, however tokens travel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gtp_jax as gtp

RUNS = 4
LAYER = dict(num_experts=32, top_k=8, parallel=None, dtype="bfloat16", param_dtype="float32")
FEATURES, HIDDEN, SEQUENCE = 2048, 768, 4096


def gradients(transport, round_size):
    """Returns a function that computes a layer's loss and gradients on two ranks, and its arguments."""
    make = lambda rngs: gtp.nn.MoE(FEATURES, HIDDEN, rngs=rngs, transport=transport, round_size=round_size, **LAYER)  # noqa: E731
    graph, state = nnx.split(gtp.init(make, nnx.Rngs(0)))
    x, g = (jax.random.normal(jax.random.key(i), (2, SEQUENCE, FEATURES), jnp.bfloat16) for i in (1, 2))
    loss = lambda state, x: jnp.sum((nnx.merge(graph, state)(x) * g).astype(jnp.float32))  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))), (state, x)


@pytest.mark.gpu
@pytest.mark.parametrize("round_size", [1.25, 0.5], ids=["one round", "rounds"])
def test_every_transport_gives_the_same_bits_each_time(round_size):
    if jax.device_count() < 2:
        pytest.skip("needs two GPUs")
    first = {}
    for transport in ("gather", "padded", "ragged"):
        with jax.set_mesh(gtp.make_mesh(ep=2, devices=jax.devices()[:2])):
            run, given = gradients(transport, round_size)
            found = [[np.asarray(a) for a in jax.tree.leaves(run(*given))] for _ in range(RUNS)]
        for other in found[1:]:
            for a, b in zip(found[0], other, strict=True):
                np.testing.assert_array_equal(a, b, err_msg=transport)
        first[transport] = found[0]
    for transport in ("padded", "ragged"):
        for a, b in zip(first["gather"], first[transport], strict=True):
            a, b = np.float64(a), np.float64(b)
            assert np.linalg.norm(a - b) <= 4e-3 * np.linalg.norm(a), transport
