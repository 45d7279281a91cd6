"""`gtp-jax bench sequence`: times a layer's matmuls while their sequence moves over tp."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

import benchmarks
from gtp_jax.hlo import columns, quantity
from gtp_jax.mesh import choose_devices, make_mesh, on_gpu
from gtp_jax.models import PRESETS
from gtp_jax.runner.cli import check_files, positive, whole
from gtp_jax.runner.flags import Parallelism, add_flags, given

_EXAMPLES = """\
examples:
  gtp-jax bench sequence --tp 2                       a layer of the reference step over two GPUs
  gtp-jax bench sequence --preset 70b --tp 2 --shares 8 --part 1024
                                                      the shapes of 70b at tp 8 and sequences of 8192, on two GPUs
"""

_PRESET = {True: "reference", False: "tiny"}
_PART = {True: 4096, False: 32}
_MEBIBYTES = {True: [1.0, 4.0, 16.0, 64.0, 256.0], False: [0.25, 1.0]}


def add_topic(topics: Any) -> None:
    """Adds the topic to `gtp-jax bench`."""
    topic = topics.add_parser(
        "sequence",
        help="each matmul of a layer while its sequence moves over tp, in parts or in one collective",
        description="Times movements of activations over tp, by size: to the next rank, in halves to both neighbours, "
        "and as an all-gather. Then times each matmul of a layer, forward and backward: alone, with the "
        "sequence moving in parts during the matmul, and with one collective before or after it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    topic.add_argument(
        "--preset",
        choices=PRESETS,
        help="the model whose layer is measured (default: reference on GPUs, tiny on a CPU)",
    )
    add_flags(topic, Parallelism, but=("dp", "gtp", "ep"))
    topic.add_argument("--part", type=whole, metavar="N", help="tokens per rank (default: 4096; 32 on a CPU)")
    topic.add_argument(
        "--shares", type=whole, metavar="N", help="number of ranks that a weight is divided among (default: tp)"
    )
    topic.add_argument(
        "--mebibytes",
        type=positive,
        nargs="+",
        metavar="MIB",
        help="sizes in MiB of the parts that are moved without a matmul (default: 1 4 16 64 256; 0.25 1 on a CPU)",
    )
    topic.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    topic.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_files(args.json)
    parallelism = Parallelism(gtp=1, **given(args, Parallelism))
    choose_devices(parallelism.virtual_devices(benchmarks.VIRTUAL_DEVICES))
    fast = on_gpu()
    tp = benchmarks.degrees_within(parallelism, jax.device_count())["tp"]
    preset, part, shares = args.preset or _PRESET[fast], args.part or _PART[fast], args.shares or tp
    with jax.set_mesh(make_mesh(gtp=1, tp=tp, devices=jax.devices()[:tp])):
        rates = list(benchmarks.measure_rates(args.mebibytes or _MEBIBYTES[fast]))
        matmuls = list(benchmarks.measure_sequence(PRESETS[preset], part=part, shares=shares))
    device = jax.devices()[0].device_kind
    print(f"{tp} x {device}, tp {tp}: one layer of {preset}, weights of one rank of {shares}, parts of {part} tokens\n")
    print(_rates(rates))
    print(_matmuls(matmuls))
    if args.json:
        record = {"device": device, "tp": tp, "preset": preset, "shares": shares, "part": part}
        rows = {"rates": [asdict(r) for r in rates], "matmuls": [asdict(m) for m in matmuls]}
        args.json.write_text(json.dumps(record | rows, indent=1))
    return 0


def _rates(rates: list[benchmarks.Rate]) -> str:
    by_size: dict[float, dict[str, str]] = {}
    for r in rates:
        by_size.setdefault(r.mebibytes, {})[r.way] = quantity(r.bytes_per_s, "B/s")
    rows = [(f"{size:g} MiB", *ways.values()) for size, ways in by_size.items()]
    return columns(("leaves a device", *benchmarks.WAYS), rows, right=range(1, len(benchmarks.WAYS) + 1)) + "\n"


def _matmuls(matmuls: list[benchmarks.SequenceMatmul]) -> str:
    header = ("matmul", "work", "sent", "alone us", "in parts us", "exposed us", "at once us", "exposed us")
    rows = [
        (
            m.name,
            quantity(m.flops, "FLOP"),
            quantity(m.wire_bytes, "B"),
            *(f"{1e6 * s:.0f}" for s in (m.alone_s, m.parts_s, m.parts_s - m.alone_s)),
            *(f"{1e6 * s:.0f}" for s in (m.at_once_s, m.at_once_s - m.alone_s)),
        )
        for m in matmuls
    ]
    return columns(header, rows, right=range(1, len(header)))
