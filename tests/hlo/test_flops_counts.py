"""Operations of a step by formula, against those in a compiled program and against a published figure."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from messages import naming

from gtp_jax import hlo

SIZES = dict(matmul_params=10, tokens=8, layers=1, seq=4, heads=2, head_dim=3)


def test_matmul_part_is_what_the_compiled_gradient_executes():
    """Three square layers, with the gradient of the input: 2 + 4 operations a parameter and token."""
    tokens, size, layers = 32, 64, 3

    def loss(ws, x):
        for w in ws:
            x = jnp.sin(x @ w)
        return x.sum()

    shapes = ([jnp.zeros((size, size))] * layers, jnp.zeros((tokens, size)))
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile()
    executed = sum(e.flops for e in hlo.launch_order(str(compiled.as_text())).events)
    params = layers * size * size
    counted = hlo.step_flops(matmul_params=params, tokens=tokens, layers=1, seq=1, heads=1, head_dim=1) - 6 * tokens
    assert executed == counted == 6 * params * tokens


def test_reference_step_gives_the_published_rate():
    """16 layers of 4096, 8192 tokens a GPU: 402 ms were 508 to 509 TFLOP/s a GPU."""
    params = 16 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 32768
    flops = hlo.step_flops(matmul_params=params, tokens=8192, layers=16, seq=8192, heads=32, head_dim=128)
    assert params == pytest.approx(3.62e9, rel=2e-3)
    assert flops / 0.402 == pytest.approx(508.5e12, rel=2e-3)


def test_sizes_below_one_are_refused_by_name():
    for name in SIZES:
        with pytest.raises(ValueError, match=naming(f"`{name}` 0")):
            hlo.step_flops(**{**SIZES, name: 0})
