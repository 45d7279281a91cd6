"""Exports the model of a checkpoint to Hugging Face's files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from .._foreign import brief
from ..checkpoint import CODES, Checkpoints, StoredArray, check_values
from ..models import (
    Adapters,
    EvaluationArray,
    ModelConfig,
    Origin,
    Tensor,
    array_shapes,
    evaluation_arrays,
    hugging_face_of,
    in_files,
    saved_config,
)
from ..ops import multi_amax
from ._byte_tokens import BYTES_CONFIG, bytes_files
from ._config import check_sizes, write_config
from ._converted import Converted
from ._encoding import ENCODINGS, Encoding
from ._files import INDEX_FILE, SINGLE_FILE, shard_file
from ._fresh import fresh_directory
from ._safetensors import Entry, Writer, shard

_SHOWN = 8


def export_llama(
    checkpoint: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: str = "bfloat16",
    shard_bytes: int = 5_000_000_000,
    config: ModelConfig | None = None,
    max_positions: int | None = None,
    progress: bool = False,
) -> Converted:
    """Writes the weights of a checkpoint as a Hugging Face Llama: safetensors, their index and config.json.

    These are the weights with which the run evaluates: the averaged weights if the run averages them, otherwise the
    parameters. The other fields of config.json and the tokenizer's files that the model was imported with are written
    too, the files byte for byte. If the model was trained on bytes, a tokenizer.json says so.

    One tensor, or the experts of one layer, is in memory at a time. What is read is checked against the checkpoint's
    digests. `out` appears only at the end, complete.

    Args:
        checkpoint: the directory of checkpoints.
        out: a new or an empty directory.
        step: the step to export; by default, the latest.
        dtype: the dtype of the weights: `bfloat16` (rounded to nearest, ties to even) or `float32`; or `fp8` (in blocks
            of 128 x 128), `mxfp8` or `nvfp4`, which quantize the linear layers of attention and MLP and leave the rest
            in bfloat16. In `fp8`, codes and scales that an import has kept are written as they are.
        shard_bytes: the maximum number of bytes of tensors per file, unless a single tensor has more.
        config: the configuration of the model; by default, the one that the checkpoint was saved with.
        max_positions: the maximum number of positions in config.json, an int of at least 1, which is not compared with
            the model; by default, the one that the model was imported with, or that its YaRN scaling leads to.
        progress: whether to show a progress bar on a terminal.

    Returns:
        A description of what was written.

    Raises:
        FileNotFoundError: if there is no such step.
        ValueError: if the checkpoint is damaged, is from a run with adapters, is not of a Llama of these sizes, or does
            not say which model it contains and `config` is not given; if Hugging Face's files cannot describe the
            model; if its weights cannot be written in `dtype`; if `out` is not empty; or if `dtype`, `shard_bytes` or
            `max_positions` is not allowed.
    """
    if dtype not in ENCODINGS:
        raise ValueError(f"`dtype` is {dtype!r}; it must be one of {', '.join(ENCODINGS)}.")
    if shard_bytes < 1:
        raise ValueError(f"`shard_bytes` is {shard_bytes}; it must be a whole number of at least 1.")
    if max_positions is not None and (type(max_positions) is not int or max_positions < 1):
        raise ValueError(f"`max_positions` is {brief(max_positions)}; it must be an int of at least 1, or None.")
    checkpoints = Checkpoints(checkpoint, read_only=True)
    manifest = checkpoints.manifest(step)
    where = f"step {manifest['step']} in {checkpoint}"
    if Adapters.of(manifest["extra"], where) is not None:
        raise ValueError(
            f"{where} is of a run that trained adapters, and holds no model into which they are merged. Export the "
            "adapters alone with --peft (`gtp_jax.convert.export_peft`), or merge them first: `gtp-jax convert merge`."
        )
    config = _config(manifest["extra"], str(checkpoint)) if config is None else config
    check_sizes(config, f"the checkpoint in {checkpoint}")
    encoding = ENCODINGS[dtype]
    origin = Origin.of(manifest["extra"], checkpoints.files(manifest["step"]), where)
    of_tokens, others = (BYTES_CONFIG, {**origin.files, **bytes_files()}) if origin.of_bytes else ({}, origin.files)
    tensors = hugging_face_of(config, origin.config.get("model_type")).tensors(config)
    stored = _parameters(evaluation_arrays(checkpoints, manifest), config, tensors, where)
    stores = in_files(tensors)
    encoding.check(whole for whole, _ in stores)
    entries = [entry for whole, _ in stores for entry in encoding.entries(whole)]
    parts = list(shard(entries, shard_bytes))
    files = [SINGLE_FILE] if len(parts) == 1 else [shard_file(i, len(parts)) for i in range(len(parts))]
    values = _Values(stored, tensors, _kept(checkpoints, manifest))
    arrays = values.encoded(encoding)
    nbytes = sum(entry.nbytes for entry in entries)
    bar = tqdm(total=nbytes, desc="export", unit="B", unit_scale=True, disable=None if progress else True)
    with fresh_directory(Path(out)) as directory, bar:
        for file, part in zip(files, parts, strict=True):
            with Writer(directory / file, part, {"format": "pt"}) as writer:
                for entry in part:
                    writer.write(next(arrays))
                    bar.update(entry.nbytes)
        values.check()
        if len(parts) > 1:
            _write_index(directory / INDEX_FILE, files, parts)
        write_config(directory, config, encoding, {**origin.config, **of_tokens}, max_positions)
        for name, content in others.items():
            (directory / name).write_bytes(content)
    written = tuple(Path(out) / file for file in files)
    return Converted(config, manifest["step"], written, len(entries), nbytes, tuple(others))


class _Kept(NamedTuple):
    """Codes of a parameter that an import has kept.

    Attributes:
        format: the name of the format.
        codes: the codes.
        scales: the scales.
    """

    format: str
    codes: StoredArray
    scales: StoredArray


def _kept(checkpoints: Checkpoints, manifest: Mapping[str, Any]) -> dict[str, _Kept]:
    """Returns the codes that a step holds in addition to its parameters, by the path of the parameter."""
    arrays, static = checkpoints.arrays(manifest["step"]), manifest["static"]
    prefix, last = f"{CODES}/", "/codes"
    paths = [name[len(prefix) : -len(last)] for name in arrays if name.startswith(prefix) and name.endswith(last)]
    return {
        path: _Kept(static[f"{prefix}{path}/format"], *(arrays[f"{prefix}{path}/{one}"] for one in ("codes", "scales")))
        for path in paths
    }


class _Values:
    """Reads the values of Hugging Face's tensors from the arrays of a checkpoint."""

    def __init__(self, stored: dict[str, EvaluationArray], tensors: list[Tensor], kept: dict[str, _Kept]) -> None:
        self._stored = stored
        self._tensors = tensors
        self._kept = kept
        self._codes: dict[str, StoredArray] = {}  # those that were read
        self._row: dict[str, tuple[int, np.ndarray]] = {}  # per array of experts, the layer that was read last
        self._fused = ""
        self._amax = np.float32(0)

    def encoded(self, encoding: Encoding) -> Iterator[np.ndarray]:
        """Yields the arrays of all tensors of files, encoded, in the order in which they are written."""
        for whole, own in in_files(self._tensors):
            values, kept = self._of_file(whole, own), self._kept.get(whole.path)
            if kept is not None and own == [whole] and encoding.keeps(whole, kept.format):
                yield from encoding.unchanged(*(self._row_of(array, whole) for array in (kept.codes, kept.scales)))
            else:
                yield from encoding.arrays(whole, values, self._fused_amax)

    def check(self) -> None:
        """Checks that what was read is what was saved.

        Raises:
            DamagedCheckpoint: a `ValueError`, if it is not.
        """
        check_values([*(part for array in self._stored.values() for part in array.stored), *self._codes.values()])

    def _row_of(self, array: StoredArray, tensor: Tensor) -> np.ndarray:
        """Reads the codes or the scales of a tensor in a layer."""
        assert tensor.layer is not None
        self._codes[array.name] = array
        return array.read(tensor.layer, tensor.layer + 1)[0]

    def _of_file(self, whole: Tensor, own: list[Tensor]) -> np.ndarray:
        """Returns the values of a tensor of a file, given the tensors that it contains."""
        if own == [whole]:
            return self._read(whole)
        values = np.empty(whole.shape, np.float32)
        for tensor in own:
            tensor.view(values)[...] = self._read(tensor)
        return values

    def _read(self, tensor: Tensor) -> np.ndarray:
        array = self._stored[tensor.path]
        if tensor.expert is not None:
            return self._of_expert(tensor, array)
        begin, end = (0, array.shape[0]) if tensor.layer is None else (tensor.layer, tensor.layer + 1)
        part = array.read(begin, end)
        whole = part if tensor.layer is None else part[0]
        return whole.T if tensor.transposed else whole

    def _of_expert(self, tensor: Tensor, array: EvaluationArray) -> np.ndarray:
        assert tensor.layer is not None
        layer, row = self._row.get(tensor.path, (None, None))
        if layer != tensor.layer or row is None:
            row = array.read(tensor.layer, tensor.layer + 1)
            self._row[tensor.path] = (tensor.layer, row)
        return row[0, tensor.expert]

    def _fused_amax(self, tensor: Tensor) -> np.float32:
        if tensor.fused != self._fused:  # fused weights are consecutive
            members = (other for other in self._tensors if other.fused == tensor.fused)
            amaxes = [multi_amax([jnp.asarray(self._read(other), jnp.float32)]) for other in members]
            self._fused, self._amax = tensor.fused, np.float32(np.max(amaxes))
        return self._amax


def _config(extra: dict[str, Any], where: str) -> ModelConfig:
    try:
        return saved_config(extra)
    except KeyError:
        raise ValueError(
            f"the checkpoint in {where} does not say which model it contains. Pass `config`, the `LlamaConfig` that it "
            "was trained with, to `gtp_jax.convert.export_llama`; or save with `{'model': config.architecture()}` as "
            "`extra`, as `gtp-jax train` does."
        ) from None
    except TypeError as error:
        raise ValueError(f"the checkpoint in {where} is not a Llama of this version: {error}.") from error


def _parameters(
    arrays: dict[str, EvaluationArray], config: ModelConfig, tensors: list[Tensor], where: str
) -> dict[str, EvaluationArray]:
    """Returns the weights with which a run evaluates, by the path of the parameter.

    Raises:
        ValueError: if their names or shapes are not those of the model's parameters.
    """
    prefix = "params/"
    has = {name.removeprefix(prefix): array for name, array in arrays.items()}
    wants = array_shapes(tensors)
    shapes: dict[str, Any] = {path: array.shape for path, array in has.items()}
    lines = [
        f"  {prefix}{path}: {shapes.get(path, 'no such array')} found, {wants.get(path, 'no such array')} wanted"
        for path in {**wants, **shapes}
        if shapes.get(path) != wants.get(path)
    ]
    if lines:
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise ValueError(
            f"{where} is not a Llama of the sizes {config.architecture()}:\n"
            + "\n".join([*lines[:_SHOWN], *more])
            + "\nPass the configuration that it was trained with."
        )
    return has


def _write_index(path: Path, files: Sequence[str], parts: Sequence[Sequence[Entry]]) -> None:
    where = {entry.name: file for file, part in zip(files, parts, strict=True) for entry in part}
    total = sum(entry.nbytes for part in parts for entry in part)
    content = {"metadata": {"total_size": total}, "weight_map": where}
    path.write_text(json.dumps(content, indent=2) + "\n")
