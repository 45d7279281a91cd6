"""`gtp-jax bench`: measures, and prints ratios within one run."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from .. import bench, native
from ..mesh import choose_devices, platform
from ..plan import columns
from . import _bench_checkpoint, _bench_collectives, _bench_growth, _bench_recipes, _bench_step
from ._arguments import check_files, positive

_EXAMPLES = """\
examples:
  gtp-jax bench kernels                             all kernels, on arrays of 256 MiB on a GPU, 16 MiB on a CPU
  gtp-jax bench kernels --only pack --only unpack   the two that run every step
  gtp-jax bench kernels --only "quantize NVFP4" --mebibytes 64 512 --dtype float32
  gtp-jax bench kernels --json kernels.json --png kernels.png
"""

_GOALS = {"gpu": 0.85}  # the CPU's kernels stand beside XLA's, not beside a copy
_MEBIBYTES = {"gpu": 256.0, "cpu": 16.0}


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="measure a training step, kernels, recipes or checkpoints, beside what they compete with",
        description="Measures on this machine.",
    )
    topics = parser.add_subparsers(dest="topic", metavar="TOPIC", required=True)
    _bench_step.add_topic(topics)
    _bench_growth.add_topic(topics)
    _bench_collectives.add_topic(topics)
    _bench_recipes.add_topic(topics)
    kernels = topics.add_parser(
        "kernels",
        help="quantization kernels beside a copy and beside XLA",
        description="Times every kernel. GB/s counts the bytes that must be read and written; `of copy` is its ratio "
        "to a device-to-device copy, `x XLA` how many times as fast it is as XLA's own code for the reference; all in "
        "this run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kernels.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="WORDS",
        help="kernels with these words in their name; may be repeated",
    )
    kernels.add_argument(
        "--mebibytes",
        type=positive,
        nargs="+",
        metavar="MIB",
        help="sizes of an array (default: 256 on a GPU, 16 on a CPU)",
    )
    kernels.add_argument(
        "--dtype",
        nargs="+",
        default=["bfloat16"],
        choices=["bfloat16", "float32", "float16"],
        help="of the values (default: bfloat16)",
    )
    kernels.add_argument("--no-reference", action="store_true", help="do not time the reference")
    kernels.add_argument("--json", type=Path, metavar="FILE", help="write the measurements there too")
    kernels.add_argument("--png", type=Path, metavar="FILE", help="draw them there")
    kernels.set_defaults(run=_kernels)
    _bench_checkpoint.add_parser(topics)
    return parser


def _kernels(args: argparse.Namespace) -> int:
    chosen = bench.kernels(args.only)
    check_files(args.json, args.png)
    choose_devices(1)
    here = platform()
    if not native.has("gtp_quantize", "CUDA" if here == "gpu" else here):
        raise ValueError(f"there are no kernels for {here!r} here: {native.describe()}. See `gtp-jax doctor`.")
    sizes = args.mebibytes or [_MEBIBYTES[here]]
    done: list[bench.Measurement] = []
    total = len(chosen) * len(sizes) * len(args.dtype)
    with tqdm(total=total, unit="kernel", file=sys.stderr, disable=None) as progress:
        for dtype in args.dtype:
            for size in sizes:
                for measured in bench.measure(chosen, mebibytes=size, dtype=dtype, reference=not args.no_reference):
                    done.append(measured)
                    progress.set_description(measured.kernel.name)
                    progress.update()
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}; {native.describe()}\n")
    print(_table(done))
    goal = _GOALS.get(here)
    if goal is not None:
        reached = sum(m.of_copy >= goal for m in done)
        print(f"\n{reached} of {len(done)} at {goal:.0%} of a copy or more")
    if args.json:
        args.json.write_text(
            json.dumps({"device": device, "jax": jax.__version__, "kernels": [_record(m) for m in done]}, indent=1)
        )
    if args.png:
        bench.draw_ratios(done, goal, f"Quantization kernels on one {device}", args.png)
    return 0


def _table(done: list[bench.Measurement]) -> str:
    header = ("kernel", "dtype", "MiB", "us", "GB/s", "of copy", "x XLA")
    rows = [
        (
            m.kernel.name,
            m.dtype,
            m.size,
            f"{m.microseconds:.1f}",
            f"{m.rate / 1e9:.0f}",
            f"{m.of_copy:.0%}",
            "" if m.of_reference is None else f"{m.of_reference:.1f}",
        )
        for m in done
    ]
    return columns(header, rows, right=range(2, len(header)))


def _record(m: bench.Measurement) -> dict[str, Any]:
    return {
        **dataclasses.asdict(m.kernel),
        "dtype": m.dtype,
        "mebibytes": m.mebibytes,
        "microseconds": m.microseconds,
        "bytes_moved": m.bytes_moved,
        "bytes_a_second": m.rate,
        "copy_bytes_a_second": m.copy_rate,
        "of_copy": m.of_copy,
        "reference_microseconds": m.reference_microseconds,
    }
