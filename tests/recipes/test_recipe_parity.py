"""A sharded model with a recipe is the plain Flax model at quantized weights, gradients going straight to the master.

The quantized lines of TransformerEngine #2960 (`test_etp.py`) and of Megatron-LM's GTP tests, and where each is held.
A case in brackets is one of `test_gradients_are_those_of_the_plain_model...`, here or, of experts, in
`test_moe_recipes`; other modules are of this directory unless they name theirs.

| upstream | here |
|---|---|
| 10 microbatches agree | [NVFP4-dp 2 x gtp 2, four microbatches]; to the bit in `test_recipe_collectives` |
| 11a NVFP4 Linear, second microbatch | [NVFP4-gtp 4], and the above: values, not finiteness |
| 11b NVFP4, 56 features out | [NVFP4-gtp 8, unaligned]: 56 and 120 |
| 12 NVFP4 grouped, 2 and 4 experts | [gtp 4, 2 experts, NVFP4], [gtp 4, NVFP4]; [gtp 8, NVFP4, 64 experts] |
| 13a MXFP8 Linear, backward; native (2) | [MXFP8-gtp 2 x tp 2]; [gtp 2 x tp 2, 64 experts, MXFP8] |
| 13b MXFP8, 120 features out | [MXFP8-gtp 8, unaligned] |
| 16b buffers of quantized experts, two passes | no cache; one buffer serves both: `test_recipe_collectives` |
| 23 master updated; codes change each step | `test_steps_update_the_master_and_quantize_it_anew` |
| 7 GroupedLinear, experts by themselves | `test_every_expert_is_quantized_by_itself` of `tests/nn` |
| gradient scattered in main_grad's dtype | `test_a_reduce_scatter_sums_in_the_dtype_asked_for` |
| scatter with float32 accumulation | `test_gradient_exchange`, `bf16` |
| global amax over the group | `test_packed_wire`, shards of unequal magnitudes |
| wire bytes of a quantized gather | `test_recipe_collectives` |
| full-operand matmuls | `tests/ops/test_linear_blocks`, `test_matmul_parity` |
| the same in FP8 | `tests/ops/test_linear_fp8`, and here to the format's error |
"""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

from ..parity.plain_llama import loss_and_gradient
from .oracles import dequantized

ALIGNED = LlamaConfig(
    vocab_size=128, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128,
    dtype="float64",
)  # fmt: skip
UNALIGNED = LlamaConfig(
    vocab_size=128, hidden_size=56, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=14, intermediate_size=120,
    dtype="float64",
)  # fmt: skip
RECIPES = {"FP8": gtp.FP8(), "MXFP8": gtp.MXFP8(), "NVFP4": gtp.NVFP4(), "NVFP4 1x16": gtp.NVFP4(block=(1, 16))}
MESHES = {
    "gtp 4": (ALIGNED, dict(gtp=4), 1),
    "gtp 2 x tp 2": (ALIGNED, dict(gtp=2, tp=2), 1),
    "dp 2 x gtp 2, four microbatches": (ALIGNED, dict(dp=2, gtp=2), 4),
    "gtp 8, unaligned": (UNALIGNED, dict(gtp=8), 1),
    "one device": (UNALIGNED, dict(gtp=1), 1),
}


def batch_of(config, size=16, length=8):
    rng = np.random.default_rng(size)
    tokens = rng.integers(0, config.vocab_size, (size, length + 1)).astype(np.int32)
    weights = (rng.random((size, length)) > 0.3).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


def neighbours_together(batch, degrees, microbatches):
    """The same examples in such an order that those of a rank's microbatch are neighbours in the original order."""
    ranks = degrees.get("dp", 1) * degrees.get("gtp", 1)

    def ordered(a):
        return np.reshape(np.swapaxes(np.reshape(a, (ranks, microbatches, -1, *a.shape[1:])), 1, 2), a.shape)

    return jax.tree.map(ordered, batch)


def scope(degrees):
    return jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))]))


def start(config, optimizer):
    return gtp.TrainState.create(gtp.init(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(3)), optimizer)


def host(tree):
    return jax.tree.map(np.asarray, tree)


def assert_close(found, wanted, tolerance):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        error = np.linalg.norm(np.ravel(a - b)) / max(np.linalg.norm(np.ravel(b)), 1e-30)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: relative error {error:.2e} > {tolerance}"


def check(config, degrees, microbatches, recipe, tolerance):
    batch = batch_of(config)
    with scope(degrees):
        state = start(config, optax.sgd(1.0))
        run = jax.jit(
            lambda s, b: gtp.train.loss_and_gradients(next_token_loss, s, b, microbatches=microbatches, recipe=recipe)
        )
        loss, gradient = run(state, batch)
        gradient = host(gradient)
        params = host(state.params)
    quantized = dequantized(params, recipe.wire, config.dtype)
    assert not np.array_equal(
        quantized["blocks"]["layers"]["mlp"]["down"]["kernel"], params["blocks"]["layers"]["mlp"]["down"]["kernel"]
    )
    wanted_loss, wanted = loss_and_gradient(config)(quantized, batch)
    assert abs(float(loss) - float(wanted_loss)) <= tolerance * abs(float(wanted_loss))
    assert_close(gradient, host(wanted), tolerance)


CASES = [
    ("NVFP4", "dp 2 x gtp 2, four microbatches"),
    ("NVFP4", "gtp 4"),
    ("NVFP4", "gtp 2 x tp 2"),
    ("NVFP4", "gtp 8, unaligned"),
    ("NVFP4", "one device"),
    ("MXFP8", "gtp 2 x tp 2"),
    ("MXFP8", "gtp 8, unaligned"),
    ("FP8", "gtp 4"),
    ("NVFP4 1x16", "gtp 4"),
]


@pytest.mark.full
@pytest.mark.parametrize("recipe, mesh", CASES)
def test_gradients_are_those_of_the_plain_model_at_quantized_weights(recipe, mesh, x64):
    check(*MESHES[mesh], RECIPES[recipe], 1e-12)


def test_steps_update_the_master_and_quantize_it_anew(x64):
    config, degrees, _ = MESHES["gtp 4"]
    recipe, batch, optimizer = gtp.NVFP4(), batch_of(config), optax.adam(1e-2)
    with scope(degrees):
        state = start(config, optimizer)
        params = host(state.params)
        step = gtp.train_step(next_token_loss, optimizer, recipe=recipe)
        losses = []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        end = host(state.params)
    loss, update = loss_and_gradient(config), jax.jit(optimizer.update)
    moments, wanted, codes = optimizer.init(params), [], []
    for _ in range(3):
        quantized = dequantized(params, recipe.wire, config.dtype)
        codes.append(quantized["blocks"]["layers"]["attention"]["out"]["kernel"])
        value, gradient = loss(quantized, batch)
        updates, moments = update(gradient, moments, params)
        params = jax.tree.map(np.add, params, host(updates))
        wanted.append(float(value))
    np.testing.assert_allclose(losses, wanted, rtol=1e-11)
    assert_close(end, params, 1e-10)
    assert all(np.mean(a != b) > 0.05 for a, b in zip(codes, codes[1:], strict=False))


@pytest.mark.full
def test_bf16_is_no_recipe_at_all_and_evaluation_has_the_recipe_of_training():
    config = dataclasses.replace(ALIGNED, dtype="float32")
    batch = batch_of(config)
    with scope(dict(gtp=4)):
        state = start(config, optax.sgd(1.0))
        plain = gtp.eval_step(next_token_loss)(state, batch)["loss"]
        assert plain == gtp.eval_step(next_token_loss, recipe=gtp.recipes.BF16())(state, batch)["loss"]
        quantized = gtp.eval_step(next_token_loss, recipe=gtp.NVFP4())(state, batch)["loss"]
        trained = gtp.train_step(next_token_loss, optax.sgd(1.0), recipe=gtp.NVFP4())(state, batch)[1]["loss"]
    assert quantized == trained != plain
