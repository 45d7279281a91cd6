"""Imports Hugging Face's files into a checkpoint."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ..checkpoint import Checkpoints
from ..models import Origin, hugging_face_of, saved
from ._arrays import Arrays
from ._config import read_config
from ._converted import Converted
from ._files import open_tensors
from ._fresh import fresh_directory
from ._others import read_others
from ._safetensors import Reader
from ._stored import Wanted, is_left_out, tensors_of
from ._vocabulary import tokens_beyond, warning_of

# Tables of the rotary embedding in old files.
_IGNORED = ".rotary_emb.inv_freq"

_SHOWN = 8


def import_llama(hugging_face: str | Path, out: str | Path, *, progress: bool = False) -> Converted:
    """Imports a Hugging Face Llama in safetensors as a checkpoint at step 0: float32 parameters, no optimizer state.

    Quantized weights are dequantized, with values rounded to float32. If they are FP8 in blocks of 128 x 128, the
    checkpoint also holds their codes and scales as published, from which `gtp_jax.models.load` and `gtp-jax train
    --lora` make a frozen base with `gtp_jax.recipes.FP8Blocks`.

    Each imported tensor is read twice, or six times with codes. Memory holds one tensor at a time, or the experts of
    one layer and kernel. `out` appears only at the end, complete. The checkpoint also keeps config.json without its
    description of quantization and, byte for byte, the tokenizer's files and generation_config.json. Runs that start
    from the checkpoint keep these files, unless they read text with another tokenizer, and `export_llama` writes them.
    Warns about ids of the tokenizer for which the model has no row.

    Args:
        hugging_face: the directory with config.json and safetensors, in one file or in several with an index.
        out: a new or empty directory, which becomes a directory of checkpoints.
        progress: whether to show a progress bar on a terminal.

    Returns:
        What was read. The checkpoint's `extra` also holds the model's sizes, as `model`.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if our Llama cannot compute the model; if tensors are missing, unexpected, or have another shape or
            dtype; if a stored head differs from the embedding that it is tied to; if a value is NaN or Inf; if a scale
            of blocks of 128 x 128 is negative; if a file is damaged; if a tokenizer's file is a link out of the
            directory, not JSON or too large; or if `out` is not empty.
    """
    source = Path(hugging_face).expanduser()
    config, original, stored_as = read_config(source)
    origin = Origin(original, read_others(source))
    readers = open_tensors(source)
    layout = hugging_face_of(config, original["model_type"])
    tensors = layout.tensors(config)
    copies = _take_copies(readers, layout.copies(config))
    left_out = tuple(name for name in readers if stored_as is not None and is_left_out(name))
    readers = {name: reader for name, reader in readers.items() if name not in left_out}
    parts = {tensor.name: tensors_of(tensor, readers, stored_as) for tensor in tensors}
    _check(source, readers, [part for own in parts.values() for part in own])
    if lacking := tokens_beyond(origin.files, config.vocab_size):  # before anything is written: warnings may be errors
        warnings.warn(warning_of(lacking, config.vocab_size, str(source)), stacklevel=2)
    entries = [readers[part.name].entries[part.name] for own in parts.values() for part in own]
    nbytes = sum(entry.nbytes for entry in entries)
    bar = tqdm(total=2 * nbytes, desc="import", unit="B", unit_scale=True, disable=None if progress else True)

    arrays = Arrays(tensors, parts, readers, stored_as, bar.update)
    codes = arrays.codes()
    extra: dict[str, Any] = {**saved(config), **origin.extra()}
    with bar, fresh_directory(Path(out)) as directory, Checkpoints(directory) as checkpoints:
        checkpoints.save_params(0, arrays.values(), extra, files=origin.files, codes=codes)
    files = dict.fromkeys(readers[part.name].path for own in parts.values() for part in own)
    quantized = None if stored_as is None else stored_as.name
    return Converted(
        config, 0, tuple(files), len(entries), nbytes, tuple(origin.files), copies, quantized, left_out, tuple(codes)
    )


def _take_copies(readers: dict[str, Reader], copies: Mapping[str, str]) -> tuple[str, ...]:
    """Removes from `readers` the tensors that repeat another one, and returns their names.

    Args:
        readers: the file of each tensor.
        copies: the tensor that each copy must equal.

    Raises:
        ValueError: if a copy differs in any bit.
    """
    found = [name for name, original in copies.items() if name in readers and original in readers]
    for name in found:
        file = readers.pop(name)
        if _identity(file, name) != _identity(readers[copies[name]], copies[name]):
            raise ValueError(
                f"{name} in {file.path} differs from the tied embedding, {copies[name]}: config.json has "
                "tie_word_embeddings true, so the model should have no head of its own. If it has one, set "
                "tie_word_embeddings to false; otherwise save the model again without it."
            )
    return tuple(found)


def _identity(file: Reader, name: str) -> tuple[str, tuple[int, ...], bytes]:
    """Returns a value that is equal only for tensors with the same bits, so that one at a time is in memory."""
    entry = file.entries[name]
    return entry.dtype, entry.shape, hashlib.blake2b(file.read(name).reshape(-1).view(np.uint8).data).digest()


def _check(source: Path, readers: dict[str, Reader], wanted: list[Wanted]) -> None:
    """Checks that the files hold the tensors that the model needs.

    Raises:
        ValueError: if they do not; the message lists the differences.
    """
    needed = {part.name: part for part in wanted}
    lines = []
    for name in {**needed, **readers}:
        part = needed.get(name)
        shapes = "" if part is None else " or ".join(str(list(shape)) for shape in part.shapes)
        if name not in readers:
            lines.append(f"  {name}: in no file, {shapes} wanted")
            continue
        entry, file = readers[name].entries[name], readers[name].path.name
        stored = f"{entry.dtype}{list(entry.shape)}"
        if part is None:
            if not name.endswith(_IGNORED):
                lines.append(f"  {name}: {stored} in {file}, no such tensor wanted")
        elif entry.shape not in part.shapes or entry.dtype not in part.dtypes:
            lines.append(f"  {name}: {stored} in {file}, {shapes} of {', '.join(part.dtypes)} wanted")
    if lines:
        more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        raise ValueError(
            f"the tensors in {source} are not those of the Llama in its config.json ({len(lines)} differ):\n"
            + "\n".join([*lines[:_SHOWN], *more])
            + "\nUse the config.json that belongs to the weights, without adapters or other heads."
        )
