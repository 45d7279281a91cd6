"""Sizes by name."""

from __future__ import annotations

import dataclasses

from ...ops import RopeScaling
from ._config import LlamaConfig

# (arXiv 2407.21783, table 3)
_8B = LlamaConfig(
    vocab_size=128256, dim=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, rope_theta=500_000.0
)
_70B = dataclasses.replace(_8B, dim=8192, layers=80, heads=64, ffn=28672)
# config.json of meta-llama/Llama-3.1-8B and Llama-3.1-70B
_LLAMA_3_1 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)

PRESETS: dict[str, LlamaConfig] = {
    # trains on a laptop's CPU in minutes
    "tiny": LlamaConfig(vocab_size=256, dim=128, layers=4, heads=8, kv_heads=4, head_dim=32, ffn=384),
    "100m": LlamaConfig(vocab_size=256, dim=1024, layers=8, heads=16, kv_heads=8, head_dim=64, ffn=3072),
    "1b": LlamaConfig(vocab_size=256, dim=2048, layers=20, heads=16, kv_heads=8, head_dim=128, ffn=7168),
    # Mixtral in small: 2 of 8 experts a token
    "tiny-moe": LlamaConfig(
        vocab_size=256, dim=128, layers=4, heads=8, kv_heads=4, head_dim=32, ffn=256, num_experts=8, top_k=2
    ),
    # Mixtral 8x7B (arXiv 2401.04088, table 1)
    "mixtral": LlamaConfig(
        vocab_size=32000,
        dim=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=14336,
        num_experts=8,
        top_k=2,
        rope_theta=1_000_000.0,
    ),
    # the step that the benchmarks time: 3.6 B parameters in matmuls
    "reference": LlamaConfig(vocab_size=32768, dim=4096, layers=16, heads=32, kv_heads=8, head_dim=128, ffn=14336),
    # Llama 3 and 3.1
    "8b": _8B,
    "8b-3.1": dataclasses.replace(_8B, rope_scaling=_LLAMA_3_1),
    "70b": _70B,
    "70b-3.1": dataclasses.replace(_70B, rope_scaling=_LLAMA_3_1),
    "405b": LlamaConfig(
        vocab_size=128256, dim=16384, layers=126, heads=128, kv_heads=8, head_dim=128, ffn=53248, rope_theta=500_000.0
    ),
}
