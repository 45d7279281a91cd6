"""Hugging Face's config.json of a Llama, and ours."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..models import LlamaConfig
from ._encoding import Encoding

CONFIG_FILE = "config.json"
QUANTIZATION_FILE = "hf_quant_config.json"

_ARCHITECTURE, _MODEL_TYPE = "LlamaForCausalLM", "llama"

# Theirs, ours.
_FIELDS = (
    ("vocab_size", "vocab"),
    ("hidden_size", "dim"),
    ("num_hidden_layers", "layers"),
    ("num_attention_heads", "heads"),
    ("num_key_value_heads", "kv_heads"),
    ("head_dim", "head_dim"),
    ("intermediate_size", "ffn"),
    ("rms_norm_eps", "eps"),
    ("rope_theta", "rope_theta"),
    ("tie_word_embeddings", "tied"),
)
# Of which types they are, in JSON; sizes are whole numbers.
_TYPES: dict[str, tuple[type, ...]] = {"eps": (int, float), "rope_theta": (int, float), "tied": (bool,)}
# What LlamaConfig of transformers takes where a field is missing; of the others, none may be.
_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": False}
# Fields with the one value that our Llama computes, and what it has not got otherwise.
_FIXED = {
    "hidden_act": ("silu", "another activation"),
    "attention_bias": (False, "biases in the attention"),
    "mlp_bias": (False, "biases in the MLP"),
    "quantization_config": (None, "an import of quantized weights"),
}


def write_config(
    path: Path, config: LlamaConfig, encoding: Encoding, imported: dict[str, Any], max_positions: int | None
) -> None:
    """Writes config.json; and, for quantized weights, hf_quant_config.json.

    Args:
        path: the directory.
        config: sizes of the model.
        encoding: of the weights.
        imported: the config.json that the model once came with; what it says of other things is kept.
        max_positions: longest sequence that readers should allow; if `None`, as imported, or what readers assume.
    """
    fields = {
        **imported,
        "architectures": [_ARCHITECTURE],
        "model_type": _MODEL_TYPE,
        **{theirs: getattr(config, ours) for theirs, ours in _FIELDS},
        "rope_scaling": None,
        **{name: value for name, (value, _) in _FIXED.items() if value is not None},
        "torch_dtype": encoding.dtype,
    }
    fields.pop("rope_parameters", None)  # transformers 5 says there what `rope_theta` and `rope_scaling` say
    fields.pop("dtype", None)
    if max_positions is not None:
        fields["max_position_embeddings"] = max_positions
    if encoding.quantized is not None:
        fields["quantization_config"] = encoding.quantized.config_json()
        (path / QUANTIZATION_FILE).write_text(json.dumps(encoding.quantized.quant_json(), indent=2) + "\n")
    (path / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n")


def read_config(path: Path) -> tuple[LlamaConfig, dict[str, Any]]:
    """Reads config.json.

    Args:
        path: the directory.

    Returns:
        Sizes of the model, and the file's whole content.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if it is of a model that our Llama does not compute, naming what.
    """
    file = path / CONFIG_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{path} has no {CONFIG_FILE}. Give a directory with a Hugging Face model.")
    try:
        found = json.loads(file.read_text())
        names = found.get("architectures") or [_ARCHITECTURE]
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is not a JSON object ({error}). Download or write it again.") from error
    if found.get("model_type") != _MODEL_TYPE or names != [_ARCHITECTURE]:
        raise ValueError(
            f"{file} has model_type {found.get('model_type')!r} and architectures {names}; {_MODEL_TYPE!r} and "
            f"{[_ARCHITECTURE]} are wanted. Only Llamas can be imported."
        )
    for name, (value, what) in _FIXED.items():
        if name in found and found[name] != value:
            raise ValueError(f"{file} has {name} {found[name]!r}, {value!r} is wanted: gtp_jax has not got {what}.")
    fields = {**_DEFAULTS, **found, **_rotary(file, found)}
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = fields.get("num_attention_heads")
    wrong = [
        f"{theirs} {fields[theirs]!r}"
        for theirs, ours in _FIELDS
        if fields.get(theirs) is not None and not _is_of(fields[theirs], _TYPES.get(ours, (int,)))
    ]
    if wrong:
        raise ValueError(
            f"{file} has {', '.join(wrong)}: sizes are whole numbers, others finite numbers of at least 0, true or "
            "false. Take the config.json that belongs to the weights."
        )
    if fields.get("head_dim") is None and fields.get("hidden_size") and fields.get("num_attention_heads"):
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    missing = [theirs for theirs, _ in _FIELDS if fields.get(theirs) is None]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}. Take the config.json that belongs to the weights.")
    try:
        sizes: dict[str, Any] = {ours: fields[theirs] for theirs, ours in _FIELDS}
        return LlamaConfig(**sizes), found
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error


def _rotary(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The base of the rotary wavelengths, from either place where transformers writes it.

    Raises:
        ValueError: if the wavelengths are scaled, of a part of a head, or not the same in all layers.
    """
    for name in ("rope_scaling", "rope_parameters"):
        fields = found.get(name) or {}
        if not isinstance(fields, dict) or any(isinstance(value, dict) for value in fields.values()):
            raise ValueError(f"{file} has {name} {fields!r}; an object of numbers for all layers, or none, is wanted.")
        part = fields.get("partial_rotary_factor", found.get("partial_rotary_factor"))
        if part not in (None, 1):
            raise ValueError(
                f"{file} has partial_rotary_factor {part!r}, 1 or none is wanted: gtp_jax turns whole heads."
            )
        kind = fields.get("rope_type", fields.get("type", "default"))
        if kind != "default":
            raise ValueError(
                f"{file} has {name} of the type {kind!r}, 'default' or none is wanted: gtp_jax computes the rotary "
                "embedding without scaling, and the model would not be the same."
            )
    theta = (found.get("rope_parameters") or {}).get("rope_theta")
    return {} if theta is None else {"rope_theta": theta}


def _is_of(value: Any, types: tuple[type, ...]) -> bool:
    if float in types:
        return type(value) in types and 0 <= value < math.inf
    return type(value) in types
