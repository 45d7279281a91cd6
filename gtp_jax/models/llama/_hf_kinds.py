"""The kinds of Hugging Face models that our Llama computes: the fields of config.json, and values that some must have.

Names and defaults are those of `LlamaConfig`, `MistralConfig`, `MixtralConfig`, `Qwen2Config`, `Qwen3Config`,
`Qwen3MoeConfig`, `Gemma3TextConfig`, `Phi3Config` and `GptOssConfig` in transformers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ...experts import Routing
from ._config import LlamaConfig

Fields = tuple[tuple[str, str], ...]

# Their name, our name.
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
# Fields for which our Llama supports only one value: the value, and the reason.
_FIXED = {
    "hidden_act": ("silu", "computes no other activation"),
}
_NO_BIAS = {**_FIXED, "attention_bias": (False, "has no bias in the output of its attention")}
# The fields that determine what a token attends to.
_WINDOW = ("sliding_window",)
_SWITCHED_WINDOW = (*_WINDOW, "use_sliding_window")
_WINDOW_OF_LAYERS = (*_SWITCHED_WINDOW, "max_window_layers", "layer_types")
_QWEN = {**_DEFAULTS, "num_key_value_heads": 32, "use_sliding_window": False, "sliding_window": 4096}
# Layers before `max_window_layers` have no window. Qwen3's mixtures of experts do not read this field.
_QWEN_DENSE = {**_QWEN, "max_window_layers": 28}


# Fields of `LlamaConfig` that have their default unless a kind says otherwise.
OF_KIND = (
    "qk_norm",
    "qkv_bias",
    "norm",
    "branch_norms",
    "activation",
    "scale_embedding",
    "query_pre_attn_scalar",
    "rotary_dim",
    "window_rope_theta",
    "out_bias",
    "sinks",
    "expert_biases",
    "swiglu_limit",
    "swiglu_alpha",
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        model_type: the `model_type` in config.json.
        architecture: the entry of `architectures` in config.json.
        fields: the fields of config.json that the model determines: their name, our name.
        fixed: fields for which our Llama supports only one value: the value, and the reason.
        defaults: the defaults of fields in transformers. No other field of `fields` may be missing, except
            `num_key_value_heads` and `head_dim`, which follow from the query heads and the hidden size.
        also: other names that some versions of transformers write for fields: the usual name, the other name.
        experts: whether the model has experts.
        parts: the fields of `LlamaConfig` in which all models of this kind differ from the default.
        windows: the fields that determine what a token attends to; empty if the kind has no window.
        full_every: for a kind in which only some layers have a window, the default of `LlamaConfig.full_every`; `None`
            for a kind with a window in all layers or in none.
        scalings: the kinds of `RopeScaling` that transformers computes for it.
        others: fields that do not determine what is computed, whose defaults in transformers may not fit the model.
        scaling: what transformers assumes if a config.json has no `rope_scaling`; `None` for no scaling.
    """

    model_type: str
    architecture: str
    fields: Fields
    fixed: dict[str, tuple[Any, str]]
    defaults: dict[str, Any]
    also: dict[str, str] = dataclasses.field(default_factory=dict)
    experts: bool = False
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    windows: tuple[str, ...] = ()
    full_every: int | None = None
    scalings: tuple[str, ...] = ("linear", "llama3", "yarn")
    others: dict[str, Any] = dataclasses.field(default_factory=dict)
    scaling: dict[str, Any] | None = None

    def fits(self, config: LlamaConfig) -> bool:
        """Returns whether a model is of this kind."""
        routing, names = config.routing, {ours for _, ours in self.fields}
        wanted = {name: getattr(LlamaConfig, name) for name in OF_KIND if name not in names} | self.parts
        if any(getattr(config, name) != value for name, value in wanted.items()):
            return False
        if (config.num_experts > 0) != self.experts:
            return False
        if config.rope_scaling is None:
            if self.scaling is not None:
                return False
        elif config.rope_scaling.kind not in self.scalings:
            return False
        if "swiglu_limit" in names and config.swiglu_limit is None:
            return False
        if (config.window is not None and not self.windows) or (config.full_every and not self.full_every):
            return False
        if "window_rope_theta" in names and config.window_rope_theta is None and config.rope_scaling is not None:
            return config.window is None  # these files scale only the frequencies of layers without a window
        usual = Routing(
            normalize=routing.normalize if "normalize" in names else True,
            aux_loss=routing.aux_loss,  # this and the next only matter in training
            z_loss_coeff=routing.z_loss_coeff,
        )
        return not self.experts or (routing == usual and not config.shared_hidden)


# If a model fits several kinds, it is exported as the first unless it was imported as another.
KINDS: tuple[Kind, ...] = (
    Kind(
        "llama",
        "LlamaForCausalLM",
        (*_FIELDS[:6], *_DENSE, *_FIELDS[6:]),
        {**_NO_BIAS, "mlp_bias": (False, "has no biases in its MLP")},
        _DEFAULTS,
    ),
    Kind(
        "mistral",
        "MistralForCausalLM",
        (*_FIELDS, *_DENSE),
        _FIXED,
        {**_DEFAULTS, "num_key_value_heads": 8, "sliding_window": 4096},
        windows=_WINDOW,
    ),
    Kind(
        "mixtral",
        "MixtralForCausalLM",
        (*_FIELDS, *_MIXTRAL),
        {**_FIXED, "router_jitter_noise": (0.0, "has no jitter in its routers")},
        {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "tie_word_embeddings": False, "num_key_value_heads": 8},
        experts=True,
        windows=_WINDOW,
    ),
    Kind(
        "qwen2",
        "Qwen2ForCausalLM",
        (*_FIELDS, *_DENSE),
        _FIXED,
        _QWEN_DENSE,
        parts={"qkv_bias": True},
        windows=_WINDOW_OF_LAYERS,
    ),
    Kind(
        "qwen3",
        "Qwen3ForCausalLM",
        (*_FIELDS, *_DENSE),
        _NO_BIAS,
        {**_QWEN_DENSE, "head_dim": 128},
        parts={"qk_norm": True},
        windows=_WINDOW_OF_LAYERS,
    ),
    Kind(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        (*_FIELDS, *_QWEN3_MOE),
        {
            **_NO_BIAS,
            "decoder_sparse_step": (1, "has experts in every layer or in none"),
            "mlp_only_layers": ([], "has experts in every layer or in none"),
        },
        {**_QWEN, "num_key_value_heads": 4, "norm_topk_prob": False},
        {"num_experts": "num_local_experts"},
        experts=True,
        parts={"qk_norm": True},
        windows=_SWITCHED_WINDOW,
    ),
    Kind(
        "phi3",
        "Phi3ForCausalLM",
        (*_FIELDS, *_DENSE, ("partial_rotary_factor", "rotary_dim")),
        _NO_BIAS,
        {**_DEFAULTS, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        windows=_WINDOW,
        scalings=(),
        others={"pad_token_id": None},  # otherwise 32000, which transformers refuses for smaller vocabularies
    ),
    Kind(
        "gemma3_text",
        "Gemma3ForCausalLM",
        (
            *_FIELDS,
            *_DENSE,
            ("query_pre_attn_scalar", "query_pre_attn_scalar"),
            ("rope_local_base_freq", "window_rope_theta"),
        ),
        {
            "hidden_activation": ("gelu_pytorch_tanh", "computes no other activation for this kind"),
            "attention_bias": _NO_BIAS["attention_bias"],
            "attn_logit_softcapping": (None, "has no soft cap"),
            "final_logit_softcapping": (None, "has no soft cap"),
            "use_bidirectional_attention": (False, "attends only to earlier tokens"),
        },
        {
            **{**_DEFAULTS, "rope_theta": 1_000_000.0, "tie_word_embeddings": True},
            **{"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256},
            **{"rope_local_base_freq": 10_000.0, "sliding_window": 4096, "sliding_window_pattern": 6},
        },
        parts={
            **{"qk_norm": True, "norm": "zero_centered_rms", "branch_norms": True},
            **{"activation": "gelu_tanh", "scale_embedding": True},
        },
        windows=("sliding_window", "layer_types"),
        full_every=6,
    ),
    Kind(
        "gpt_oss",
        "GptOssForCausalLM",
        (*_FIELDS, *_MIXTRAL, ("swiglu_limit", "swiglu_limit"), ("swiglu_alpha", "swiglu_alpha")),
        {**_FIXED, "attention_bias": (True, "has biases in the attention of this kind")},
        {
            **{"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "tie_word_embeddings": False, "num_key_value_heads": 8},
            **{"head_dim": 64, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "swiglu_alpha": 1.702},
            **{"sliding_window": 128},
        },
        experts=True,
        parts={"qkv_bias": True, "out_bias": True, "sinks": True, "expert_biases": True},
        windows=("sliding_window", "layer_types"),
        full_every=2,
        scaling={
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
    ),
)
