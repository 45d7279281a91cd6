"""A gated MLP in FP8 as one operation: bit for bit its two matmuls with SwiGLU between them; its kernels, the reference
up to the sigmoid's rounding."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import naming
from selection import pairwise

from gtp_jax import native
from gtp_jax.formats import FP8_E4M3, FP8_E5M2, NVFP4
from gtp_jax.ops import (
    linear_fp8,
    multi_amax,
    power_of_two_amax,
    quantize,
    quantize_swiglu,
    quantize_swiglu_gradient,
    swiglu,
    swiglu_amax,
    swiglu_fp8,
)

KERNEL = native.has("gtp_swiglu_amax", "CUDA") and jax.default_backend() == "gpu"
# rows, parts, features of a part; whole tiles of 128 and others
SHAPES = [(8, 2, 32), (7, 3, 5), (0, 1, 16)]
ON_GPUS = [(128, 1, 128), (256, 2, 384), (136, 3, 264), (131, 1, 77), (1, 1, 1), (300, 2, 129), (0, 1, 16)]


def numbers(seed, *shape, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def operands(rows, parts, width, dtype):
    shapes = (rows, 24), (parts * 2 * width, 24), (16, parts * width), (rows, 16)
    return [numbers(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]


def assert_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


@pytest.mark.parametrize(
    "dtype, shape, gradients, keep_codes",
    pairwise(["bfloat16", "float32", "float16"], SHAPES, [FP8_E5M2, FP8_E4M3], [False, True]),
)
def test_it_is_two_matmuls_with_swiglu_between_them_bit_for_bit(dtype, shape, gradients, keep_codes):
    *given, gradient = operands(*shape, dtype=dtype)
    gradient /= 1024  # scales of gradients are others than those of values
    if dtype != "float16" and shape[0] == 7:
        given[0] = given[0].at[2, 1].set(jnp.nan).at[4, 0].set(jnp.inf)

    def apart(x, up, down):
        return linear_fp8(swiglu(linear_fp8(x, up, gradients), shape[1]), down, gradients)

    def as_one(x, up, down):
        return swiglu_fp8(x, up, down, gradients, parts=shape[1], keep_codes=keep_codes)

    def found(function):
        def both(gradient, *given):
            y, back = jax.vjp(function, *given)
            return y, *back(gradient)

        return jax.jit(both)(gradient, *given)

    assert_equal(found(as_one), found(apart))


@pytest.mark.parametrize("keep_codes", [False, True])
def test_backward_keeps_the_operand_of_swiglu_and_the_input_or_its_codes(keep_codes):
    x, up, down, _ = operands(8, 2, 32, "bfloat16")
    call = jax.jit(lambda x, up, down: swiglu_fp8(x, up, down, FP8_E5M2, parts=2, keep_codes=keep_codes))
    saved = jax.tree.leaves(jax.eval_shape(lambda *given: jax.vjp(call, *given)[1], x, up, down))
    size = lambda dtype: sum(leaf.size for leaf in saved if leaf.dtype == dtype)  # noqa: E731
    kept = (0, x.size) if keep_codes else (x.size, 0)
    assert (size("bfloat16"), size("uint8")) == (kept[0] + 8 * len(up), kept[1] + up.size + down.size)


def test_a_second_derivative_is_refused_and_examples_of_a_vmap_have_their_own_amaxes():
    x, up, down, _ = operands(8, 2, 32, "float32")
    call = lambda x: swiglu_fp8(x, up, down, FP8_E5M2, parts=2)  # noqa: E731
    first = jax.grad(lambda x: jnp.sum(jnp.square(call(x))))
    with pytest.raises(TypeError, match=naming("differentiated again `swiglu_fp8`")):
        jax.eval_shape(jax.grad(lambda x: jnp.sum(first(x))), x)
    two = jnp.stack([x, 9 * x])
    found, wanted = jax.jit(lambda two: (jax.vmap(first)(two), jnp.stack([first(one) for one in two])))(two)
    assert_equal([found], [wanted])


def test_operands_that_do_not_fit_are_refused():
    gate_up = jnp.ones((4, 12))
    with pytest.raises(ValueError, match=naming("`gate_up` (4, 12) `parts` 4 (rows, parts * 2 * width)")):
        swiglu(gate_up, 4)
    with pytest.raises(ValueError, match=naming("`gradient` (4, 12) (4, 6)")):
        swiglu_amax(gate_up, 1, gate_up)
    with pytest.raises(TypeError, match=naming("`gate_up` float8_e5m2")):
        swiglu_amax(gate_up.astype(jnp.float8_e5m2))
    with pytest.raises(TypeError, match=naming("`gtp_jax.ops.multi_amax` not differentiable")):
        jax.grad(swiglu_amax)(gate_up)
    if not KERNEL:
        with pytest.raises(NotImplementedError, match=naming("native 'quantize_swiglu'")):
            quantize_swiglu(gate_up, jnp.float32(1), implementation="native")


def made(gate_up, gradient, parts, gradients):
    """The amaxes and codes of the kernels, and those of float32, in which the kernels compute, rounded once."""
    dtype, kernel = gate_up.dtype, cast("Any", dict(implementation="native"))
    hidden, back = jax.vjp(lambda x: swiglu(x, parts), gate_up.astype(jnp.float32))
    exact = [x.astype(dtype) for x in (hidden, *back(gradient.astype(jnp.float32)))]
    amaxes = multi_amax(exact)
    scales = [power_of_two_amax(a, form) for a, form in zip(amaxes, (FP8_E4M3, gradients), strict=True)]
    found_amaxes = [swiglu_amax(gate_up, parts, of, **kernel) for of in (None, gradient)]
    rows = quantize_swiglu(gate_up, scales[0], parts, **kernel)
    of_gate_up = quantize_swiglu_gradient(gate_up, gradient, scales[0], scales[1], gradients, parts, **kernel)
    pairs = zip(exact, (FP8_E4M3, gradients), scales, strict=True)
    wanted = [q for x, form, scale in pairs for q in quantize(x, form, amax=(scale, scale), axis="both")]
    return found_amaxes, amaxes, (rows, *of_gate_up), wanted


def values(q):
    """The numbers of codes without their scale; NaN has a number of its own."""
    kind = jnp.float8_e4m3fn if q.format == FP8_E4M3 else jnp.float8_e5m2
    return np.nan_to_num(np.asarray(jax.lax.bitcast_convert_type(q.codes, kind), np.float32), nan=1e9)


# Arguments of the handlers past the checks of `gtp_jax.ops`, and what their errors name.
REFUSED = {
    "parts": (dict(parts=4), "gate_up 12 columns 4 parts"),
    "dtype": (dict(gate_up=jnp.ones((4, 12), jnp.int32)), "gate_up float32, bfloat16 or float16"),
    "dimensions": (dict(gate_up=jnp.ones(12)), "gate_up (12) 2 dimensions"),
    "gradient": (dict(gradient=jnp.ones((4, 12))), "gradient (4, 12) (4, 6)"),
    "dtype of the gradient": (dict(gradient=jnp.ones((4, 6), jnp.bfloat16)), "gradient dtype gate_up"),
    "amax": (dict(amax=jnp.ones(2)), "amax (2)"),
    "format": (dict(format=NVFP4), "amax NVFP4 one scale per tensor"),
    "codes": (dict(rows=jax.ShapeDtypeStruct((4, 11), jnp.uint8)), "row_codes (4, 11) (4, 12)"),
}


@pytest.mark.gpu
@pytest.mark.skipif(not KERNEL, reason="no kernel")
@pytest.mark.parametrize("case", REFUSED)
def test_handlers_return_errors(case):
    wrong, message = REFUSED[case]
    codes = {
        name: jax.ShapeDtypeStruct(s, jnp.uint8)
        for name, s in dict(hidden=(6, 4), rows=(4, 12), columns=(12, 4)).items()
    }
    given = dict(gate_up=jnp.ones((4, 12)), gradient=jnp.ones((4, 6)), amax=jnp.float32(1), parts=1, format=FP8_E4M3)
    given |= codes | wrong
    call = jax.ffi.ffi_call("gtp_swiglu_quantize_gradient", [given[name] for name in codes])
    with pytest.raises(jax.errors.JaxRuntimeError, match=naming(message)):
        jax.block_until_ready(
            call(
                *(given[name] for name in ("gate_up", "gradient", "amax")),
                jnp.float32(1),
                parts=np.int64(given["parts"]),
                format=np.int32(given["format"].code),
                gradient_format=np.int32(FP8_E5M2.code),
            )
        )


@pytest.mark.gpu
@pytest.mark.skipif(not KERNEL, reason="no kernel")
@pytest.mark.parametrize(
    "shape, dtype, gradients", pairwise(ON_GPUS, ["bfloat16", "float32", "float16"], [FP8_E5M2, FP8_E4M3])
)
def test_kernels_make_the_codes_of_float32_numbers(shape, dtype, gradients):
    rows, parts, width = shape
    gate_up, gradient = numbers(0, rows, parts * 2 * width) * 3, numbers(1, rows, parts * width) * 1e-3
    if rows > 100:
        gate_up = gate_up.at[5, 3].set(jnp.nan).at[100, width].set(jnp.inf).at[17, 0].set(-jnp.inf)
        gradient = gradient.at[99, width - 1].set(jnp.nan)
    run = jax.jit(made, static_argnums=(2, 3))
    found_amaxes, amaxes, found, wanted = run(gate_up.astype(dtype), gradient.astype(dtype), parts, gradients)
    np.testing.assert_allclose(found_amaxes, amaxes, rtol=2**-7)
    np.testing.assert_array_equal(found[0].codes, found[1].codes.T)
    np.testing.assert_array_equal(found[2].codes, found[3].codes.T)
    for one, other in zip(found, wanted, strict=True):
        assert jax.tree.structure(one) == jax.tree.structure(other) and one.codes.shape == other.codes.shape
        numbers_found, numbers_wanted = values(one), values(other)
        np.testing.assert_array_equal(numbers_found == 1e9, numbers_wanted == 1e9)
        # a neighbouring code, where the sigmoids differ in their last bits; the gate's gradient has terms that cancel
        step, least = (0.13 if one.format == FP8_E4M3 else 0.26), 1e-5 * one.format.largest + 2.0**-9
        np.testing.assert_allclose(numbers_found, numbers_wanted, rtol=step, atol=least)
        assert one.codes.size < 1000 or np.mean(numbers_found != numbers_wanted) <= 0.01
