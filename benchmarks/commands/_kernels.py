"""`gtp-jax bench kernels`: compares quantization kernels with a copy, and with XLA."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import jax
from tqdm import tqdm

import benchmarks
from gtp_jax import native
from gtp_jax.hlo import columns
from gtp_jax.mesh import choose_devices, platform
from gtp_jax.runner.cli import check_files, positive

from ._arguments import add_file_flags

_EXAMPLES = """\
examples:
  gtp-jax bench kernels                             all kernels, on arrays of 256 MiB on a GPU, 16 MiB on a CPU
  gtp-jax bench kernels --only pack --only unpack   the two that run in every step
  gtp-jax bench kernels --only "quantize NVFP4" --mebibytes 64 512 --dtype float32
  gtp-jax bench kernels --json kernels.json --png kernels.png
"""


def add_topic(topics: Any) -> None:
    """Adds the topic to `gtp-jax bench`."""
    topic = topics.add_parser(
        "kernels",
        help="quantization kernels, compared with a copy and with XLA",
        description="Times every kernel. GB/s counts the bytes that must be read and written; `of copy` is this rate "
        "relative to that of a device-to-device copy; `x XLA` is the speed relative to the jnp reference "
        "as XLA compiles it. All are measured in this run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    topic.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="WORDS",
        help="measure only kernels with these words in their name; may be repeated",
    )
    topic.add_argument(
        "--mebibytes",
        type=positive,
        nargs="+",
        metavar="MIB",
        help="sizes of an array in MiB (default: 256 on a GPU, 16 on a CPU)",
    )
    topic.add_argument(
        "--dtype",
        nargs="+",
        default=["bfloat16"],
        choices=["bfloat16", "float32", "float16"],
        help="dtypes of the values (default: bfloat16)",
    )
    topic.add_argument("--no-reference", action="store_true", help="do not time the reference")
    add_file_flags(topic, json="also write the measurements to this file", png="draw the measurements to this file")
    topic.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    chosen = benchmarks.kernels(args.only)
    check_files(args.json, args.png)
    choose_devices(1)
    here = platform()
    if not native.has("gtp_quantize", "CUDA" if here == "gpu" else here):
        raise ValueError(
            f"gtp_jax has no kernels for {here!r} on this machine: {native.describe()}. See `gtp-jax doctor`."
        )
    sizes = args.mebibytes or [benchmarks.KERNEL_MEBIBYTES[here]]
    measured: list[benchmarks.Measurement] = []
    total = len(chosen) * len(sizes) * len(args.dtype)
    with tqdm(total=total, unit="kernel", file=sys.stderr, disable=None) as progress:
        for measurement in benchmarks.measure_all(
            chosen, sizes=sizes, dtypes=args.dtype, reference=not args.no_reference
        ):
            measured.append(measurement)
            progress.set_description(measurement.kernel.name)
            progress.update()
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}; {native.describe()}\n")
    print(_table(measured))
    goal = benchmarks.KERNEL_GOALS.get(here)
    if goal is not None:
        reached = sum(m.of_copy >= goal for m in measured)
        print(f"\n{reached} of {len(measured)} at {goal:.0%} of a copy or more")
    if args.json:
        args.json.write_text(
            json.dumps({"device": device, "jax": jax.__version__, "kernels": [m.record() for m in measured]}, indent=1)
        )
    if args.png:
        benchmarks.draw_ratios(measured, goal, f"Quantization kernels on one {device}", args.png)
    return 0


def _table(measured: list[benchmarks.Measurement]) -> str:
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
        for m in measured
    ]
    return columns(header, rows, right=range(2, len(header)))
