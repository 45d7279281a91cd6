"""Imports and exports Hugging Face's files, and merges adapters into models."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...checkpoint import checkpoints_in
from ...convert import Converted, export_llama, export_peft, import_llama, merge_adapters
from ...hlo import quantity

_GB = 10**9
_SHARD_GB = 5


def import_(args: argparse.Namespace) -> int:
    done = import_llama(args.source, args.out, progress=True)
    print(f"read {_tensors(done)} in {args.source}")
    print(f"{done.config.param_count():,} float32 parameters are in {args.out}, a checkpoint at step {done.step}")
    if done.quantized is not None:
        print(f"the weights were stored as {done.quantized}; the checkpoint holds the values that they stand for")
    if done.codes:
        print(f"kept unchanged: the codes of {len(done.codes)} arrays, for a base that is frozen in fp8-blocks")
    if done.left_out:
        print(f"not imported: {len(done.left_out)} scales of activations and of the key-value cache")
    for name in done.copies:
        print(f"not imported: {name}, which equals the tied embedding bit for bit")
    print(f"kept unchanged with them: {_others(done)}")
    return 0


def export(args: argparse.Namespace) -> int:
    source = checkpoints_in(args.source)
    if args.peft:
        return _export_peft(args, source)
    dtype = args.dtype or "bfloat16"
    shard_bytes = max(1, int((args.shard_gb or _SHARD_GB) * _GB))
    done = export_llama(source, args.out, step=args.step, dtype=dtype, shard_bytes=shard_bytes, progress=True)
    print(f"step {done.step} in {source}: {done.config.param_count():,} parameters as {dtype}")
    print(f"wrote {_tensors(done)} to {args.out}, and {_others(done)}")
    return 0


def _export_peft(args: argparse.Namespace, source: Path) -> int:
    given = [flag for flag, value in (("--dtype", args.dtype), ("--shard-gb", args.shard_gb)) if value is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)}: adapters are written in float32, in one file. Remove these flags, or --peft."
        )
    done = export_peft(source, args.out, step=args.step)
    print(f"step {done.step} in {source}: adapters of {', '.join(done.targets)}, trained beside {done.values}")
    print(f"wrote {done.tensors} tensors to {args.out}: adapter_model.safetensors, adapter_config.json")
    return 0


def merge(args: argparse.Namespace) -> int:
    source = checkpoints_in(args.source)
    done = merge_adapters(source, args.out, step=args.step)
    kernels = "1 kernel" if done.kernels == 1 else f"{done.kernels} kernels"
    print(f"step {done.step} in {source}: the adapters of {kernels} are added to the values of {done.values}")
    print(f"{done.config.param_count():,} float32 parameters are in {args.out}, a checkpoint at step 0")
    return 0


def _tensors(done: Converted) -> str:
    files = "1 file" if len(done.files) == 1 else f"{len(done.files)} files"
    return f"{done.tensors} tensors, {quantity(done.nbytes, 'B')}, of {files}"


def _others(done: Converted) -> str:
    return ", ".join(("config.json", *done.others))
