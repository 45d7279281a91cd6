"""Checks and reads what a run starts from: parameters, unless they are random, and a recipe that fits the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from ..checkpoint import Checkpoints
from ..models import ModelConfig, build, saved_architecture
from ..nn import abstract_model, explain
from ..recipes import Quantization
from ._directory import checkpoints_in


def check_start(directory: Path, model: ModelConfig) -> None:
    """Checks that a checkpoint is of a model.

    Raises:
        FileNotFoundError: if there is no checkpoint.
        ValueError: if it is of another model, naming what differs, or does not say of which.
    """
    try:
        theirs = saved_architecture(_open(directory).manifest()["extra"])
    except (KeyError, TypeError):
        raise ValueError(
            f"the checkpoint in {directory} does not say of which model it is, so that a run cannot start from it. "
            "Take one that `gtp-jax train` or `gtp-jax convert import` of this version has written."
        ) from None
    ours = model.architecture()
    lines = [
        f"  {name}: {theirs.get(name)} there, {ours.get(name)} here"
        for name in {**ours, **theirs}
        if theirs.get(name) != ours.get(name)
    ]
    if lines:
        raise ValueError(
            f"the checkpoint in {directory} is of another model than this run's:\n"
            + "\n".join(lines)
            + "\nChoose the --preset, and the --tokenizer, that belong to it."
        )


def check_recipe_fits(quantization: Quantization, model: ModelConfig, mesh: Mesh) -> None:
    """Checks that a model, sharded over a mesh, has what a recipe names.

    Raises:
        ValueError: naming the module, the layers or the format that do not fit.
    """
    with jax.set_mesh(mesh):
        explain(abstract_model(lambda rngs: build(model, rngs=rngs)), quantization.to_recipe())


def start_params(directory: Path, state_like: Any) -> dict[str, Any]:
    """Returns the parameters of the latest step there, on the shardings of a state's."""
    return _open(directory).restore_params(state_like)


def _open(directory: Path) -> Checkpoints:
    return Checkpoints(checkpoints_in(directory.expanduser()), read_only=True)
