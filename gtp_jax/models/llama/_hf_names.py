"""Maps the tensors of a Hugging Face Llama to our arrays. This is the only such table.

Both use the half-split rotary embedding, so no rows are permuted.
"""

from __future__ import annotations

import dataclasses
import itertools

from .._hf_tensor import Tensor, Within, in_files
from ._config import LlamaConfig

Row = tuple[str, str, tuple[str, ...]]

# Their name, our path, their shape. A norm and the linear layer that follows it are one module here. The norm before
# experts belongs to the `MoE`.
_BEFORE = (("model.embed_tokens.weight", "embed/table", ("vocab_size", "hidden_size")),)
_ATTENTION = (
    ("input_layernorm.weight", "attention/qkv/scale", ("hidden_size",)),
    ("self_attn.q_proj.weight", "attention/qkv/kernel/query", ("query", "hidden_size")),
    ("self_attn.k_proj.weight", "attention/qkv/kernel/key", ("key", "hidden_size")),
    ("self_attn.v_proj.weight", "attention/qkv/kernel/value", ("key", "hidden_size")),
    ("self_attn.o_proj.weight", "attention/out/kernel", ("hidden_size", "query")),
)
_QKV_BIAS = (
    ("self_attn.q_proj.bias", "attention/qkv/bias/query", ("query",)),
    ("self_attn.k_proj.bias", "attention/qkv/bias/key", ("key",)),
    ("self_attn.v_proj.bias", "attention/qkv/bias/value", ("key",)),
)
_QK_NORM = (
    ("self_attn.q_norm.weight", "attention/core/query_scale", ("head_dim",)),
    ("self_attn.k_norm.weight", "attention/core/key_scale", ("head_dim",)),
)
# The norm before the MLP, by whether branches have norms after them too.
_NORM_BEFORE = {False: "post_attention_layernorm.weight", True: "pre_feedforward_layernorm.weight"}
_BRANCH_NORMS = (
    ("post_attention_layernorm.weight", "after_attention/scale", ("hidden_size",)),
    ("post_feedforward_layernorm.weight", "after_mlp/scale", ("hidden_size",)),
)
_OUT_BIAS = (("self_attn.o_proj.bias", "attention/out/bias", ("hidden_size",)),)
_SINKS = (("self_attn.sinks", "attention/core/sinks", ("num_heads",)),)
_MLP = (
    ("mlp.gate_proj.weight", "mlp/up/kernel/gate", ("intermediate_size", "hidden_size")),
    ("mlp.up_proj.weight", "mlp/up/kernel/up", ("intermediate_size", "hidden_size")),
    ("mlp.down_proj.weight", "mlp/down/kernel", ("hidden_size", "intermediate_size")),
)
# The tensors of layers with experts. The {} in the name of an expert's tensor is replaced by the expert's number.
_EXPERTS = {
    "mixtral": (
        ("block_sparse_moe.gate.weight", "mlp/router", ("num_experts", "hidden_size")),
        ("block_sparse_moe.experts.{}.w1.weight", "mlp/up/kernel/gate", ("intermediate_size", "hidden_size")),
        ("block_sparse_moe.experts.{}.w2.weight", "mlp/down/kernel", ("hidden_size", "intermediate_size")),
        ("block_sparse_moe.experts.{}.w3.weight", "mlp/up/kernel/up", ("intermediate_size", "hidden_size")),
    ),
    "qwen3_moe": (
        ("mlp.gate.weight", "mlp/router", ("num_experts", "hidden_size")),
        ("mlp.experts.{}.gate_proj.weight", "mlp/up/kernel/gate", ("intermediate_size", "hidden_size")),
        ("mlp.experts.{}.up_proj.weight", "mlp/up/kernel/up", ("intermediate_size", "hidden_size")),
        ("mlp.experts.{}.down_proj.weight", "mlp/down/kernel", ("hidden_size", "intermediate_size")),
    ),
    "gpt_oss": (
        ("mlp.router.weight", "mlp/router", ("num_experts", "hidden_size")),
        ("mlp.experts.gate_up_proj", "mlp/up/kernel/gate", ("intermediate_size", "hidden_size")),
        ("mlp.experts.gate_up_proj", "mlp/up/kernel/up", ("intermediate_size", "hidden_size")),
        ("mlp.experts.down_proj", "mlp/down/kernel", ("hidden_size", "intermediate_size")),
    ),
}
_EXPERT_BIASES = (
    ("mlp.router.bias", "mlp/router_shift", ("num_experts",)),
    ("mlp.experts.gate_up_proj_bias", "mlp/up_bias/gate", ("num_experts", "intermediate_size")),
    ("mlp.experts.gate_up_proj_bias", "mlp/up_bias/up", ("num_experts", "intermediate_size")),
    ("mlp.experts.down_proj_bias", "mlp/down_bias", ("num_experts", "hidden_size")),
)
# For tensors of all experts of a layer, by our path: their shape, and the features that belong to our array. Gate and
# up alternate.
_GATE, _UP, _EVERY = slice(0, None, 2), slice(1, None, 2), slice(None)
_OF_ALL_EXPERTS = {
    "mlp/up/kernel/gate": (("num_experts", "hidden_size", "gate_up"), _GATE),
    "mlp/up/kernel/up": (("num_experts", "hidden_size", "gate_up"), _UP),
    "mlp/down/kernel": (("num_experts", "intermediate_size", "hidden_size"), _EVERY),
    "mlp/up_bias/gate": (("num_experts", "gate_up"), _GATE),
    "mlp/up_bias/up": (("num_experts", "gate_up"), _UP),
}
# Names that differ from those above. Tensors that get the same name are stored as one, one after the other.
_RENAMED = {
    "phi3": {
        **dict.fromkeys((f"self_attn.{one}_proj.weight" for one in "qkv"), "self_attn.qkv_proj.weight"),
        **dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "mlp.gate_up_proj.weight"),
    }
}
_AFTER = (("model.norm.weight", "head/scale", ("hidden_size",)),)
# A tied head has no kernel of its own.
_HEAD = (("lm_head.weight", "head/kernel", ("vocab_size", "hidden_size")),)


def tensors(model_type: str, config: LlamaConfig) -> list[Tensor]:
    """Returns all tensors of a model, layer after layer, as Hugging Face names them.

    Args:
        model_type: the kind of model, one of Hugging Face's.
        config: the configuration of the model.
    """
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "head_dim": config.head_dim,
        "num_experts": config.num_experts,
        "gate_up": 2 * config.intermediate_size,
        "num_heads": config.num_heads,
        "query": config.num_heads * config.head_dim,
        "key": config.num_kv_heads * config.head_dim,
    }

    def tensor(row: Row, layer: int | None = None, expert: int | None = None) -> Tensor:
        theirs, ours, dims = row
        theirs = _RENAMED.get(model_type, {}).get(theirs, theirs)
        if layer is not None:
            theirs, ours = f"model.layers.{layer}.{theirs.format(expert)}", f"blocks/layers/{ours}"
        linear = "kernel" in ours.split("/") or ours.endswith("/router")
        within = None
        if model_type == "gpt_oss" and row[1] in _OF_ALL_EXPERTS:
            of_all, features = _OF_ALL_EXPERTS[row[1]]
            index = (_EVERY if expert is None else expert, *(_EVERY,) * (len(of_all) - 2), features)
            within = Within(tuple(sizes[dim] for dim in of_all), index, transposed=expert is not None)
        return Tensor(theirs, tuple(sizes[dim] for dim in dims), ours, layer, linear, expert, within)

    biases, norms = _QKV_BIAS if config.qkv_bias else (), _QK_NORM if config.qk_norm else ()
    biases = (*biases, *(_OUT_BIAS if config.out_bias else ()), *(_SINKS if config.sinks else ()))
    after = _BRANCH_NORMS if config.branch_norms else ()
    scale = "mlp/scale" if config.num_experts else "mlp/up/scale"
    before = (_NORM_BEFORE[config.branch_norms], scale, ("hidden_size",))
    common = (*_ATTENTION, *biases, *norms, *after, before)
    if config.num_experts:
        router, *of_expert = _EXPERTS[model_type]
        own = [(row, None) for row in (*common, router, *(_EXPERT_BIASES if config.expert_biases else ()))]
        each = [(row, expert) for expert in range(config.num_experts) for row in of_expert]
        if model_type == "gpt_oss":
            each.sort(key=lambda one: one[0][0])  # parts of one tensor follow each other
        rows = [*own, *each]
    else:
        rows = [(row, None) for row in (*common, *_MLP)]
    first = [tensor(row) for row in _BEFORE]
    layers = [tensor(row, layer, expert) for layer in range(config.num_layers) for row, expert in rows]
    last = [tensor(row) for row in (*_AFTER, *(() if config.tie_embeddings else _HEAD))]
    return [*first, *_stored_together(layers), *last]


def _stored_together(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the tensors. Consecutive ones with the same name and without a place become parts of one tensor, in which
    they follow each other."""
    found = []
    for whole, own in in_files(tensors):
        ends = list(itertools.accumulate(tensor.shape[0] for tensor in own))
        shape = (ends[-1], *whole.shape[1:])
        for tensor, end in zip(own, ends, strict=True):
            rows = slice(end - tensor.shape[0], end)
            alone = len(own) == 1 or tensor.within is not None
            found.append(tensor if alone else dataclasses.replace(tensor, within=Within(shape, (rows,))))
    return found


def copies(config: LlamaConfig) -> dict[str, str]:
    """Returns the tensors that files may hold in addition to the model's, with the tensor that each of them repeats."""
    return {_HEAD[0][0]: _BEFORE[0][0]} if config.tie_embeddings else {}
