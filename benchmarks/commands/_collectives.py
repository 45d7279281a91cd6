"""`gtp-jax bench collectives`: compares gathers in all formats, and sums of gradients, with the rate of the links."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

import benchmarks
from gtp_jax import native
from gtp_jax.hlo import columns, quantity
from gtp_jax.mesh import choose_devices, make_mesh, on_gpu
from gtp_jax.models import PRESETS
from gtp_jax.recipes import GRAD_WIRES, RECIPES
from gtp_jax.runner.cli import check_files, positive
from gtp_jax.runner.flags import Parallelism, add_flags, given

_EXAMPLES = """\
examples:
  gtp-jax bench collectives                          a layer of the reference step over all of this machine's GPUs
  gtp-jax bench collectives --preset 70b --gtp 4 --tp 2 --json c.json
"""

_PRESET = {True: "reference", False: "tiny"}
_MEBIBYTES = {True: 512.0, False: 16.0}


def add_topic(topics: Any) -> None:
    """Adds the topic to `gtp-jax bench`."""
    topic = topics.add_parser(
        "collectives",
        help="the gather of a layer in each format and the sums of its gradient, compared with what the links carry",
        description="Times the gather of one layer's weights in the format of each recipe, alone and including the "
        "conversion to weights. Also times the sum of the layer's gradient: by a reduce-scatter, and by "
        "exchanges in fewer bits that are summed in float32, with the resulting error. The bound is the "
        "time to send the bytes that leave a device at the rate of a large message in this run.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    topic.add_argument(
        "--preset",
        choices=PRESETS,
        help="the model whose layer is measured (default: reference on GPUs, tiny on a CPU)",
    )
    add_flags(topic, Parallelism, but=("dp", "ep"))
    topic.add_argument(
        "--mebibytes", type=positive, metavar="MIB", help="size of the large message in MiB (default: 512; 16 on a CPU)"
    )
    topic.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    topic.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_files(args.json)
    parallelism = Parallelism(**given(args, Parallelism))
    choose_devices(parallelism.virtual_devices(benchmarks.VIRTUAL_DEVICES))
    fast = on_gpu()
    degrees = benchmarks.degrees_within(parallelism, jax.device_count())
    some = jax.devices()[: math.prod(degrees.values())]
    preset = args.preset or _PRESET[fast]
    recipes = {name: kind() for name, kind in RECIPES.items()}
    with jax.set_mesh(make_mesh(**degrees, devices=None if len(some) == jax.device_count() else some)):
        links = benchmarks.measure_links(args.mebibytes or _MEBIBYTES[fast])
        measured = benchmarks.measure_movements(PRESETS[preset], recipes, links)
        movements = list(
            tqdm(measured, total=len(recipes) + 1 + len(GRAD_WIRES), unit="collective", file=sys.stderr, disable=None)
        )
    device, gtp, tp = some[0].device_kind, degrees["gtp"], degrees["tp"]
    print(f"{len(some)} x {device}, gtp {gtp}, tp {tp}: one layer of {preset}; {native.describe()}")
    print(
        f"a message of {links.mebibytes:.0f} MiB leaves a device at {quantity(links.gather_rate, 'B/s')} in a gather, "
        f"{quantity(links.scatter_rate, 'B/s')} in a scatter\n"
    )
    print(_table(movements))
    if args.json:
        record = {
            "device": device,
            "gtp": degrees["gtp"],
            "tp": degrees["tp"],
            "preset": preset,
            "links": asdict(links),
        }
        rows = [asdict(m) | {"of_bound": m.of_bound} for m in movements]
        args.json.write_text(json.dumps(record | {"movements": rows}, indent=1))
    return 0


def _table(movements: list[benchmarks.Movement]) -> str:
    header = ("one layer", "leaves a device", "bound us", "us", "of bound", "to weights us", "x bf16", "error")
    usual = next((m.whole_s for m in movements if m.whole_s), None)
    rows = [
        (
            m.name,
            quantity(m.wire_bytes, "B"),
            f"{m.bound_s * 1e6:.0f}",
            f"{m.seconds * 1e6:.0f}",
            f"{m.of_bound:.0%}",
            "" if m.whole_s is None else f"{m.whole_s * 1e6:.0f}",
            "" if m.whole_s is None or usual is None else f"{usual / m.whole_s:.2f}",
            "" if m.error is None else f"{m.error:.1e}",
        )
        for m in movements
    ]
    return columns(header, rows, right=range(1, len(header)))
