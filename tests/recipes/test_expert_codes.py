"""Where experts multiply in FP8 or MXFP8, tokens travel to them as codes. Whatever the recipe, operands are rounded
alike on all ranks that multiply them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import others_slow

import gtp_jax as gtp
from gtp_jax import plan

SIZES = dict(features=32, hidden=48, num_experts=8, top_k=3)
RECIPE = gtp.FP8(matmuls=True, exclude=())


def gradients(degrees, recipe=RECIPE, text=False, parallel=None, dtype="float32", **options):
    """Output and gradients of a mixture under a recipe, by name; or the program."""
    mesh = gtp.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])
    x = jax.random.normal(jax.random.key(0), (8, 8, SIZES["features"]), dtype)
    with jax.set_mesh(mesh), gtp.use_recipe(recipe):
        layer = lambda rngs: gtp.MoE(**SIZES, parallel=parallel, dtype=dtype, rngs=rngs, **options)  # noqa: E731
        make = (lambda rngs: gtp.Stack(layer, 1, rngs=rngs)) if text else layer
        graph, state = nnx.split(gtp.init(make, nnx.Rngs(0)))

        def loss(state, x):
            y = nnx.merge(graph, state)(x)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        if text:
            return run.lower(state, x).compile().as_text()
        (_, y), (to_state, to_x) = run(state, x)
    found = {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(to_state)}
    return {name: np.asarray(a, np.float64) for name, a in {**found, "x": to_x, "y": y}.items()}


def distance(a, b):
    return {name: np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name]) for name in b}


CASES = {
    "ep 2": (dict(ep=2), {}),
    "ep 4, all-gather": (dict(ep=4), dict(transport="gather")),
    "ep 4, in rounds and two chunks": (dict(ep=4), dict(round_size=0.3, exchange_chunks=2)),
    "ep 2 x gtp 2 x tp 2, features": (dict(ep=2, gtp=2, tp=2), dict(parallel="features")),
    "ep 2 x gtp 2 x tp 2, experts over both": (dict(ep=2, gtp=2, tp=2), dict(parallel="expert")),
    "gtp 2 x tp 2, experts over tp": (dict(gtp=2, tp=2), dict(parallel="expert")),
}


@pytest.mark.parametrize("name", others_slow(CASES, ["ep 4, in rounds and two chunks"]))
def test_results_are_those_of_one_device(name):
    """A scale is a power of two: that of fewer rows gives the same codes but for numbers that underflow. What FP8
    rounds off is many times as much."""
    degrees, options = CASES[name]
    found, alone = gradients(degrees, **options), gradients({}, parallel=options.get("parallel"))
    exact = gradients({}, recipe=None, parallel=options.get("parallel"))
    apart, rounded = distance(found, alone), distance(alone, exact)
    for what, error in apart.items():
        assert error < 0.003 < 0.015 < rounded[what], f"{what}: {apart}, {rounded}"


BLOCKED = {
    "MXFP8": gtp.MXFP8(matmuls=True, exclude=()),
    "NVFP4": gtp.NVFP4(matmuls=True, stochastic=False, exclude=()),  # random bits go by the place in a rank's rows
}


@pytest.mark.parametrize(
    "recipe, name",
    [
        ("MXFP8", "ep 4"),
        *(pytest.param(recipe, name, marks=pytest.mark.slow) for recipe in BLOCKED for name in ("ep 2", "ep 2 x tp 2")),
        pytest.param("NVFP4", "ep 4", marks=pytest.mark.slow),
    ],
)
def test_blocks_are_those_of_one_device(recipe, name, x64):
    """Rows of an expert come in the order in which one device would sort them, so that their blocks are the same ones.
    In one round and one chunk, each of which has blocks of its own."""
    degrees, options = {
        "ep 2": (dict(ep=2), {}),
        "ep 4": (dict(ep=4), dict(transport="gather")),
        "ep 2 x tp 2": (dict(ep=2, tp=2), dict(parallel="expert")),
    }[name]
    options = dict(dtype="float64", param_dtype="float64", round_size=8.0, **options)
    parallel = options.get("parallel")
    alone = gradients({}, BLOCKED[recipe], **{**options, "parallel": parallel})
    apart = distance(gradients(degrees, BLOCKED[recipe], **options), alone)
    rounded = distance(alone, gradients({}, None, **{**options, "parallel": parallel}))
    # a rank's tensor scale of NVFP4 is a power of two: with another one, block scales that underflow are others
    tolerance = 1e-6 if recipe == "MXFP8" else 1e-3
    for what, error in apart.items():
        assert error < tolerance < 0.01 < rounded[what], f"{what}: {apart}, {rounded}"


@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", ["FP8", "MXFP8"])
def test_of_the_tokens_one_byte_a_number_travels_and_their_scales(name, chunks):
    """There, and again in backward. Partial sums and all gradients travel in the compute dtype."""
    recipe = RECIPE if name == "FP8" else BLOCKED[name]
    found = plan.collectives(gradients(dict(ep=4), recipe, text=True, dtype="bfloat16", exchange_chunks=chunks))
    moved = sorted((c.direction, c.dtype) for c in found if c.kind == "all-to-all" and c.dtype != "f32")
    assert moved == [
        *[("backward", "u16")] * 2 * chunks,
        *[("backward", "u8")] * chunks,
        *[("forward", "u16")] * chunks,
        *[("forward", "u8")] * chunks,
    ]
    sizes = {c.dtype: c.operand_bytes for c in found if c.kind == "all-to-all" and c.dtype != "f32"}
    features = SIZES["features"]
    assert sizes["u16"] * (features + (name == "MXFP8")) == 2 * features * sizes["u8"]  # a scale for 32 codes
    maxima = [c for c in found if c.kind == "all-reduce" and "pmax" in c.op_name and c.axes == ("ep",)]
    # joined with those of kernels, each of one expert; MXFP8 has none
    assert [c.direction for c in maxima] == (["forward"] if name == "FP8" else [])


@pytest.mark.slow
def test_transports_give_the_same_bits():
    padded, gathered = (gradients(dict(ep=4), transport=transport) for transport in ("padded", "gather"))
    for name, value in padded.items():
        np.testing.assert_array_equal(value, gathered[name], err_msg=name)
