"""Loads a model from a checkpoint of a run or of an import."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..checkpoint import Checkpoints, check_values, checkpoints_in
from ..layout import pad
from ..mesh import check_mesh_in_scope
from ..nn import Frozen, abstract_model, freeze, layout_of
from ..recipes import Recipe
from ..variables import logical_shape, padded_layout
from ._adapters import Adapters
from ._base import FROZEN, BaseArray, base_arrays
from ._evaluation import EvaluationArray, evaluation_arrays
from ._families import build, saved_config
from ._family import ModelConfig
from ._stored_codes import take_stored_codes

# The number of rows of a matrix that are read at a time.
_ROWS = 4096
_SHOWN = 8


def load(
    path: str | Path,
    *,
    step: int | None = None,
    dtype: str = "bfloat16",
    param_dtype: str | None = None,
    recipe: Recipe | None = None,
) -> nnx.Module:
    """Returns the model of a checkpoint, sharded over the mesh in scope.

    The model has the weights with which the run evaluates: the averaged weights if the run averages them, otherwise the
    parameters. Nothing else of the optimizer's state is read. The model of a run with adapters has these adapters; all
    other weights are frozen, and stored as values even if the run froze them as codes.

    Arrays are read in parts, and checked against the checkpoint's digests. The host's memory holds a whole stack of
    layers only in the dtype in which devices store it.

    Args:
        path: the directory of a run, or one that `gtp-jax convert import` made.
        step: the step to load; by default, the latest.
        dtype: the compute dtype.
        param_dtype: the dtype in which devices store gathered weights: by default `dtype`, which suits
            `gtp_jax.generation.generate`; `"float32"` for training. Other parameters, such as norms and routers, are in
            float32 or wider.
        recipe: the recipe with which to quantize and freeze the weights, as `gtp_jax.nn.freeze` does. Devices hold them
            in float32 until then, whatever `param_dtype` is. If the model was imported from codes in the recipe's
            format, as Qwen3-FP8 is for `gtp_jax.recipes.FP8Blocks`, the weights have these codes and scales.

    Raises:
        FileNotFoundError: if there is no such directory or step.
        ValueError: if there is no checkpoint, if it is damaged, if this version does not understand its model, if its
            arrays are not those of this model, if it has adapters and `recipe` is given, or if gtp_jax cannot use the
            mesh in scope.
        TypeError, ValueError: with `recipe`, also for the same reasons as `gtp_jax.nn.freeze`.
    """
    check_mesh_in_scope()
    directory, checkpoints = opened(path)
    manifest = checkpoints.manifest(step)
    where = f"step {manifest['step']} in {directory}"
    config = dataclasses.replace(config_of(manifest["extra"], where), dtype=dtype)  # pyright: ignore[reportArgumentType]
    kept = np.dtype(jnp.dtype("float32" if recipe is not None else param_dtype or dtype))
    adapters = Adapters.of(manifest["extra"], where)
    if adapters is not None and recipe is not None:
        raise ValueError(
            f"`recipe` is {type(recipe).__name__}, and {where} has adapters, which were trained beside the values of "
            "another base. Leave it out; or merge them first: `gtp-jax convert merge`."
        )
    if adapters is None:
        model = abstract_model(lambda rngs: build(config, rngs=rngs))
    else:
        model = abstract_model(lambda rngs: adapters.on(build(config, rngs=rngs), rngs))
    _fill(model, checkpoints, manifest, kept, where)
    if recipe is None:
        return model
    frozen = freeze(model, recipe, trained=lambda _, variable: layout_of(variable) is None)
    take_stored_codes(frozen, checkpoints, manifest)
    return frozen


def opened(path: str | Path) -> tuple[Path, Checkpoints]:
    """Returns the directory of checkpoints that a path names, and opens it for reading.

    Raises:
        FileNotFoundError: if there is no such directory. If the path looks like a name on the Hugging Face Hub, the
            message says how to download the model.
        ValueError: if the directory has no complete step, is itself a step, or holds Hugging Face's files.
    """
    given = Path(path).expanduser()
    if not given.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)):
        name = given.name
        raise FileNotFoundError(
            f"no directory {path}. If it is a model on the Hugging Face Hub, download and import it: `hf download "
            f"{path} --local-dir {name}`, and `gtp-jax convert import {name} {name}-imported`."
        )
    directory = checkpoints_in(given)
    if (given / "config.json").is_file() and any(given.glob("*.safetensors")):
        command = shlex.join(["gtp-jax", "convert", "import", str(given), f"{given.resolve().name}-imported"])
        raise ValueError(f"{given} holds Hugging Face's files. Import them: `{command}`.")
    checkpoints = Checkpoints(directory, read_only=True)
    if checkpoints.latest() is None:
        raise ValueError(
            f"no complete step in {directory}. Give the directory of a run that has saved one, or of an import."
        )
    return directory, checkpoints


def config_of(extra: Mapping[str, Any], where: str) -> ModelConfig:
    """Returns the configuration of a checkpoint's model.

    Raises:
        ValueError: if the checkpoint does not describe its model, or does so in a way that this version does not
            understand.
    """
    try:
        return saved_config(extra)
    except (KeyError, TypeError) as error:
        lacks = "does not say which model it contains"
        unknown = f"describes its model in a way that this version does not understand ({error})"
        raise ValueError(
            f"{where} {lacks if isinstance(error, KeyError) else unknown}. Use one that `gtp-jax train` or `gtp-jax "
            "convert import` of this version has written, or save with `gtp_jax.models.saved(config)` as `extra`."
        ) from None


def _fill(model: nnx.Module, checkpoints: Checkpoints, manifest: Mapping[str, Any], kept: np.dtype, where: str) -> None:
    """Fills an abstract model with a checkpoint's arrays.

    Raises:
        ValueError: if the checkpoint has other arrays than the model, or its arrays are damaged.
    """
    variables = {
        "/".join(map(str, path)): v for path, v in nnx.to_flat_state(nnx.state(model, nnx.Any(nnx.Param, Frozen)))
    }
    base = base_arrays(checkpoints, manifest, model)
    has = evaluation_arrays(checkpoints, manifest) | {f"{FROZEN}{path}": array for path, array in base.items()}
    wants = {f"{FROZEN if isinstance(v, Frozen) else 'params/'}{path}": v for path, v in variables.items()}
    shapes = ({name: x.shape for name, x in has.items()}, {name: logical_shape(v) for name, v in wants.items()})
    lines = [
        f"  {name}: {shapes[0].get(name, 'no such array')} found, {shapes[1].get(name, 'no such array')} wanted"
        for name in {**shapes[1], **shapes[0]}
        if shapes[0].get(name) != shapes[1].get(name)
    ]
    if lines:
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise ValueError(f"{where} has other arrays than its model:\n" + "\n".join([*lines[:_SHOWN], *more]))
    for name, variable in wants.items():
        like, array = variable.get_raw_value(), has[name]
        dtype = kept if layout_of(variable) is not None else like.dtype
        whole = _of_base(array, dtype) if isinstance(array, BaseArray) else _read(array, dtype)
        layout = padded_layout(variable)
        whole = whole if layout is None else pad(whole, layout)
        variable.set_raw_value(jax.device_put(whole, like.sharding))


def _of_base(array: BaseArray, dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Reads an array of a frozen base, a part at a time, and returns it in the given dtype."""
    whole = np.empty(array.shape, dtype)
    for begin in range(0, array.shape[0], array.rows):
        whole[begin : begin + array.rows] = array.read(begin)
    check_values(array.parts.values())
    return whole


def _read(array: EvaluationArray, dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Reads an array, a few rows at a time, and returns it in the given dtype."""
    whole = np.empty(array.shape, dtype)
    length = array.shape[0]
    rows = 1 if len(array.shape) > 2 else _ROWS  # one layer of a stack
    for begin in range(0, length, rows):
        end = min(begin + rows, length)
        whole[begin:end] = array.read(begin, end)
    check_values(array.stored)
    return whole
