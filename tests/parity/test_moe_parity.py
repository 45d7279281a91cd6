"""A Llama with experts under gtp_jax against every token through every expert on one device.

The grouped lines of TransformerEngine #2960 (`test_etp.py`) and Megatron-LM's GTP tests, and where each is held:

| upstream | here |
|---|---|
| 4b grouped list: every expert's weight is sharded | `tests/experts/test_grouped_dense.py` |
| 2, 4 and 64 experts, forward and backward, aligned and not | this module, at 1e-12 in float64 |
| ragged splits, empty experts | `tests/experts/test_grouped_dense.py`; 64 experts here, most of them empty |
| coalesced gather and reduce-scatter, one amax | `tests/recipes/test_moe_recipes.py` |
| NVFP4, MXFP8 | `tests/recipes/test_moe_recipes.py` |
"""

import dataclasses

import jax
import numpy as np
import pytest

from gtp_jax.models import LlamaConfig

from .test_llama_parity import assert_close, batches, check, oracle, train

# Nothing divides evenly, but experts by tp.
MOE = LlamaConfig(
    vocab_size=64,
    hidden_size=56,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=14,
    intermediate_size=24,
    num_experts=4,
    aux_loss_coeff=0.1,
    dtype="float64",
)
CASES = {
    "gtp 8": (dict(gtp=8), {}, 1),
    "gtp 4 x tp 2": (dict(gtp=4, tp=2), {}, 1),
    "dp 2 x gtp 2, four microbatches, 2 experts": (dict(dp=2, gtp=2), dict(num_experts=2, top_k=1), 4),
    "gtp 2 x tp 2, 64 experts divided over tp": (
        dict(gtp=2, tp=2),
        dict(num_experts=64, top_k=3, expert_parallel="expert"),
        1,
    ),
    "dp 2 x gtp 2 x tp 2, experts sharded over all of it": (
        dict(dp=2, gtp=2, tp=2),
        dict(expert_parallel=None, expert_axes=("dp", "tp", "gtp")),
        1,
    ),
    "ep 2": (dict(ep=2), {}, 1),
    "ep 4, four microbatches": (dict(ep=4), {}, 4),
    "ep 8, as many experts": (dict(ep=8), dict(num_experts=8, top_k=3), 1),
    "ep 2 x gtp 2: dense gtp 4 beside ep 2 x egtp 2": (dict(gtp=2, ep=2), {}, 1),
    "ep 2 x gtp 2 x tp 2": (dict(gtp=2, ep=2, tp=2), {}, 1),
    "ep 2 x gtp 2 x tp 2, a part of the sequence each": (dict(gtp=2, ep=2, tp=2), dict(expert_parallel=None), 1),
    "dp 2 x ep 2 x tp 2, experts over ep and tp": (dict(dp=2, ep=2, tp=2), dict(expert_parallel="expert"), 1),
    "dp 2 x ep 4, experts gathered over dp": (dict(dp=2, ep=4), dict(expert_axes=("dp",)), 1),
    "gtp 2 x tp 2, whole sequence": (dict(gtp=2, tp=2), dict(expert_parallel=None, sequence_parallel=False), 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_meshes_agree_with_every_token_through_every_expert(name, x64):
    degrees, changes, microbatches = CASES[name]
    check(dataclasses.replace(MOE, **changes), degrees, 1e-12, microbatches)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [dict(remat="everything"), dict(remat="activations"), dict(remat="nothing", unroll=1, keep_gathered=0)],
    ids=str,
)
def test_what_is_kept_changes_no_gradient(fields, x64):
    check(dataclasses.replace(MOE, **fields), dict(gtp=2, tp=2), 1e-12)


@pytest.mark.slow
def test_meshes_agree_in_float32():
    config = dataclasses.replace(MOE, dtype="float32")
    data = batches(config, 8, 8)
    start, gradient, losses, _ = train(config, dict(gtp=4, tp=2), data, rate=1e-3)
    wanted_gradient, wanted_losses, _ = oracle(config, start, data, rate=1e-3)
    assert_close(gradient, wanted_gradient, 1e-5, "gradient of ")
    assert_close(losses, wanted_losses, 1e-5, "loss of step ")


@pytest.mark.slow
def test_degree_one_is_the_plain_path_bit_for_bit():
    config = dataclasses.replace(MOE, dtype="float32")
    data = batches(config, 4, 8)
    found = (train(config, degrees, data) for degrees in (dict(gtp=1), None))
    for a, b in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(a, b)
