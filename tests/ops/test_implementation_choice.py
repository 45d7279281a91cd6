"""Every operation with a choice of implementation takes the same argument and refuses in the same words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import gtp_jax as gtp
from gtp_jax.formats import MXFP8, Operands
from gtp_jax.ops import attention, grouped_matmul, grouped_quantized, linear_blocks

X = jnp.ones((2, 8, 4, 16), jnp.bfloat16)
ROWS, KERNELS, SIZES = jnp.ones((32, 32), jnp.bfloat16), jnp.ones((1, 2, 32, 32), jnp.bfloat16), jnp.array([20, 12])
OPERANDS = Operands(weight=MXFP8, activation=MXFP8, gradient=MXFP8)
KEY = jnp.zeros(2, jnp.uint32)

CALLS = {
    "quantize": lambda how: gtp.quantize(ROWS, MXFP8, implementation=how).codes,
    "multi_amax": lambda how: gtp.multi_amax([ROWS], implementation=how),
    "attention": lambda how: attention(X, X, X, implementation=how),
    "grouped_matmul": lambda how: grouped_matmul(ROWS, KERNELS, SIZES, implementation=how),
    "linear_blocks": lambda how: linear_blocks(ROWS, KERNELS[0, 0], KEY, OPERANDS, implementation=how),
    "grouped_quantized": lambda how: grouped_quantized(ROWS, KERNELS, SIZES, KEY, OPERANDS, implementation=how),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("operation", CALLS)
def test_another_word_is_refused(operation):
    with pytest.raises(ValueError, match="`implementation` is 'triton'; it must be 'reference', 'native' or None"):
        CALLS[operation]("triton")


@pytest.mark.parametrize("operation", ["attention", "grouped_matmul", "grouped_quantized", "linear_blocks"])
def test_native_is_refused_where_there_is_no_kernel_and_the_best_at_hand_is_then_the_reference(operation):
    if jax.default_backend() != "cpu":
        pytest.skip("GPUs have these kernels")
    with pytest.raises(NotImplementedError, match=f"there is no native '{operation}' for 'cpu' here: .*GPUs"):
        CALLS[operation]("native")
    assert (CALLS[operation](None) == CALLS[operation]("reference")).all()
