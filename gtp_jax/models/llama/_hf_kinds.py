"""The kinds of Hugging Face models that our Llama computes: fields of config.json, and which value some must have.

Names and defaults are those of `LlamaConfig`, `MixtralConfig`, `Qwen3Config` and `Qwen3MoeConfig` in transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ...experts import Routing
from ._config import LlamaConfig

Fields = tuple[tuple[str, str], ...]

# Theirs, ours.
_FIELDS: Fields = (
    ("vocab_size", "vocab_size"),
    ("hidden_size", "hidden_size"),
    ("num_hidden_layers", "num_layers"),
    ("num_attention_heads", "num_heads"),
    ("num_key_value_heads", "num_kv_heads"),
    ("head_dim", "head_dim"),
    ("rms_norm_eps", "epsilon"),
    ("rope_theta", "rope_theta"),
    ("tie_word_embeddings", "tie_embeddings"),
)
_DENSE: Fields = (("intermediate_size", "intermediate_size"),)
_TOP_K: Fields = (("num_experts_per_tok", "top_k"),)
_MIXTRAL: Fields = (*_DENSE, ("num_local_experts", "num_experts"), *_TOP_K)
_QWEN3_MOE: Fields = (
    ("moe_intermediate_size", "intermediate_size"),
    ("num_experts", "num_experts"),
    *_TOP_K,
    ("norm_topk_prob", "normalize"),
)
_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
# The one value that our Llama computes, and what it cannot do otherwise.
_FIXED = {
    "hidden_act": ("silu", "computes no other activation"),
    "attention_bias": (False, "has no biases in its attention"),
}
_WINDOWS = "does not limit its attention to windows"
_QWEN3 = {**_FIXED, "use_sliding_window": (False, _WINDOWS)}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        model_type: of config.json.
        architecture: likewise.
        fields: of config.json that the model decides, and ours.
        fixed: fields with the one value that our Llama computes, and what it cannot do otherwise.
        defaults: in transformers; no other field may be missing.
        also: other names of fields, which some versions of transformers write.
        experts: whether there are any.
        qk_norm: whether queries and keys are normalised.
    """

    model_type: str
    architecture: str
    fields: Fields
    fixed: dict[str, tuple[Any, str]]
    defaults: dict[str, Any]
    also: dict[str, str] = dataclasses.field(default_factory=dict)
    experts: bool = False
    qk_norm: bool = False

    def fits(self, config: LlamaConfig) -> bool:
        """Says whether a model is of this kind."""
        if (config.num_experts > 0, config.qk_norm) != (self.experts, self.qk_norm):
            return False
        routing, names = config.routing, {ours for _, ours in self.fields}
        usual = Routing(
            normalize=routing.normalize if "normalize" in names else True,
            aux_loss=routing.aux_loss,  # how it is trained
            z_loss_coeff=routing.z_loss_coeff,
        )
        return not self.experts or (routing == usual and not config.shared_hidden)


KINDS: tuple[Kind, ...] = (
    Kind(
        "llama",
        "LlamaForCausalLM",
        (*_FIELDS[:6], *_DENSE, *_FIELDS[6:]),
        {**_FIXED, "mlp_bias": (False, "has no biases in its MLP")},
        _DEFAULTS,
    ),
    Kind(
        "mixtral",
        "MixtralForCausalLM",
        (*_FIELDS, *_MIXTRAL),
        {
            **{name: fixed for name, fixed in _FIXED.items() if name != "attention_bias"},
            "sliding_window": (None, _WINDOWS),
            "router_jitter_noise": (0.0, "has no jitter in its routers"),
        },
        {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "tie_word_embeddings": False},
        experts=True,
    ),
    Kind("qwen3", "Qwen3ForCausalLM", (*_FIELDS, *_DENSE), _QWEN3, {**_DEFAULTS, "head_dim": 128}, qk_norm=True),
    Kind(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (*_FIELDS, *_QWEN3_MOE),
        {
            **_QWEN3,
            "decoder_sparse_step": (1, "has experts in every layer or in none"),
            "mlp_only_layers": ([], "has experts in every layer or in none"),
        },
        {**_DEFAULTS, "norm_topk_prob": False},
        {"num_experts": "num_local_experts"},
        experts=True,
        qk_norm=True,
    ),
)
