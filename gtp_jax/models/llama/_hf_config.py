"""Converts between Hugging Face's config.json and `LlamaConfig`, and refuses models that our Llama cannot compute."""

from __future__ import annotations

import math
from typing import Any

from ..._foreign import brief
from ...experts import Routing
from ...ops import MOST, RopeScaling
from .._origin import POSITIONS
from ._config import LlamaConfig
from ._hf_kinds import Kind
from ._hf_windows import rotary_apart, window_from, window_json

# The types of fields in JSON. Fields that are not listed are sizes, which are whole numbers.
_NUMBER: tuple[type, ...] = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    "epsilon": _NUMBER,
    "rope_theta": _NUMBER,
    "window_rope_theta": _NUMBER,
    "rotary_dim": _NUMBER,
    "swiglu_limit": _NUMBER,
    "swiglu_alpha": _NUMBER,
    "tie_embeddings": (bool,),
    "normalize": (bool,),
}


def to_json(kind: Kind, config: LlamaConfig) -> dict[str, Any]:
    """Returns the fields of config.json that the model determines."""
    return {
        **{theirs: _value(config, ours) for theirs, ours in kind.fields},
        "rope_scaling": _scaling_json(config.rope_scaling),
        **_positions_json(config.rope_scaling),
        **window_json(kind, config),
        **kind.others,
        **{name: value for name, (value, _) in kind.fixed.items() if value is not None},
    }


def _value(config: LlamaConfig, ours: str) -> Any:
    """Returns the value of a field; if it is `None`, the number that it means."""
    if ours == "normalize":
        return config.routing.normalize
    if ours == "query_pre_attn_scalar":
        return config.query_pre_attn_scalar or config.head_dim
    if ours == "window_rope_theta":
        return config.window_rope_theta or config.rope_theta
    if ours == "rotary_dim":
        return rotary_part(config.rotary_dim or config.head_dim, config.head_dim)
    return getattr(config, ours)


def from_json(kind: Kind, content: dict[str, Any], file: str) -> LlamaConfig:
    """Returns the model of a config.json.

    Args:
        kind: the kind of model.
        content: the content of the file.
        file: the name of the file, for messages.

    Raises:
        ValueError: if our Llama cannot compute the model; the message names the field.
    """
    for name, (value, what) in kind.fixed.items():
        if content.get(name) is not None and content[name] != value:  # null means the default
            raise ValueError(f"{file} has {name} {content[name]!r}; {value!r} is expected: gtp_jax's Llama {what}.")
    if any(ours == "window_rope_theta" for _, ours in kind.fields):
        content = rotary_apart(content, file)
    if kind.scaling is not None and not any(content.get(name) for name in _PLACES):
        content = {**content, "rope_scaling": kind.scaling}
    partial = any(ours == "rotary_dim" for _, ours in kind.fields)
    fields = {**kind.defaults, **content, **_rotary(file, content, partial)}
    fields |= {name: content[other] for name, other in kind.also.items() if name not in content and other in content}
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = fields.get("num_attention_heads")
    wrong = [
        f"{theirs} {brief(fields[theirs])}"
        for theirs, ours in kind.fields
        if fields.get(theirs) is not None and not _is_of(fields[theirs], _TYPES.get(ours, (int,)))
    ]
    if wrong:
        raise ValueError(
            f"{file} has {', '.join(wrong)}: sizes must be whole numbers; other fields must be finite numbers of at "
            "least 0, or true or false. Use the config.json that belongs to the weights."
        )
    if fields.get("head_dim") is None and fields.get("hidden_size") and fields.get("num_attention_heads"):
        fields["head_dim"] = fields["hidden_size"] // fields["num_attention_heads"]
    missing = [theirs for theirs, _ in kind.fields if fields.get(theirs) is None]
    if missing:
        raise ValueError(f"{file} lacks {', '.join(missing)}. Use the config.json that belongs to the weights.")
    count = next((theirs for theirs, ours in kind.fields if ours == "num_experts"), None)
    if count is not None and fields[count] < 1:
        raise ValueError(f"{file} has {count} {fields[count]!r}; a model of type {kind.model_type!r} has at least 1.")
    scaling, (window, full_every) = _scaling(kind, file, content), window_from(kind, fields, file)
    try:
        sizes: dict[str, Any] = {ours: fields[theirs] for theirs, ours in kind.fields}
        routing = {"routing": Routing(normalize=sizes.pop("normalize"))} if "normalize" in sizes else {}
        sizes |= {**routing, **kind.parts, "window": window, "full_every": full_every}
        if sizes.get("query_pre_attn_scalar") == sizes["head_dim"]:
            sizes["query_pre_attn_scalar"] = None
        if partial:
            dims = int(sizes["head_dim"] * sizes["rotary_dim"])
            sizes["rotary_dim"] = None if dims == sizes["head_dim"] else dims
        if window is None:
            sizes.pop("window_rope_theta", None)
        return LlamaConfig(**sizes, rope_scaling=None if scaling is None else RopeScaling(**scaling))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file}: {error}") from error


def rotary_part(dims: int, head_dim: int) -> float:
    """Returns the part of a head of which readers rotate `dims` dimensions: they round the product down."""
    part = dims / head_dim
    return part if int(head_dim * part) == dims else math.nextafter(part, math.inf)


def _rotary(file: str, content: dict[str, Any], partial: bool) -> dict[str, Any]:
    """Returns the base of the rotary wavelengths and, if `partial`, the part of a head that is rotated, from all places
    where transformers writes them.

    Raises:
        ValueError: if only part of a head is rotated although not `partial`, layers differ, the places have different
            bases or different parts of a head, or a place is not an object.
    """
    given, parts = {"rope_theta": content.get("rope_theta")}, {_PART: content.get(_PART)}
    for name in _PLACES:
        fields = {} if content.get(name) is None else content[name]
        if not isinstance(fields, dict) or any(isinstance(value, dict) for value in fields.values()):
            raise ValueError(
                f"{file} has {name} {fields!r}; an object of numbers for all layers, or none, is expected."
            )
        given[f"{name}.rope_theta"] = fields.get("rope_theta")
        parts[f"{name}.{_PART}"] = fields.get(_PART)
    part = _agreed(file, parts)
    if part not in (None, 1) and not partial:
        raise ValueError(f"{file} has {_PART} {part!r}; 1 or none is expected: our Llama rotates whole heads.")
    theta = _agreed(file, given)
    found = {"rope_theta": theta, _PART: part if partial else None}
    return {name: value for name, value in found.items() if value is not None}


def _agreed(file: str, given: dict[str, Any]) -> Any:
    """Returns the common value of the fields that are not `None`; `None` if there is no such field.

    Versions of transformers disagree about which of two different fields applies, so readers would differ.

    Raises:
        ValueError: if two fields differ.
    """
    said = {name: value for name, value in given.items() if value is not None}
    first, *others = said.items() or [("", None)]
    for name, value in others:
        if value != first[1]:
            raise ValueError(
                f"{file} has {first[0]} {first[1]!r} and {name} {value!r}, which contradict each other, and versions "
                "of transformers disagree about which one applies. Keep only the one that the weights were trained "
                "with."
            )
    return first[1]


# The fields in which transformers writes the rotary embedding: up to version 4, which has a separate field for the
# base, and from version 5 on.
_PLACES = ("rope_scaling", "rope_parameters")

_LENGTH = "original_max_position_embeddings"
_PART = "partial_rotary_factor"  # the part of each head that is rotated

# Fields of these that do not scale anything by themselves.
_UNSCALED = ("rope_theta", _PART, _LENGTH)

# The fields of each type of scaling: their name, our name.
_SCALINGS = {
    "linear": (("factor", "factor"),),
    "llama3": (
        ("factor", "factor"),
        ("low_freq_factor", "low_freq_factor"),
        ("high_freq_factor", "high_freq_factor"),
        (_LENGTH, "original_length"),
    ),
    "yarn": (("factor", "factor"), (_LENGTH, "original_length")),
}


def _scaling(model: Kind, file: str, content: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the fields of the scaling of the rotary frequencies, from both places where transformers writes it.

    Raises:
        ValueError: if its type is unknown, or missing although other fields scale; if a field is missing or has a wrong
            value; or if the two places differ.
    """
    given: dict[str, Any] = {}
    for name in _PLACES:
        fields = content.get(name) or {}
        kind = fields.get("rope_type", fields.get("type"))
        _agreed(file, {f"{name}.rope_type": kind, f"{name}.type": fields.get("type")})
        if kind is None or kind == "default":
            given[name] = None if kind is None else {"kind": kind}
            said = [key for key in fields if fields[key] not in (None, kind, 1) and key not in _UNSCALED]
            if said:
                raise ValueError(
                    f"{file} has {name} with {', '.join(said)} and the rope_type {kind!r}, which does not say how to "
                    f"scale. Set rope_type to {' or '.join(_SCALINGS)}, as the weights were trained, or remove these "
                    "fields."
                )
            continue
        if not isinstance(kind, str) or kind not in model.scalings:
            allowed = f"one of {', '.join(model.scalings)} or none" if model.scalings else "none"
            raise ValueError(
                f"{file} has {name} of the type {kind!r}; {allowed} is expected: gtp_jax supports no other scaling of "
                f"the rotary embedding of a model of type {model.model_type!r}, so the results would be wrong."
            )
        if _LENGTH in dict(_SCALINGS[kind]):
            length = _agreed(file, {_LENGTH: content.get(_LENGTH), f"{name}.{_LENGTH}": fields.get(_LENGTH)})
            if length is None and kind == "yarn":  # the same default as in transformers
                length = content.get("max_position_embeddings")
            fields = {**fields, _LENGTH: length}
        lacking = [theirs for theirs, _ in _SCALINGS[kind] if not _is_of(fields.get(theirs), (int, float))]
        if lacking:
            raise ValueError(f"{file} has {name} of the type {kind!r} without numbers for {', '.join(lacking)}.")
        given[name] = {"kind": kind, **{ours: fields[theirs] for theirs, ours in _SCALINGS[kind]}}
        if kind == "yarn":
            given[name] |= _yarn(file, name, fields)
    scaling = _agreed(file, given)
    return None if scaling is None or scaling["kind"] == "default" else scaling


def _yarn(file: str, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the optional fields of YaRN.

    Raises:
        ValueError: if one has the wrong type, or is a number that is out of range.
    """
    optional = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    wrong = [key for key in optional if fields.get(key) is not None and not _is_of(fields[key], _NUMBER)]
    truncate = fields.get("truncate", True)
    if not isinstance(truncate, bool):
        wrong.append("truncate")
    if wrong:
        raise ValueError(
            f"{file} has {name} of the type 'yarn' with {', '.join(f'{key} {brief(fields[key])}' for key in wrong)}; "
            f"truncate must be true or false, and the others must be numbers from 0 to {MOST:.7g}, or null."
        )
    fast, slow, factor, mscale, of_all = (fields.get(key) for key in optional)
    if factor is None and mscale and of_all:
        log = math.log(max(fields["factor"], 1))
        factor = (0.1 * mscale * log + 1) / (0.1 * of_all * log + 1)
    said = {"beta_fast": fast or 32.0, "beta_slow": slow or 1.0, "attention_factor": factor}  # 0 means the default
    return {**said, "truncate": truncate}


def _scaling_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    fields = {theirs: getattr(scaling, ours) for theirs, ours in _SCALINGS[scaling.kind]}
    if scaling.kind == "yarn":
        names = ("beta_fast", "beta_slow", "truncate", "attention_factor")
        fields |= {name: value for name in names if (value := getattr(scaling, name)) is not None}
    return {"rope_type": scaling.kind, **fields}


def _positions_json(scaling: RopeScaling | None) -> dict[str, Any]:
    """Returns `max_position_embeddings` for a model with YaRN, because some releases of transformers 4 compute YaRN's
    factor from it; empty for other models."""
    if scaling is None or scaling.kind != "yarn":
        return {}
    return {POSITIONS: round(scaling.factor * scaling.original_length)}


def _is_of(value: Any, types: tuple[type, ...]) -> bool:
    if float in types:
        return type(value) in types and 0 <= value <= MOST
    return type(value) in types
