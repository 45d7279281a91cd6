"""Exports adapters in the format of PEFT."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import check_values
from ..models import ModelConfig, hugging_face_of
from ._adapted import read_adapted
from ._fresh import fresh_directory
from ._safetensors import Entry, Writer

_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_WEIGHT = ".weight"


@dataclasses.dataclass(frozen=True)
class Exported:
    """A description of the adapters that were exported.

    Attributes:
        config: the configuration of the model.
        step: the step of the run.
        tensors: the number of tensors that were written.
        targets: Hugging Face's names of the projections that have adapters.
        values: the formats and dtypes in which the run stored the kernels of these projections, in words.
    """

    config: ModelConfig
    step: int
    tensors: int
    targets: tuple[str, ...]
    values: str


def export_peft(checkpoint: str | Path, out: str | Path, *, step: int | None = None) -> Exported:
    """Writes the adapters of a run in float32, in the files that PEFT's `PeftModel.from_pretrained` reads.

    Args:
        checkpoint: the directory of the run's checkpoints.
        out: a new or an empty directory.
        step: the step to export; by default, the latest.

    Returns:
        A description of the adapters.

    Raises:
        FileNotFoundError: if there is no such step.
        ValueError: if the step is damaged, is not of a run with adapters, or has a model that Hugging Face's files
            cannot describe, or adapters of weights that they store together; or if `out` is not empty.
    """
    run = read_adapted(checkpoint, step)
    adapters = run.adapters
    arrays: dict[str, np.ndarray] = {}
    targets: dict[str, None] = {}
    layout = hugging_face_of(run.config, run.origin.config.get("model_type"))
    for tensor in layout.tensors(run.config):
        adapter = run.beside.get(tensor.path)
        if adapter is not None and tensor.within is not None:
            raise ValueError(
                f"{tensor.path} has adapters, but a model of type {layout.model_type!r} stores it within "
                f"{tensor.name}, for all of which PEFT has one adapter. Merge them instead: `gtp-jax convert merge`."
            )
        if adapter is not None:
            name = tensor.name.removesuffix(_WEIGHT)
            targets[name.rpartition(".")[2]] = None
            for letter, matrix in zip("AB", adapter.read(tensor.layer), strict=True):
                arrays[f"base_model.model.{name}.lora_{letter}{_WEIGHT}"] = matrix.T.astype(np.float32)
    check_values(array for adapter in run.beside.values() for array in adapter.stored)
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": run.origin.config.get("_name_or_path"),
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if float(adapters.alpha).is_integer() else adapters.alpha,
        "lora_dropout": adapters.dropout,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
        "use_rslora": False,
    }
    entries = [Entry(name, "F32", array.shape) for name, array in arrays.items()]
    with fresh_directory(Path(out)) as directory:
        with Writer(directory / _WEIGHTS, entries, {"format": "pt"}) as writer:
            for array in arrays.values():
                writer.write(array)
        (directory / _CONFIG).write_text(json.dumps(fields, indent=2) + "\n")
    return Exported(run.config, run.step, len(entries), tuple(targets), run.values)
