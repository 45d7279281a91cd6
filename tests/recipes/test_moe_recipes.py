"""A Llama with experts and a recipe: gradients at quantized weights and of rounded operands."""

import dataclasses
import functools

import jax
import optax
import pytest

import gtp_jax as gtp
from gtp_jax.models import next_token_loss

from ..parity.test_moe_parity import MOE
from .test_recipe_parity import assert_close, batch_of, check, host, neighbours_together, scope, start

# tp shards rows at multiples of a block, as the unsharded weight is quantized
BY_TP = dict(hidden_size=64, head_dim=16, intermediate_size=64)
CASES = {
    "gtp 4, NVFP4": (dict(gtp=4), {}, 1, gtp.NVFP4()),
    "gtp 2 x tp 2, experts divided, microbatches": (
        dict(gtp=2, tp=2),
        dict(**BY_TP, num_experts=8, expert_parallel="expert"),
        2,
        gtp.NVFP4(),
    ),
    "dp 2 x gtp 2, experts sharded over both": (dict(dp=2, gtp=2), dict(expert_axes=("dp", "gtp")), 1, gtp.NVFP4()),
    "gtp 4, 2 experts, NVFP4": (dict(gtp=4), dict(num_experts=2, top_k=1), 1, gtp.NVFP4()),
    "gtp 2 x tp 2, 64 experts, MXFP8": (
        dict(gtp=2, tp=2),
        dict(**BY_TP, num_experts=64, expert_parallel="expert"),
        1,
        gtp.MXFP8(),
    ),
    "gtp 8, NVFP4, 64 experts": (dict(gtp=8), dict(num_experts=64), 1, gtp.NVFP4()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_model_at_quantized_weights(name, x64):
    degrees, changes, microbatches, recipe = CASES[name]
    check(dataclasses.replace(MOE, **changes), degrees, microbatches, recipe, 1e-12)


OPERANDS = {
    "FP8": gtp.FP8(matmuls=True),
    "MXFP8": gtp.MXFP8(matmuls=True),
    "NVFP4": gtp.NVFP4(matmuls=True, stochastic=False),  # random bits go by the place in a rank's own array
}
ROUNDED = dataclasses.replace(MOE, hidden_size=64, head_dim=32, intermediate_size=64, num_layers=1)


@functools.cache
def on_one_device(config, name):
    return gradients(config, dict(gtp=1), OPERANDS[name], 4)


def gradients(config, degrees, recipe, parts):
    batch = batch_of(config, 8, 16)
    with scope(degrees):
        state = start(config, optax.sgd(1.0))
        run = jax.jit(
            lambda s, b: gtp.train.loss_and_gradients(next_token_loss, s, b, microbatches=parts, recipe=recipe)
        )
        loss, found = run(state, neighbours_together(batch, degrees, parts))
        return float(loss), host(found)


# Blocks of wgrad run along the tokens of one expert in one product: those of a rank and a microbatch. So a mesh of four
# ranks rounds what one device rounds in four microbatches.
SHARDED = {
    "gtp 4": (dict(gtp=4), 1, {}),
    "gtp 2 x tp 2, two microbatches": (dict(gtp=2, tp=2), 2, {}),
    "gtp 2 x tp 2, 8 experts divided": (dict(gtp=2, tp=2), 2, dict(num_experts=8, expert_parallel="expert")),
    "gtp 4, 2 experts": (dict(gtp=4), 1, dict(num_experts=2, top_k=1)),
    "gtp 4, 64 experts": (dict(gtp=4), 1, dict(num_experts=64)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, mesh",
    [
        *(("NVFP4", mesh) for mesh in SHARDED),
        ("MXFP8", "gtp 2 x tp 2, two microbatches"),
        ("MXFP8", "gtp 4, 64 experts"),
        ("FP8", "gtp 2 x tp 2, 8 experts divided"),
    ],
)
def test_with_quantized_operands_a_mesh_has_the_gradients_of_one_device(name, mesh, x64):
    degrees, parts, changes = SHARDED[mesh]
    config = dataclasses.replace(ROUNDED, **changes)
    loss, wanted = on_one_device(config, name)
    there, found = gradients(config, degrees, OPERANDS[name], parts)
    # Products leave float64's rounding, by which one code changes in the second of these cases, 3e-7 of a gradient. In
    # the first, each rank has an FP8 scale of its own for what its experts made, below which values underflow.
    rounded = {("FP8", "gtp 2 x tp 2, 8 experts divided"), ("NVFP4", "gtp 2 x tp 2, two microbatches")}
    of_loss, of_gradients = (1e-7, 1e-5) if (name, mesh) in rounded else (1e-12, 1e-11)
    assert abs(there - loss) <= of_loss * loss
    assert_close(found, wanted, of_gradients)
