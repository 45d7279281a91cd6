"""Where experts multiply in FP8 or MXFP8, tokens travel to them as codes. Whatever the recipe, operands are rounded
alike on all ranks that multiply them."""

import math
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from placed import placed
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.experts import Transport
from gtp_jax.nn import abstract_model

from .test_expert_ranks import ragged_as_documented

SIZES = dict(features=32, hidden=48, num_experts=8, top_k=3)
RECIPE = gtp.FP8(matmuls=True, exclude=())


def gradients(degrees, recipe=RECIPE, parallel=None, dtype="float32", spread=0.0, text=False, backward=True, **options):
    """Output and gradients of a mixture under a recipe, by name, or its output alone; or the program.

    With a `spread` features differ in size by so many powers of e.
    """
    sizes = {name: options.pop(name, value) for name, value in SIZES.items()}
    mesh = gtp.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8, sizes["features"])), dtype)
    with jax.set_mesh(mesh), gtp.use_recipe(recipe):
        layer = lambda rngs: gtp.nn.MoE(**sizes, parallel=parallel, dtype=dtype, rngs=rngs, **options)  # noqa: E731
        make = (lambda rngs: gtp.Stack(layer, 1, rngs=rngs)) if text else layer
        graph, state = nnx.split(abstract_model(make) if text else placed(make))
        if spread:
            factors = np.exp(spread * np.random.default_rng(1).normal(size=sizes["features"]))
            scale = state["scale"].get_value()
            state["scale"] = state["scale"].replace(jax.device_put(scale * factors.astype(scale.dtype), scale.sharding))

        def loss(state, x):
            y = nnx.merge(graph, state)(x)
            return jnp.sum(jnp.sin(y.astype(jnp.float32))), y

        if not backward:
            return {"y": np.asarray(jax.jit(loss)(state, x)[1], np.float64)}
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
    "ep 4, in rounds and two chunks": (dict(ep=4), dict(round_size=0.3, exchange_chunks=2)),
    "ep 2 x gtp 2 x tp 2, features": (dict(ep=2, gtp=2, tp=2), dict(parallel="features")),
    "ep 2 x gtp 2 x tp 2, experts over both": (dict(ep=2, gtp=2, tp=2), dict(parallel="expert")),
}


@pytest.mark.parametrize(
    "name, backward", others_full([("ep 2", False), *((name, True) for name in CASES)], [("ep 2", False)])
)
def test_results_are_those_of_one_device(name, backward):
    """A scale is a power of two: that of fewer rows gives the same codes but for numbers that underflow. What FP8
    rounds off is many times as much."""
    degrees, options = CASES[name]
    one = dict(parallel=options.get("parallel"), backward=backward)
    found = gradients(degrees, backward=backward, **options)
    alone, exact = gradients({}, **one), gradients({}, None, **one)
    apart, rounded = distance(found, alone), distance(alone, exact)
    for what, error in apart.items():
        assert error < 0.003 < 0.015 < rounded[what], f"{what}: {apart}, {rounded}"


MESHES = {
    "ep 2": (dict(ep=2), {}),
    "ep 4": (dict(ep=4), dict(transport="gather")),
    "ep 2 x tp 2": (dict(ep=2, tp=2), dict(parallel="expert")),
}
BLOCKED = {
    "MXFP8": gtp.MXFP8(matmuls=True, exclude=()),
    "FP8 in blocks": gtp.recipes.FP8Blocks(exclude=()),
    "NVFP4": gtp.NVFP4(matmuls=True, stochastic=False, exclude=()),  # random bits go by the place in a rank's rows
}


@pytest.mark.full
@pytest.mark.parametrize("recipe, name", list(zip(BLOCKED, MESHES, strict=True)))
def test_blocks_are_those_of_one_device(recipe, name, x64):
    """Rows of an expert come in the order in which one device would sort them, in one round and one chunk, so that
    blocks are the same ones. FP8's features differ in size: a token's codes keep few bits of small ones, and wgrad's
    operand would be another one if one of the two made it of the rows."""
    degrees, options = MESHES[name]
    spread = 0.0 if recipe == "NVFP4" else 4.0
    options = dict(dtype="float64", param_dtype="float64", round_size=8.0, spread=spread, **options)
    alone = gradients({}, BLOCKED[recipe], **options)
    apart = distance(gradients(degrees, BLOCKED[recipe], **options), alone)
    rounded = distance(alone, gradients({}, None, **options))
    # a rank's tensor scale of NVFP4 is a power of two: with another one, block scales that underflow are others
    tolerance = 1e-3 if recipe == "NVFP4" else 1e-6
    for what, error in apart.items():
        assert error < tolerance < 0.01 < rounded[what], f"{what}: {apart}, {rounded}"


@pytest.mark.full
@pytest.mark.parametrize("name, chunks", [("FP8", 1), ("MXFP8", 2), ("FP8 in blocks", 2)])
def test_of_the_tokens_one_byte_a_number_travels_and_their_scales(name, chunks):
    """There, and again in backward. Partial sums and all gradients travel in the compute dtype."""
    recipe = RECIPE if name == "FP8" else BLOCKED[name]
    options = dict(num_experts=4, top_k=2, dtype="bfloat16", exchange_chunks=chunks)
    found = hlo.collectives(gradients(dict(ep=2), recipe, text=True, **options))
    moved = sorted((c.direction, c.dtype) for c in found if c.kind == "all-to-all" and c.dtype != "f32")
    assert moved == [
        *[("backward", "u16")] * 2 * chunks,
        *[("backward", "u8")] * chunks,
        *[("forward", "u16")] * chunks,
        *[("forward", "u8")] * chunks,
    ]
    sizes = {c.dtype: c.operand_bytes for c in found if c.kind == "all-to-all" and c.dtype != "f32"}
    features = SIZES["features"]
    scales = {"FP8": 0, "MXFP8": 1, "FP8 in blocks": 4}[name]  # bytes for up to 32 codes; a float32 for up to 128
    assert sizes["u16"] * (features + scales) == 2 * features * sizes["u8"]
    maxima = [c for c in found if c.kind == "all-reduce" and "pmax" in c.op_name and c.axes == ("ep",)]
    # joined with those of kernels, each of one expert; blocks have none
    assert [c.direction for c in maxima] == (["forward"] if name == "FP8" else [])


@pytest.mark.full
@pytest.mark.parametrize(
    "name, sizes",
    [("FP8", {}), ("MXFP8", dict(features=40, hidden=36)), ("FP8 in blocks", dict(features=40, hidden=36))],
)
def test_transports_give_the_same_bits(name, sizes, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_as_documented)  # XLA does not support it on CPUs
    monkeypatch.setattr("gtp_jax.experts._transports.platform", lambda: "gpu")
    routing = gtp.nn.Routing(num_groups=4, top_groups=2)
    recipe, options = RECIPE if name == "FP8" else BLOCKED[name], dict(routing=routing, exchange_chunks=2, **sizes)
    padded, *others = (gradients(dict(ep=4), recipe, transport=one, **options) for one in get_args(Transport))
    for other in others:
        for what, value in padded.items():
            np.testing.assert_array_equal(value, other[what], err_msg=what)
