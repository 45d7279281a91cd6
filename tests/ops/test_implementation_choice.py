"""Every operation with a choice of implementation takes the same argument and refuses in the same words."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax.formats import MXFP8, Operands
from gtp_jax.ops import attention, grouped_matmul, grouped_quantized, linear_blocks, reference

X = jnp.ones((2, 8, 4, 16), jnp.bfloat16)
ROWS, KERNELS, SIZES = jnp.ones((32, 32), jnp.bfloat16), jnp.ones((1, 2, 32, 32), jnp.bfloat16), jnp.array([20, 12])
OPERANDS = Operands(weight=MXFP8, activation=MXFP8, gradient=MXFP8)
KEY = jnp.zeros(2, jnp.uint32)

CALLS = {
    "quantize": lambda how: gtp.ops.quantize(ROWS, MXFP8, implementation=how).codes,
    "multi_amax": lambda how: gtp.ops.multi_amax([ROWS], implementation=how),
    "attention": lambda how: attention(X, X, X, implementation=how),
    "grouped_matmul": lambda how: grouped_matmul(ROWS, KERNELS, SIZES, implementation=how),
    "linear_blocks": lambda how: linear_blocks(ROWS, KERNELS[0, 0], KEY, OPERANDS, implementation=how),
    "grouped_quantized": lambda how: grouped_quantized(ROWS, KERNELS, SIZES, KEY, OPERANDS, implementation=how),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("operation", others_full(CALLS, ["quantize", "attention", "linear_blocks"]))
def test_another_word_is_refused(operation):
    with pytest.raises(ValueError, match=naming("`implementation` 'triton' 'reference' 'native' None")):
        CALLS[operation]("triton")


@pytest.mark.parametrize("operation", ["attention", "grouped_matmul", "grouped_quantized", "linear_blocks"])
def test_native_is_refused_where_there_is_no_kernel_and_the_best_at_hand_is_then_the_reference(operation):
    if jax.default_backend() != "cpu":
        pytest.skip("GPUs have these kernels")
    with pytest.raises(NotImplementedError, match=naming(f"'{operation}' 'cpu' GPUs")):
        CALLS[operation]("native")
    run = jax.jit(CALLS[operation], static_argnums=0)
    assert (run(None) == run("reference")).all()


def test_the_reference_is_traced_only_for_a_platform_without_kernels(monkeypatch):
    traced = []

    def counted(*operands, **attributes):
        traced.append(attributes["format"])
        return quantize(*operands, **attributes)

    quantize = reference.quantize
    monkeypatch.setattr(reference, "quantize", counted)
    x = jnp.ones((48, 96))  # which no other test takes, so that JAX has traced nothing of it
    found = jax.jit(lambda x: gtp.ops.quantize(x, MXFP8).codes).trace(x)
    here = found.lower(lowering_platforms=("cpu",)).as_text()
    assert "gtp_quantize" in here and not traced
    there = found.lower(lowering_platforms=("tpu",)).as_text()
    assert "custom_call" not in there and traced == [MXFP8]


def test_where_replication_is_checked_kernels_are_refused_and_the_reference_is_right():
    """JAX takes a kernel's results for equal on all ranks: gradients and outputs would be wrong."""
    x = jax.random.normal(jax.random.key(0), (8, 32, 64))
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))

    def on_ranks(implementation, out, **options):
        codes = lambda x: gtp.ops.quantize(x, MXFP8, implementation=implementation).codes  # noqa: E731
        return jax.jit(jax.shard_map(codes, mesh=mesh, in_specs=P("a"), out_specs=out, **options))(x)

    for implementation in (None, "native"):
        with pytest.raises(ValueError, match=naming("quantize `jax.shard_map` 'a' check_vma=False")):
            on_ranks(implementation, P("a"), check_vma=True)
    with pytest.raises(ValueError, match="out_specs"):
        on_ranks("reference", P(), check_vma=True)
    wanted = gtp.ops.quantize(x, MXFP8).codes
    assert (on_ranks("reference", P("a"), check_vma=True) == wanted).all()
    assert (on_ranks(None, P("a"), check_vma=False) == wanted).all()
