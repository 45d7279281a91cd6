"""Maps the tensors of a Hugging Face Llama to our arrays: the one table.

Both use the half-split rotary embedding, so no rows are permuted.
"""

from __future__ import annotations

from .._tensor import Tensor
from ._config import LlamaConfig

# Theirs, ours, shape of theirs. A norm and the layers it feeds are one module here.
_BEFORE = (("model.embed_tokens.weight", "embed/table", ("vocab_size", "dim")),)
_LAYER = (
    ("input_layernorm.weight", "attention/qkv/scale", ("dim",)),
    ("self_attn.q_proj.weight", "attention/qkv/kernel/query", ("query", "dim")),
    ("self_attn.k_proj.weight", "attention/qkv/kernel/key", ("key", "dim")),
    ("self_attn.v_proj.weight", "attention/qkv/kernel/value", ("key", "dim")),
    ("self_attn.o_proj.weight", "attention/out/kernel", ("dim", "query")),
    ("post_attention_layernorm.weight", "mlp/up/scale", ("dim",)),
    ("mlp.gate_proj.weight", "mlp/up/kernel/gate", ("ffn", "dim")),
    ("mlp.up_proj.weight", "mlp/up/kernel/up", ("ffn", "dim")),
    ("mlp.down_proj.weight", "mlp/down/kernel", ("dim", "ffn")),
)
_AFTER = (("model.norm.weight", "head/scale", ("dim",)),)
# A tied head has no weight of its own.
_HEAD = (("lm_head.weight", "head/kernel", ("vocab_size", "dim")),)


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
        "dim": config.dim,
        "ffn": config.ffn,
        "query": config.heads * config.head_dim,
        "key": config.kv_heads * config.head_dim,
    }

    def tensor(row: tuple[str, str, tuple[str, ...]], layer: int | None = None) -> Tensor:
        theirs, ours, dims = row
        if layer is not None:
            theirs, ours = f"model.layers.{layer}.{theirs}", f"blocks/layers/{ours}"
        return Tensor(theirs, tuple(sizes[dim] for dim in dims), ours, layer, linear="kernel" in ours.split("/"))

    before = [tensor(row) for row in _BEFORE]
    layers = [tensor(row, layer) for layer in range(config.layers) for row in _LAYER]
    after = [tensor(row) for row in (*_AFTER, *(() if config.tied else _HEAD))]
    return [*before, *layers, *after]
