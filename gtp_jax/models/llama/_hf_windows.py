"""Converts attention windows from and to Hugging Face's config.json: one for all layers, none, or one for all but every
n-th layer."""

from __future__ import annotations

from typing import Any

from ..._foreign import brief
from ._config import LlamaConfig
from ._hf_kinds import Kind

_WINDOWED, _WHOLE = "sliding_attention", "full_attention"
_SUPPORTED = "gtp_jax's Llama has one window in all layers or in none"
_ROTARY = "rope_parameters"


def window_json(kind: Kind, config: LlamaConfig) -> dict[str, Any]:
    """Returns the fields of config.json that determine what a token attends to."""
    windowed = config.window is not None
    # transformers makes the mask of a window even if no layer of such a kind has one
    unused = kind.defaults["sliding_window"] if kind.full_every else None
    fields = {
        "sliding_window": config.window if windowed else unused,
        "use_sliding_window": windowed,
        "max_window_layers": 0 if windowed else config.num_layers,
        "layer_types": [_WHOLE if reach.window is None else _WINDOWED for reach in config.reaches],
    }
    return {name: fields[name] for name in kind.windows}


def window_from(kind: Kind, fields: dict[str, Any], file: str) -> tuple[int | None, int | None]:
    """Returns `window` and `full_every` of `LlamaConfig`.

    Args:
        kind: the kind of model.
        fields: the fields of config.json, with defaults; `num_hidden_layers` has been checked.
        file: the name of the file, for messages.

    Raises:
        ValueError: if only some layers have a window, except as `full_every` says, or a field has the wrong type or is
            out of range.
    """
    if not kind.windows:
        return None, None
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
    if kind.full_every is not None:
        pattern = fields.get("sliding_window_pattern") if "sliding_window_pattern" in kind.defaults else None
        return _mixed(types, window, layers, kind.full_every if pattern is None else pattern, file)
    if types is not None:
        wanted = _WHOLE if window is None else _WINDOWED
        if not isinstance(types, list) or len(types) != layers or any(one != wanted for one in types):
            raise ValueError(
                f"{file} has layer_types {brief(types)}, but {window or 'no'} sliding_window is used; {wanted!r} for "
                f"each of {layers} layers, or null, is expected: {_SUPPORTED}."
            )
        return window, None
    if window is None or first is None:
        return window, None
    if type(first) is not int or 0 < first < layers or (first > 0 and "max_window_layers" not in kind.windows):
        raise ValueError(
            f"{file} has max_window_layers {brief(first)} with {layers} layers, so the window of {window} tokens would "
            f"not apply to all layers; 0, or use_sliding_window false, is expected: {_SUPPORTED}."
        )
    return (window if first <= 0 else None), None


def _mixed(types: Any, window: int | None, layers: int, usual: Any, file: str) -> tuple[int | None, int | None]:
    """Returns `window` and `full_every` of a kind in which some layers have a window.

    Args:
        types: the types of the layers; `None` if every layer `usual` has no window.
        window: the window.
        layers: the number of layers.
        usual: the pattern of the kind.
        file: the name of the file, for messages.
    """
    if type(usual) is not int or usual < 1:
        raise ValueError(f"{file} has sliding_window_pattern {brief(usual)}; a whole number of at least 1 is expected.")

    def pattern(every: int) -> list[str]:
        return [_WINDOWED if layer % every else _WHOLE for layer in range(1, layers + 1)]

    types = pattern(usual) if types is None else types
    if types == [_WHOLE] * layers:
        return None, None
    if window is None:
        raise ValueError(f"{file} has sliding_window null, but layers with a window. A number of tokens is expected.")
    if types == [_WINDOWED] * layers:
        return window, None
    every = types.index(_WHOLE) + 1 if isinstance(types, list) and _WHOLE in types else 0
    if every and types == pattern(every):
        return window, every
    raise ValueError(
        f"{file} has layer_types {brief(types)}; {_WINDOWED!r} for all of {layers} layers, except {_WHOLE!r} for every "
        "n-th layer, is expected: gtp_jax's Llama has no other pattern."
    )


def rotary_apart(content: dict[str, Any], file: str) -> dict[str, Any]:
    """Returns a config.json whose rotary embeddings by type of layer, as transformers 5 writes them, are instead in the
    fields of transformers 4: that of layers without a window where other kinds have one for all layers, and the base of
    layers with a window in `rope_local_base_freq`.

    Raises:
        ValueError: if there is one for all layers, which transformers does not read; if that of layers with a window is
            scaled; or if two fields contradict each other.
    """
    given = content.get(_ROTARY)
    if not given:
        return content
    own = given.get(_WINDOWED) if isinstance(given, dict) else None
    if not isinstance(own, dict) or not isinstance(given.get(_WHOLE), dict) or len(given) != 2:
        raise ValueError(
            f"{file} has {_ROTARY} {brief(given)}; an object for {_WINDOWED} and one for {_WHOLE}, or none, are "
            "expected."
        )
    scales = {name: value for name, value in own.items() if name != "rope_theta"}
    if scales.get("rope_type", "default") != "default" or scales.keys() - {"rope_type"}:
        raise ValueError(
            f"{file} has {brief(scales)} in {_ROTARY}.{_WINDOWED}; only a rope_theta is expected: gtp_jax's Llama "
            "scales no frequencies of layers with a window in this kind of model."
        )
    old, new = content.get("rope_local_base_freq"), own.get("rope_theta")
    if None not in (old, new) and old != new:
        raise ValueError(
            f"{file} has rope_local_base_freq {brief(old)} and {_ROTARY}.{_WINDOWED}.rope_theta {brief(new)}, which "
            "contradict each other. Keep only the one that the weights were trained with."
        )
    base = {} if new is None else {"rope_local_base_freq": new}
    return {**content, _ROTARY: given[_WHOLE], **base}
