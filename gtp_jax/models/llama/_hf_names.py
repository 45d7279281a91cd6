"""Maps the tensors of a Hugging Face Llama to our arrays: the one table.

Both use the half-split rotary embedding, so no rows are permuted.
"""

from __future__ import annotations

from .._tensor import Tensor
from ._config import LlamaConfig

# Theirs, ours, shape of theirs. A norm and the layers it feeds are one module here.
_BEFORE = (("model.embed_tokens.weight", "embed/table", ("vocab_size", "hidden_size")),)
_LAYER = (
    ("input_layernorm.weight", "attention/qkv/scale", ("hidden_size",)),
    ("self_attn.q_proj.weight", "attention/qkv/kernel/query", ("query", "hidden_size")),
    ("self_attn.k_proj.weight", "attention/qkv/kernel/key", ("key", "hidden_size")),
    ("self_attn.v_proj.weight", "attention/qkv/kernel/value", ("key", "hidden_size")),
    ("self_attn.o_proj.weight", "attention/out/kernel", ("hidden_size", "query")),
    ("post_attention_layernorm.weight", "mlp/up/scale", ("hidden_size",)),
    ("mlp.gate_proj.weight", "mlp/up/kernel/gate", ("intermediate_size", "hidden_size")),
    ("mlp.up_proj.weight", "mlp/up/kernel/up", ("intermediate_size", "hidden_size")),
    ("mlp.down_proj.weight", "mlp/down/kernel", ("hidden_size", "intermediate_size")),
)
_AFTER = (("model.norm.weight", "head/scale", ("hidden_size",)),)
# A tied head has no weight of its own.
_HEAD = (("lm_head.weight", "head/kernel", ("vocab_size", "hidden_size")),)


def tensors(config: LlamaConfig) -> list[Tensor]:
    """Returns all tensors of a model, in the order in which Hugging Face writes them.

    Raises:
        ValueError: if the model has experts, whose tensors have other names.
    """
    if config.num_experts:
        raise ValueError(
            f"the model has {config.num_experts} experts in a layer; only Llamas without are converted. Take its "
            "parameters from the checkpoint with `gtp_jax.checkpoint.Checkpoints.restore_params`."
        )
    sizes = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "query": config.num_heads * config.head_dim,
        "key": config.num_kv_heads * config.head_dim,
    }

    def tensor(row: tuple[str, str, tuple[str, ...]], layer: int | None = None) -> Tensor:
        theirs, ours, dims = row
        if layer is not None:
            theirs, ours = f"model.layers.{layer}.{theirs}", f"blocks/layers/{ours}"
        return Tensor(theirs, tuple(sizes[dim] for dim in dims), ours, layer, linear="kernel" in ours.split("/"))

    before = [tensor(row) for row in _BEFORE]
    layers = [tensor(row, layer) for layer in range(config.num_layers) for row in _LAYER]
    after = [tensor(row) for row in (*_AFTER, *(() if config.tie_embeddings else _HEAD))]
    return [*before, *layers, *after]
