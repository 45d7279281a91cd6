"""Hugging Face Llamas made and read without gtp_jax: by the `safetensors` package, numpy, and their documentation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy

TYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "U8": np.uint8,
}

# Grouped queries, a vocabulary and an ffn that need padding on a mesh, and wavelengths that are not the default.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 102,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 7,
}


# Mixtral in small, with as many experts as it has; and Qwen3's, of which a file names other sizes.
_OF_EXPERTS = {"num_hidden_layers": 2, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02, "intermediate_size": 48}
MIXTRAL = {
    **CONFIG,
    **_OF_EXPERTS,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 8,
    "sliding_window": None,
}
QWEN3_MOE = {
    **CONFIG,
    **_OF_EXPERTS,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "intermediate_size": 6144,
    "moe_intermediate_size": 40,
    "norm_topk_prob": False,
    "use_sliding_window": False,
}
# Biases of queries, keys and values alone.
QWEN2 = {
    **CONFIG,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
# Windows in all layers but the third, with a rotary embedding of their own.
GEMMA3 = {
    **CONFIG,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_theta": 100.0,
    "rope_local_base_freq": 20.0,
    "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    "tie_word_embeddings": True,
}
# Queries, keys and values in one tensor, gate and up in another; three quarters of a head are rotated.
PHI3 = {
    **CONFIG,
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "head_dim": 16,
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
    "sliding_window": 7,
    "pad_token_id": 0,
    "eos_token_id": None,
}
# Sinks, biases everywhere, and all experts of a layer in two tensors; a window in every other layer.
GPT_OSS = {
    **CONFIG,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "attention_bias": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_theta": 100.0,
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "original_max_position_embeddings": 64,
    },
    "swiglu_limit": 1.5,  # which clips what random weights give
    "eos_token_id": None,
}
# A window that is shorter than the sequences of tests.
MISTRAL = {**CONFIG, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 7}
# Names of an expert's gate, up and down, below a layer.
_NAMES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


def experts_of(config: dict) -> int:
    """How many experts a layer has."""
    return config.get("num_local_experts", config.get("num_experts", 0))


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes, as transformers' `LlamaForCausalLM` has them."""
    dim, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, dim), "model.norm.weight": (dim,)}
    for i in range(config["num_hidden_layers"]):
        found |= {
            f"model.layers.{i}.input_layernorm.weight": (dim,),
            f"model.layers.{i}.self_attn.q_proj.weight": (query, dim),
            f"model.layers.{i}.self_attn.k_proj.weight": (key, dim),
            f"model.layers.{i}.self_attn.v_proj.weight": (key, dim),
            f"model.layers.{i}.self_attn.o_proj.weight": (dim, query),
            f"model.layers.{i}.post_attention_layernorm.weight": (dim,),
            f"model.layers.{i}.mlp.gate_proj.weight": (ffn, dim),
            f"model.layers.{i}.mlp.up_proj.weight": (ffn, dim),
            f"model.layers.{i}.mlp.down_proj.weight": (dim, ffn),
        }
        if config["model_type"] == "qwen2":
            sizes = {"q": query, "k": key, "v": key}
            found |= {f"model.layers.{i}.self_attn.{x}_proj.bias": (size,) for x, size in sizes.items()}
        if config["model_type"].startswith(("qwen3", "gemma3")):
            found |= {f"model.layers.{i}.self_attn.{x}_norm.weight": (config["head_dim"],) for x in "qk"}
        if config["model_type"].startswith("gemma3"):
            found |= {f"model.layers.{i}.{x}_feedforward_layernorm.weight": (dim,) for x in ("pre", "post")}
        if config["model_type"] == "phi3":
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
                del found[f"model.layers.{i}.{name}.weight"]
            found |= {
                f"model.layers.{i}.self_attn.qkv_proj.weight": (query + 2 * key, dim),
                f"model.layers.{i}.mlp.gate_up_proj.weight": (2 * ffn, dim),
            }
        if config["model_type"] == "gpt_oss":
            experts, at = experts_of(config), f"model.layers.{i}"
            found = {name: shape for name, shape in found.items() if f"{at}.mlp." not in name}
            sizes = {"q": query, "k": key, "v": key, "o": dim}
            found |= {f"{at}.self_attn.{x}_proj.bias": (size,) for x, size in sizes.items()}
            found |= {
                f"{at}.self_attn.sinks": (config["num_attention_heads"],),
                f"{at}.mlp.router.weight": (experts, dim),
                f"{at}.mlp.router.bias": (experts,),
                f"{at}.mlp.experts.gate_up_proj": (experts, dim, 2 * ffn),
                f"{at}.mlp.experts.gate_up_proj_bias": (experts, 2 * ffn),
                f"{at}.mlp.experts.down_proj": (experts, ffn, dim),
                f"{at}.mlp.experts.down_proj_bias": (experts, dim),
            }
        elif count := experts_of(config):
            found = {name: shape for name, shape in found.items() if f"model.layers.{i}.mlp." not in name}
            block, names = _NAMES[config["model_type"]]
            width = config.get("moe_intermediate_size", ffn)
            found[f"model.layers.{i}.{block}.gate.weight"] = (count, dim)
            for expert in range(count):
                at = f"model.layers.{i}.{block}.experts.{expert}"
                shapes_of = ((width, dim), (width, dim), (dim, width))
                found |= {f"{at}.{name}.weight": shape for name, shape in zip(names, shapes_of, strict=True)}
    return found if config["tie_word_embeddings"] else {**found, "lm_head.weight": (vocab, dim)}


def random_tensors(config: dict, dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Values that keep activations near one, norms near one."""
    rng = np.random.default_rng(seed)

    def values(name, shape):
        host = rng.standard_normal(shape)
        if "norm" in name:
            return (1 + 0.1 * host).astype(dtype)
        free = "embed" in name or "bias" in name or "sinks" in name
        return (host if free else host / np.sqrt(shape[1])).astype(dtype)

    return {name: values(name, shape) for name, shape in shapes(config).items()}


def write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """A file, by the `safetensors` package."""
    contiguous = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    safetensors.numpy.save_file(contiguous, str(path), {"format": "pt"})


def write_model(folder: Path, tensors: dict[str, np.ndarray], config: dict, files: int = 1) -> Path:
    """A directory, in one file or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        write_file(folder / "model.safetensors", tensors)
        return folder
    where = {name: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(where.values()):
        write_file(folder / file, {name: tensors[name] for name in tensors if where[name] == file})
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_file(path: Path) -> dict[str, np.ndarray]:
    """A file's tensors, by the `safetensors` package."""
    return {
        name: np.frombuffer(tensor["data"], TYPES[tensor["dtype"]]).reshape(tensor["shape"])
        for name, tensor in safetensors.deserialize(path.read_bytes())
    }


def read_model(folder: Path) -> dict[str, np.ndarray]:
    """A directory's tensors, found through the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_file(folder / "model.safetensors")
    where = json.loads(index.read_text())["weight_map"]
    files = {file: read_file(folder / file) for file in set(where.values())}
    assert {name: file for file, held in files.items() for name in held} == where
    return {name: files[file][name] for name, file in where.items()}


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    """The same names, dtypes, shapes and bits."""
    assert sorted(found) == sorted(wanted)
    for name, values in wanted.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape), name
        assert found[name].tobytes() == values.tobytes(), name


def scaled(frequency: float, scaling: dict | None) -> float:
    """A rotary frequency as Meta's Llama 3.1 (`apply_scaling` of llama-models) and transformers scale it."""
    if scaling is None:
        return frequency
    if scaling["rope_type"] == "linear":
        return frequency / scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    length, wavelength = scaling["original_max_position_embeddings"], 2 * np.pi / frequency
    if wavelength < length / high:
        return frequency
    if wavelength > length / low:
        return frequency / scaling["factor"]
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / scaling["factor"] + smooth * frequency


def yarn(frequencies: np.ndarray, theta: float, scaling: dict) -> tuple[np.ndarray, float]:
    """The rotary frequencies and the factor of queries and keys, by the defaults of the authors of YaRN."""
    count, factor, length = len(frequencies), scaling["factor"], scaling["original_max_position_embeddings"]
    # the frequency that turns so often in all positions, counted from 0
    numbers = [np.log(length / (2 * np.pi * turns)) / np.log(theta) * count for turns in (32, 1)]
    low, high = max(np.floor(numbers[0]), 0), min(np.ceil(numbers[1]), 2 * count - 1)
    divided = np.clip((np.arange(count) - low) / (high - low), 0, 1)
    return frequencies * (1 - divided + divided / factor), 0.1 * np.log(factor) + 1


def window_of(config: dict) -> int | None:
    """How many tokens a token attends to, where not to all before it."""
    return config.get("sliding_window") if config.get("use_sliding_window", True) else None


def mlp(h: np.ndarray, linear: Callable, gate: str, up: str, down: str) -> np.ndarray:
    """Silu of the gate, times up, through down."""
    gated = linear(h, gate)
    return linear(gated / (1 + np.exp(-gated)) * linear(h, up), down)


def mixture(h: np.ndarray, at: str, linear: Callable, config: dict) -> np.ndarray:
    """Every token through every expert, and the likeliest ones' sum: `MixtralSparseMoeBlock`, `Qwen3MoeSparseMoeBlock`
    of transformers."""
    block, names = _NAMES[config["model_type"]]
    scores = linear(h, f"{at}{block}.gate.weight")
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    least = np.sort(probs, -1)[..., -config["num_experts_per_tok"], None]
    shares = np.where(probs >= least, probs, 0)
    if config.get("norm_topk_prob", True):
        shares /= shares.sum(-1, keepdims=True)
    outputs = [
        mlp(h, linear, *(f"{at}{block}.experts.{expert}.{name}.weight" for name in names))
        for expert in range(experts_of(config))
    ]
    return sum(shares[..., i, None] * output for i, output in enumerate(outputs))


def logits(tensors: dict[str, np.ndarray], config: dict, tokens: np.ndarray) -> np.ndarray:
    """What transformers' Llama computes, in float64."""
    weights = {name: values.astype(np.float64) for name, values in tensors.items()}
    heads, kv_heads, width = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    batch, length = tokens.shape

    def norm(x, name):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + config["rms_norm_eps"]) * weights[name]

    def linear(x, name):
        return x @ weights[name].T + weights.get(name.replace("weight", "bias"), 0)

    frequencies, amplitude = config["rope_theta"] ** (-np.arange(0, width, 2) / width), 1.0
    scaling = config.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "yarn":
        frequencies, amplitude = yarn(frequencies, config["rope_theta"], scaling)
    else:
        frequencies = [scaled(frequency, scaling) for frequency in frequencies]
    angles = np.concatenate([np.outer(np.arange(length), frequencies)] * 2, -1)[:, None]

    def rotate(x):
        half = np.concatenate([-x[..., width // 2 :], x[..., : width // 2]], -1)
        return amplitude * (x * np.cos(angles) + half * np.sin(angles))

    x = weights["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        h = norm(x, at + "input_layernorm.weight")
        q = linear(h, at + "self_attn.q_proj.weight").reshape(batch, length, heads, width)
        k = linear(h, at + "self_attn.k_proj.weight").reshape(batch, length, kv_heads, width)
        if config["model_type"].startswith("qwen3"):
            q, k = norm(q, at + "self_attn.q_norm.weight"), norm(k, at + "self_attn.k_norm.weight")
        q, k = rotate(q), rotate(k)
        v = linear(h, at + "self_attn.v_proj.weight").reshape(batch, length, kv_heads, width)
        k, v = (np.repeat(t, heads // kv_heads, axis=2) for t in (k, v))
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(width)
        seen = np.tril(np.ones((length, length), bool))
        if (window := window_of(config)) is not None:
            seen &= ~np.tril(seen, -window)
        scores = np.where(seen, scores, -np.inf)
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("bhqk,bkhd->bqhd", weight / weight.sum(-1, keepdims=True), v)
        x = x + linear(mixed.reshape(batch, length, -1), at + "self_attn.o_proj.weight")
        h = norm(x, at + "post_attention_layernorm.weight")
        if experts_of(config):
            x = x + mixture(h, at, linear, config)
        else:
            x = x + mlp(h, linear, *(f"{at}mlp.{name}_proj.weight" for name in ("gate", "up", "down")))
    x = norm(x, "model.norm.weight")
    return linear(x, "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight")
