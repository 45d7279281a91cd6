"""Presets: configurations by name."""

from __future__ import annotations

from dataclasses import replace

from ...ops import RopeScaling
from ._config import LlamaConfig

# Llama 3 (arXiv 2407.21783, table 3)
_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    rope_theta=500_000.0,
)
_70B = replace(_8B, hidden_size=8192, num_layers=80, num_heads=64, intermediate_size=28672)
# config.json of meta-llama/Llama-3.1-8B and Llama-3.1-70B
_LLAMA_3_1 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)
# one byte per token
_TINY = LlamaConfig(
    vocab_size=256, hidden_size=128, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=32, intermediate_size=384
)
_1B = replace(
    _TINY, hidden_size=2048, num_layers=20, num_heads=16, num_kv_heads=8, head_dim=128, intermediate_size=7168
)

PRESETS: dict[str, LlamaConfig] = {
    # trains on a laptop's CPU in minutes
    "tiny": _TINY,
    "100m": replace(_1B, hidden_size=1024, num_layers=8, head_dim=64, intermediate_size=3072),
    "1b": _1B,
    # a small Mixtral: 2 of 8 experts per token
    "tiny-moe": replace(_TINY, intermediate_size=256, num_experts=8, top_k=2),
    # Mixtral 8x7B (arXiv 2401.04088, table 1)
    "mixtral": replace(_8B, vocab_size=32000, num_experts=8, top_k=2, rope_theta=1_000_000.0),
    # config.json of Qwen/Qwen3-30B-A3B
    "qwen3-30b-a3b": LlamaConfig(
        vocab_size=151936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        qk_norm=True,
        intermediate_size=768,
        num_experts=128,
        top_k=8,
        aux_loss_coeff=0.001,
        rope_theta=1_000_000.0,
        epsilon=1e-6,
    ),
    # config.json of microsoft/phi-4, google/gemma-3-1b-pt and openai/gpt-oss-20b
    "phi4": LlamaConfig(
        vocab_size=100352,
        hidden_size=5120,
        num_layers=40,
        num_heads=40,
        num_kv_heads=10,
        head_dim=128,
        intermediate_size=17920,
        rope_theta=250_000.0,
    ),
    "gemma3-1b": LlamaConfig(
        vocab_size=262144,
        hidden_size=1152,
        num_layers=26,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        intermediate_size=6912,
        window=512,
        full_every=6,
        window_rope_theta=10_000.0,
        rope_theta=1_000_000.0,
        qk_norm=True,
        norm="zero_centered_rms",
        branch_norms=True,
        activation="gelu_tanh",
        scale_embedding=True,
        tie_embeddings=True,
        epsilon=1e-6,
    ),
    "gpt-oss-20b": LlamaConfig(
        vocab_size=201088,
        hidden_size=2880,
        num_layers=24,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=2880,
        num_experts=32,
        top_k=4,
        expert_biases=True,
        swiglu_limit=7.0,
        window=128,
        full_every=2,
        rope_theta=150_000.0,
        rope_scaling=RopeScaling(kind="yarn", factor=32.0, original_length=4096, truncate=False),
        qkv_bias=True,
        out_bias=True,
        sinks=True,
    ),
    # the step that the benchmarks time: 3.6 B parameters in matmuls
    "reference": replace(_8B, vocab_size=32768, num_layers=16, rope_theta=10_000.0),
    # Llama 3 and 3.1
    "8b": _8B,
    "8b-3.1": replace(_8B, rope_scaling=_LLAMA_3_1),
    "70b": _70B,
    "70b-3.1": replace(_70B, rope_scaling=_LLAMA_3_1),
    "405b": replace(_8B, hidden_size=16384, num_layers=126, num_heads=128, intermediate_size=53248),
}
