"""The file config.json of a Hugging Face model; which field is which of ours, each family knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._foreign import brief, inside, read_json
from ..models import FAMILIES, HuggingFace, ModelConfig, hugging_face_of
from ._encoding import Encoding
from ._stored import StoredAs, stored_as

CONFIG_FILE = "config.json"
QUANTIZATION_FILE = "hf_quant_config.json"

# Far beyond published models: a mistake, or a file made to take memory and time.
_MAX_LAYERS = 10_000
_MAX_EXPERTS = 100_000  # of all layers
_MAX_BYTES = 4 << 20

_QUANTIZATION = "quantization_config"
_ROTARY = {"rope_theta", "rope_scaling"}
_SCALINGS = ("rope_scaling", "rope_parameters")


def write_config(
    path: Path, config: ModelConfig, encoding: Encoding, imported: Mapping[str, Any], max_positions: int | None
) -> None:
    """Writes config.json; and, for quantized weights, hf_quant_config.json.

    Args:
        path: the directory.
        config: sizes of the model.
        encoding: of the weights.
        imported: the config.json that the model once came with. Its fields are kept as they are, but for an empty
            scaling, and none is added, unless the model has another value than readers of the file take, those of
            transformers 4 included.
        max_positions: longest sequence that readers should allow; if `None`, as imported, or what readers assume.
    """
    # one that is empty says nothing, and transformers 4 fails on it
    imported = {name: value for name, value in imported.items() if not (name in _SCALINGS and value == {})}
    family = hugging_face_of(config, imported.get("model_type"))
    own = {"architectures": [family.architecture], "model_type": family.model_type, **family.to_json(config)}
    changed = _changed(family, own, imported)
    if _ROTARY & changed.keys():
        changed |= {name: own[name] for name in _ROTARY}
        imported = {name: value for name, value in imported.items() if name != "rope_parameters"}  # which says the same
    elif _ROTARY & _changed(family, own, _as_read_before_5(imported)).keys():
        changed |= {name: own[name] for name in _ROTARY if imported.get(name) is None and own[name] is not None}
    fields = {**imported, **changed}
    names = [name for name in ("torch_dtype", "dtype") if name in imported]  # the latter in newer files
    fields |= dict.fromkeys(names or ["torch_dtype"], encoding.dtype)
    if max_positions is not None:
        fields["max_position_embeddings"] = max_positions
    if encoding.quantized is not None:
        fields[_QUANTIZATION] = encoding.quantized.config_json()
        (path / QUANTIZATION_FILE).write_text(json.dumps(encoding.quantized.quant_json(), indent=2) + "\n")
    (path / CONFIG_FILE).write_text(json.dumps(fields, indent=2) + "\n")


def _as_read_before_5(imported: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config.json without those of the rotary embedding that transformers 4 does not read; it
    takes defaults for them, and says nothing."""
    fields = {name: value for name, value in imported.items() if name != "rope_parameters"}
    if isinstance(scaling := fields.get("rope_scaling"), dict):
        fields["rope_scaling"] = {name: value for name, value in scaling.items() if name != "rope_theta"}
    return fields


def _changed(family: HuggingFace, own: Mapping[str, Any], imported: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those fields of a model that are not those of the config.json that it came with.

    A field may be written in several ways (a size left to a default, scalings in two places), so the file is read as at
    its import, and what it means is compared.
    """
    if imported.get("model_type") != family.model_type:
        return dict(own)
    try:
        theirs = family.to_json(family.from_json(dict(imported), CONFIG_FILE))
    except ValueError:  # of another version, or no config.json at all
        return dict(own)
    theirs |= {"model_type": family.model_type, "architectures": imported.get("architectures")}
    return {name: value for name, value in own.items() if theirs.get(name) != value}


def read_config(path: Path) -> tuple[ModelConfig, dict[str, Any], StoredAs | None]:
    """Reads config.json.

    Args:
        path: the directory.

    Returns:
        Sizes of the model; the file's whole content, but for how weights are quantized, because a checkpoint holds
        their values; and how they are.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if the directory is a file, or it is of a model that no family computes, naming what.
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
    """Returns what config.json would say of weights of an older ModelOpt, which writes a file of its own."""
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
    """Checks that a foreign model has not so many layers and experts that its tensors cannot be listed.

    Raises:
        ValueError: saying how many it has.
    """
    if config.num_layers > _MAX_LAYERS:
        raise ValueError(f"{where} has {config.num_layers} layers; at most {_MAX_LAYERS} can be converted.")
    experts = config.num_layers * getattr(config, "num_experts", 0)
    if experts > _MAX_EXPERTS:
        raise ValueError(f"{where} has {experts} experts in all layers; at most {_MAX_EXPERTS} can be converted.")
