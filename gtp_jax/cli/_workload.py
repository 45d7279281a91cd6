"""The step that `gtp-jax bench step` and `gtp-jax profile` run, and the processes that run it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import gtp_jax

from .. import bench
from ..mesh import has_gpu
from ..models import PRESETS, LlamaConfig
from ._arguments import whole

# What is run where nothing else is asked for, by platform.
_PRESET = {"gpu": "reference", "cpu": "tiny"}
_SEQ = {"gpu": 8192, "cpu": 128}
_CPU_DEVICES = 4


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which step."""
    parser.add_argument("--preset", choices=PRESETS, help="the model (default: reference on GPUs, tiny on a CPU)")
    parser.add_argument("--layers", type=whole, help="in place of the preset's")
    parser.add_argument("--seq", type=whole, help="tokens of a sequence (default: 8192 on GPUs, 128 on a CPU)")
    parser.add_argument(
        "--tokens", type=whole, help="of a step, a device (default: one sequence a rank and microbatch)"
    )
    parser.add_argument("--gtp", type=whole, help="slices a weight is cut into (default: what tp leaves over)")
    parser.add_argument("--tp", type=whole, default=1, help="tensor-parallel degree, with sequence parallelism")
    parser.add_argument("--microbatches", type=whole, default=1, help="parts of a rank's batch")


def describe(work: bench.Workload, device: str) -> str:
    """A step in one line."""
    return (
        f"{work.devices} x {device}, gtp {work.gtp}, tp {work.tp}: {work.layers} layers of width {work.dim}, "
        f"{work.tokens // work.devices} tokens a device, sequences of {work.seq}, microbatches {work.microbatches}"
    )


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    """That of the contenders: this package found, all of a GPU's memory, virtual devices where there is no GPU."""
    package = str(Path(gtp_jax.__file__).parents[1])
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))}
    found.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    if not has_gpu():
        found.setdefault("JAX_PLATFORMS", "cpu")
    found["JAX_NUM_CPU_DEVICES"] = str((args.gtp or max(1, _CPU_DEVICES // args.tp)) * args.tp)
    return found


def probe(environment: dict[str, str]) -> tuple[str, str, int]:
    """Kind of device, platform and number of devices, asked of a process of its own: this one leaves GPUs alone.

    Raises:
        ValueError: if jax finds none.
    """
    ask = "import jax; d = jax.devices(); print(d[0].device_kind, d[0].platform, len(d), sep='|')"
    done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"jax finds no device here: {done.stderr.strip().splitlines()[-1]}. See `gtp-jax doctor`.")
    kind, platform, count = done.stdout.strip().splitlines()[-1].split("|")
    return kind, platform, int(count)


def workload_of(args: argparse.Namespace, platform: str, count: int, *, steps: int) -> bench.Workload:
    """The workload that flags ask for.

    Raises:
        ValueError: if there are too few devices, or the tokens make no whole sequences.
    """
    gtp = args.gtp or count // args.tp
    if gtp * args.tp > count or gtp < 1:
        raise ValueError(f"gtp {gtp} x tp {args.tp} needs {max(gtp, 1) * args.tp} devices, and there are {count}.")
    config = PRESETS[args.preset or _PRESET[platform]]
    seq = args.seq or _SEQ[platform]
    share = gtp * args.microbatches
    total = args.tokens * gtp * args.tp if args.tokens else share * seq
    if total % (share * seq):
        raise ValueError(
            f"`--tokens` is {args.tokens} a device, {total} a step; that is no whole number of sequences of {seq} for "
            f"each of {gtp} gtp ranks and {args.microbatches} microbatches. Make it a multiple of "
            f"{args.microbatches * seq // args.tp if args.microbatches * seq % args.tp == 0 else share * seq}."
        )
    fields = {f.name for f in dataclasses.fields(bench.Workload)} & {f.name for f in dataclasses.fields(LlamaConfig)}
    sizes = {name: getattr(config, name) for name in fields}
    return bench.Workload(
        **{**sizes, "layers": args.layers or config.layers},
        seq=seq,
        sequences=total // seq,
        microbatches=args.microbatches,
        gtp=gtp,
        tp=args.tp,
        steps=steps,
    )
