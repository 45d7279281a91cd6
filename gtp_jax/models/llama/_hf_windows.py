"""Converts attention windows from and to Hugging Face's config.json: one for all layers, or none.

All layers of our stack run the same program, so they all have the same window.
"""

from __future__ import annotations

from typing import Any

from ..._foreign import brief
from ._config import LlamaConfig
from ._hf_kinds import Kind

_WINDOWED, _WHOLE = "sliding_attention", "full_attention"
_SUPPORTED = "gtp_jax's Llama has one window in all layers or in none"


def window_json(kind: Kind, config: LlamaConfig) -> dict[str, Any]:
    """Returns the fields of config.json that determine what a token attends to."""
    windowed = config.window is not None
    fields = {
        "sliding_window": config.window,
        "use_sliding_window": windowed,
        "max_window_layers": 0 if windowed else config.num_layers,
        "layer_types": [_WINDOWED if windowed else _WHOLE] * config.num_layers,
    }
    return {name: fields[name] for name in kind.windows}


def window_from(kind: Kind, fields: dict[str, Any], file: str) -> int | None:
    """Returns the window of all layers; `None` if there is none.

    Args:
        kind: the kind of model.
        fields: the fields of config.json, with defaults; `num_hidden_layers` has been checked.
        file: the name of the file, for messages.

    Raises:
        ValueError: if only some layers have a window, or a field has the wrong type or is out of range.
    """
    if not kind.windows:
        return None
    used = fields.get("use_sliding_window") if "use_sliding_window" in kind.windows else True
    if not isinstance(used, bool | None):
        raise ValueError(f"{file} has use_sliding_window {brief(used)}; true or false is expected.")
    window = fields.get("sliding_window") if used else None
    if window is not None and (type(window) is not int or not 1 <= window < 1 << 31):
        raise ValueError(
            f"{file} has sliding_window {brief(window)}; a number of tokens, at least 1 and below 2**31, or null for "
            "none, is expected."
        )
    layers: int = fields["num_hidden_layers"]
    types, first = fields.get("layer_types"), fields.get("max_window_layers")
    if types is not None:
        wanted = _WHOLE if window is None else _WINDOWED
        if not isinstance(types, list) or len(types) != layers or any(one != wanted for one in types):
            raise ValueError(
                f"{file} has layer_types {brief(types)}, but {window or 'no'} sliding_window is used; {wanted!r} for "
                f"each of {layers} layers, or null, is expected: {_SUPPORTED}."
            )
        return window
    if window is None or first is None:
        return window
    if type(first) is not int or 0 < first < layers or (first > 0 and "max_window_layers" not in kind.windows):
        raise ValueError(
            f"{file} has max_window_layers {brief(first)} with {layers} layers, so the window of {window} tokens would "
            f"not apply to all layers; 0, or use_sliding_window false, is expected: {_SUPPORTED}."
        )
    return window if first <= 0 else None
