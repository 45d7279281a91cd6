"""Attention in FP8: forward is that of rounded operands, backward that of attention at the rounded operands."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as of_jax  # noqa: TID251
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full, pairwise

from gtp_jax.ops import attention, attention_fp8
from gtp_jax.ops._attention import _cudnn_calls

from ..hlo.programs import array, h200_mesh, needs_target
from .test_packed_attention import calls

E4M3 = ml_dtypes.float8_e4m3fn


def operands(queries=16, keys=None, heads=4, kv_heads=2, head_dim=32, dtype=jnp.float32):
    shapes = [(2, queries, heads, head_dim), *[(2, keys or queries, kv_heads, head_dim)] * 2]
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def codes_and_scale(x):
    """The codes of an array in E4M3, and the factor by which they become values: a power of two."""
    x = np.asarray(x, np.float32)
    scale = 2.0 ** np.floor(np.log2(448 / np.abs(x).max()))
    return (x * np.float32(scale)).astype(E4M3).astype(np.float64), 1 / scale


def oracle(q, k, v, causal, scale):
    """The output, in float64 from the rounded operands on, and the unit of its codes."""
    (q, of_q), (k, of_k), (v, of_v) = map(codes_and_scale, (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bshd->bhqs", q * of_q, k * of_k) * scale
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    rounded = (weights * 256).astype(np.float32).astype(E4M3).astype(np.float64) / 256
    mixed = np.einsum("bhqs,bshd->bqhd", rounded / weights.sum(-1, keepdims=True), v)
    return np.clip(mixed, -448, 448).astype(np.float32).astype(E4M3).astype(np.float64) * of_v, of_v


@pytest.mark.parametrize("causal, keys, scale", others_full([(True, 16, None), (False, 24, 0.3)], [(True, 16, None)]))
def test_forward_is_that_of_rounded_operands_weights_and_outputs(causal, keys, scale):
    q, k, v = operands(keys=keys)
    found = np.asarray(jax.jit(functools.partial(attention_fp8, causal=causal, scale=scale))(q, k, v), np.float64)
    wanted, unit = oracle(q, k, v, causal, 32**-0.5 if scale is None else scale)
    # a sum in another order may round to the neighbouring code
    wrong = np.abs(found - wanted) > 1e-6 * np.abs(wanted)
    assert wrong.mean() < 2e-3
    np.testing.assert_allclose(found, wanted, rtol=2**-2, atol=2**-9 * unit)


def exact(q, k, v, causal):
    return attention(*(x.astype(jnp.float64) for x in (q, k, v)), causal=causal)


def distance(found, wanted):
    return float(np.linalg.norm(np.asarray(found) - np.asarray(wanted)) / np.linalg.norm(np.asarray(wanted)))


@pytest.mark.parametrize("causal, dtype", pairwise([True, False], [jnp.bfloat16, jnp.float32, jnp.float64], usual=1))
def test_gradients_are_those_of_attention_at_the_rounded_operands(causal, dtype, x64):
    given = operands(dtype=dtype)
    rounded = [jnp.asarray(np.multiply(*codes_and_scale(x)), dtype) for x in given]
    of_out = jnp.asarray(np.random.default_rng(1).normal(size=given[0].shape), dtype)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradients(call, of_out, *operands):
        out, back = jax.vjp(functools.partial(call, causal=causal), *operands)
        return out, back(of_out.astype(out.dtype))

    out, to_given = with_gradients(attention_fp8, of_out, *given)
    _, to_rounded = with_gradients(exact, of_out, *rounded)
    wanted, _ = with_gradients(exact, of_out, *given)
    assert out.dtype == dtype and distance(out, wanted) < 0.08
    for found, wanted, x in zip(to_given, to_rounded, given, strict=True):
        assert found.dtype == x.dtype and found.shape == x.shape
        # the output, which backward reads, is rounded to three bits
        assert distance(found, wanted) < 0.06


def test_zeros_and_operands_of_any_magnitude_have_finite_results():
    q, k, v = map(np.asarray, operands())
    call = jax.jit(functools.partial(attention_fp8, causal=True))
    np.testing.assert_array_equal(call(q, k, 0 * v), 0 * q)
    small = np.asarray(call(q * np.float32(2.0**-60), k * np.float32(2.0**60), v * np.float32(2.0**-60)))
    np.testing.assert_array_equal(small, np.asarray(call(q, k, v)) * np.float32(2.0**-60))
    gradient = jax.jit(jax.grad(lambda *x: jnp.sum(call(*x)), (0, 1, 2)))(0 * q, k, 100 * v)
    assert all(np.isfinite(g).all() for g in gradient)


def test_second_derivatives_are_refused():
    q, k, v = operands()
    with pytest.raises(TypeError, match=naming("differentiated `attention_fp8`")):
        jax.jit(jax.hessian(lambda s: jnp.sum(attention_fp8(s * q, k, v))))(1.0)


def test_shapes_that_do_not_fit_are_refused():
    q, k, v = operands(keys=24)
    with pytest.raises(ValueError, match=naming("`causal` 16 queries")):
        attention_fp8(q, k, v, causal=True)
    with pytest.raises(ValueError, match=naming("`q` (2, 16, 3, 32) divides")):
        attention_fp8(q[:, :, :3], k, v)
    with pytest.raises(NotImplementedError, match=naming("'attention_fp8' 'cpu' cuDNN GPUs")):
        attention_fp8(q, k, v, implementation="native")


@needs_target
@pytest.mark.parametrize("causal, keys", others_full([(True, 256), (False, 256), (False, 384)], [(False, 384)]))
def test_the_call_for_gpus_is_that_of_jax(causal, keys):
    codes = [jax.ShapeDtypeStruct((2, n, h, 128), jnp.float8_e4m3fn) for n, h in ((256, 8), (keys, 2), (keys, 2))]
    scales = [jax.ShapeDtypeStruct((), jnp.float32)] * 6

    def ours(q, k, v, *scales):
        return _cudnn_calls.forward_fp8(
            q, k, v, _cudnn_calls.Scales(*scales), _cudnn_calls.Options(causal, None, 0.125)
        )

    def theirs(q, k, v, *scales):
        scales = [jnp.reshape(scale, (1, 1, 1, 1)) for scale in scales]
        options = dict(scale=0.125, use_causal_mask=causal, layout=of_jax.AttentionLayout.BTNH.value, is_training=True)
        return of_jax._dot_product_attention_fp8_fwd_p.bind(q, k, v, *scales, **options)

    (found,), (wanted,) = calls(ours, *codes, *scales), calls(theirs, *codes, *scales)
    assert found == wanted


@pytest.mark.full
@needs_target
def test_on_h200_xla_does_not_remove_the_rounding_of_weights_and_outputs():
    mesh = h200_mesh(1)
    operands = [array(mesh, (2, 128, 4, 64), P(), jnp.float32)] * 3
    with jax.set_mesh(mesh):
        run = jax.jit(functools.partial(attention_fp8, causal=True, implementation="reference"))
        text = run.lower(*operands).compile().as_text()
    # of the queries, keys and values there are codes already, and no casts
    assert len(re.findall(r"= f8e4m3fn\[\S+ convert\(", text)) == 2
