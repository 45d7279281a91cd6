"""The table of all families of models. Register a new family here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from flax import nnx

from ._family import Family, HuggingFace, ModelConfig
from .llama import LLAMA

FAMILIES: tuple[Family, ...] = (LLAMA,)

# The presets of all families by name.
PRESETS: dict[str, ModelConfig] = {name: config for family in FAMILIES for name, config in family.presets.items()}


def family_of(config: ModelConfig) -> Family:
    """Returns the family of a configuration.

    Raises:
        TypeError: if it belongs to no family.
    """
    for family in FAMILIES:
        if isinstance(config, family.config):
            return family
    known = ", ".join(family.config.__name__ for family in FAMILIES)
    raise TypeError(f"`config` is {config!r}; it must be a configuration of a known family: {known}.")


def hugging_face_of(config: ModelConfig, model_type: str | None = None) -> HuggingFace:
    """Returns the layout in which Hugging Face stores a model.

    Args:
        config: the configuration of the model.
        model_type: the model_type of the config.json that the model came with. It selects one of several layouts that
            fit. If none of these has it, the first is used.

    Raises:
        TypeError: if the configuration belongs to no family.
        ValueError: if no layout fits; the message lists the known ones.
    """
    family = family_of(config)
    fitting = [layout for layout in family.hugging_face if layout.fits(config)]
    if fitting:
        return next((layout for layout in fitting if layout.model_type == model_type), fitting[0])
    known = ", ".join(layout.architecture for layout in family.hugging_face)
    raise ValueError(
        f"the model is none of {known}, the only ones that can be converted; it has {config.architecture()}. Read its "
        "parameters from the checkpoint with `gtp_jax.checkpoint.Checkpoints.restore_params`."
    )


def saved(config: ModelConfig) -> dict[str, Any]:
    """Returns the description of a model that a checkpoint stores in `extra`."""
    return {"family": family_of(config).name, "model": config.architecture()}


def saved_architecture(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that `saved` recorded of a checkpoint's model, by name.

    Raises:
        KeyError: if `extra` does not describe the model.
        TypeError: if the description is not a dict.
    """
    fields = extra["model"]
    if not isinstance(fields, Mapping):
        raise TypeError(f"its model is {fields!r}; it must be a dict of the configuration's fields")
    return dict(fields)


def saved_config(extra: Mapping[str, Any]) -> ModelConfig:
    """Returns the configuration of a checkpoint's model, from what `saved` wrote.

    Raises:
        KeyError: if `extra` does not describe the model.
        TypeError: if the family or the fields are not those of this version.
        ValueError: if the configuration refuses a value.
    """
    name = extra.get("family", LLAMA.name)  # missing if a user saved `{"model": config.architecture()}`
    families = {family.name: family for family in FAMILIES}
    if name not in families:
        raise TypeError(f"its family is {name!r}; the known families are {', '.join(families)}")
    return families[name].config(**saved_architecture(extra))


def build(config: ModelConfig, *, rngs: nnx.Rngs) -> nnx.Module:
    """Builds the model of a configuration, with new parameters."""
    return family_of(config).model(config, rngs=rngs)


def preset_of(name: str) -> ModelConfig:
    """Returns the configuration of a preset.

    Raises:
        ValueError: if there is no preset of this name.
    """
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown `preset` {name!r}; the known presets are {', '.join(PRESETS)}.{hint}")
    return PRESETS[name]
