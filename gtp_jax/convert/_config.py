"""Reads and writes config.json of a Hugging Face model. Each family maps its fields to ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._foreign import brief, inside, read_json
from ..models import FAMILIES, POSITIONS, HuggingFace, ModelConfig, hugging_face_of
from ._encoding import Encoding
from ._stored import StoredAs, stored_as

CONFIG_FILE = "config.json"
QUANTIZATION_FILE = "hf_quant_config.json"

# Far beyond published models: more is a mistake, or a file made to exhaust memory and time.
_MAX_LAYERS = 10_000
_MAX_EXPERTS = 100_000  # in all layers together
_MAX_BYTES = 4 << 20

_QUANTIZATION = "quantization_config"
_ROTARY = {"rope_theta", "rope_local_base_freq", "rope_scaling", "partial_rotary_factor"}
_SCALINGS = ("rope_scaling", "rope_parameters")


def write_config(
    path: Path, config: ModelConfig, encoding: Encoding, imported: Mapping[str, Any], max_positions: int | None
) -> None:
    """Writes config.json and, for layouts that have one, hf_quant_config.json.

    Args:
        path: the directory.
        config: the configuration of the model.
        encoding: the encoding of the weights.
        imported: the config.json that the model was imported with. Its fields are kept, unless readers of the file,
            including transformers 4, would then fail or compute another model, or another argument replaces them.
        max_positions: the longest sequence that readers should allow; if `None`, the imported value, the one that the
            model's YaRN scaling leads to, or the readers' default.
    """
    # an empty scaling means nothing, and transformers 4 fails on it
    imported = {name: value for name, value in imported.items() if not (name in _SCALINGS and value == {})}
    family = hugging_face_of(config, imported.get("model_type"))
    own = {"architectures": [family.architecture], "model_type": family.model_type, **family.to_json(config)}
    changed = _changed(family, own, imported)
    if _ROTARY & changed.keys():
        changed |= {name: own[name] for name in own if name in _ROTARY}
        imported = {
            name: value for name, value in imported.items() if name != "rope_parameters"
        }  # another name of them
    elif _ROTARY & _changed(family, own, _as_read_before_5(imported)).keys():
        changed |= {
            name: value
            for name, value in own.items()
            if name in _ROTARY and imported.get(name) is None and value is not None
        }
    fields = {**{name: own[name] for name in (POSITIONS,) if name in own}, **imported, **changed}
    names = [name for name in ("torch_dtype", "dtype") if name in imported]  # newer files have `dtype`
    fields |= dict.fromkeys(names or ["torch_dtype"], encoding.dtype)
    if max_positions is not None:
        fields[POSITIONS] = max_positions
    if encoding.quantized is not None:
        fields[_QUANTIZATION] = encoding.quantized.config_json()
        if (older := encoding.quantized.quant_json()) is not None:
            (path / QUANTIZATION_FILE).write_text(json.dumps(older, indent=2) + "\n")
    (path / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n")


def _as_read_before_5(imported: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config.json without those of the rotary embedding that transformers 4 does not read.

    For these, transformers 4 silently uses defaults.
    """
    fields = {name: value for name, value in imported.items() if name != "rope_parameters"}
    if isinstance(scaling := fields.get("rope_scaling"), dict):
        fields["rope_scaling"] = {name: value for name, value in scaling.items() if name != "rope_theta"}
    return fields


def _changed(family: HuggingFace, own: Mapping[str, Any], imported: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model that differ from the config.json that it came with.

    A field may be written in several ways (a size left to its default, a scaling in two places), so the file is parsed
    as for an import, and the meanings are compared.
    """
    if imported.get("model_type") != family.model_type:
        return dict(own)
    try:
        theirs = family.to_json(family.from_json(dict(imported), CONFIG_FILE))
    except ValueError:  # from another version, or not a config.json
        return dict(own)
    theirs |= {"model_type": family.model_type, "architectures": imported.get("architectures")}
    return {name: value for name, value in own.items() if theirs.get(name) != value}


def read_config(path: Path) -> tuple[ModelConfig, dict[str, Any], StoredAs | None]:
    """Reads config.json.

    Args:
        path: the directory.

    Returns:
        The configuration of the model; the content of the file without its description of quantization, because
        parameters are dequantized; and the layout of quantized weights, `None` if none is quantized.

    Raises:
        FileNotFoundError: if there is no config.json.
        ValueError: if the path is a file; if a file is a link out of the directory, or not JSON of the expected form;
            or if the model or its weights cannot be imported.
    """
    file = path / CONFIG_FILE
    if path.is_file():
        raise ValueError(f"{path} is a file. Give the directory of a Hugging Face model, which holds {CONFIG_FILE}.")
    try:
        place = inside(path, CONFIG_FILE)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} has no {CONFIG_FILE}. Give a directory with a Hugging Face model.") from error
    try:
        fields = read_json(place, limit=_MAX_BYTES)
        kind, names = fields.get("model_type"), fields.get("architectures")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} is not a JSON object ({error}). Download or write it again.") from error
    layouts = [layout for family in FAMILIES for layout in family.hugging_face]
    for theirs in layouts:
        if kind == theirs.model_type and (not names or names == [theirs.architecture]):
            quantization = fields.pop(_QUANTIZATION, None) or _older_quantization(path)
            layout = stored_as(quantization, str(file))
            config = theirs.from_json(fields, str(file))
            check_sizes(config, str(file))
            return config, fields, layout
    known = " or ".join(f"{layout.model_type!r} and {[layout.architecture]}" for layout in layouts)
    raise ValueError(
        f"{file} has model_type {brief(kind)} and architectures {brief(names)}; {known} are expected. "
        "Others cannot be imported."
    )


def _older_quantization(path: Path) -> dict[str, Any] | None:
    """Returns the `quantization_config` of weights from an older ModelOpt, which writes a separate file; `None` if
    there is no such file, or it names no algorithm."""
    file = path / QUANTIZATION_FILE
    try:
        algorithm = read_json(inside(path, QUANTIZATION_FILE), limit=_MAX_BYTES)["quantization"]["quant_algo"]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} has no object `quantization` with `quant_algo` ({error!r}). Download it again."
        ) from error
    return None if algorithm is None else {"quant_method": "modelopt", "quant_algo": algorithm}


def check_sizes(config: ModelConfig, where: str) -> None:
    """Checks that a model has few enough layers and experts for its tensors to be listed.

    Raises:
        ValueError: if it does; the message says how many it has.
    """
    if config.num_layers > _MAX_LAYERS:
        raise ValueError(f"{where} has {config.num_layers} layers; at most {_MAX_LAYERS} can be converted.")
    experts = config.num_layers * getattr(config, "num_experts", 0)
    if experts > _MAX_EXPERTS:
        raise ValueError(f"{where} has {experts} experts in all layers; at most {_MAX_EXPERTS} can be converted.")
