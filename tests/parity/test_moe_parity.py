"""A Llama with experts under gtp_jax against every token through every expert on one device.

The grouped lines of TransformerEngine #2960 (`test_etp.py`) and Megatron-LM's GTP tests, and where each is held:

| upstream | here |
|---|---|
| 4b grouped list: every expert's weight is sharded | `tests/experts/test_grouped_dense.py` |
| 2, 4 and 64 experts, forward and backward, aligned and not | this module, at 1e-12 in float64 |
| ragged splits, empty experts | `tests/experts/test_grouped_dense.py`; 64 experts here, most of them empty |
| coalesced gather and reduce-scatter, one amax | `tests/experts/test_grouped_dense.py` |
| NVFP4, MXFP8 | `tests/recipes/test_moe_recipes.py` |
"""

import dataclasses

import pytest

from gtp_jax.models import LlamaConfig

from .test_llama_parity import check

# Nothing divides evenly, but experts by tp.
MOE = LlamaConfig(
    vocab_size=64, hidden_size=56, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=14, intermediate_size=24,
    num_experts=4, aux_loss_coeff=0.1, dtype="float64",
)  # fmt: skip
CASES = {
    "gtp 8": (dict(gtp=8), {}, 1),
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
    "ep 4, four microbatches": (dict(ep=4), {}, 4),
    "ep 8, as many experts": (dict(ep=8), dict(num_experts=8, top_k=3), 1),
    "ep 2 x gtp 2: dense gtp 4 beside ep 2 x egtp 2": (dict(gtp=2, ep=2), {}, 1),
    "gtp 2 x tp 2, everything saved": (dict(gtp=2, tp=2), dict(remat="everything"), 1),
    "gtp 2 x tp 2, nothing saved, looped": (dict(gtp=2, tp=2), dict(remat="nothing", unroll=1, keep_gathered=0), 1),
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
