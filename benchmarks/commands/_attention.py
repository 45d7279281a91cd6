"""`gtp-jax bench attention`: times attention over rows of packed documents."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

import benchmarks
from gtp_jax.hlo import columns
from gtp_jax.mesh import choose_devices, make_mesh, on_gpu
from gtp_jax.models import PRESETS
from gtp_jax.runner.cli import check_files, whole

_EXAMPLES = """\
examples:
  gtp-jax bench attention                             rows of 8192 tokens of the reference model, on one GPU
  gtp-jax bench attention --seq 16384 --documents 2 16
"""

_PRESET = {True: "reference", False: "tiny"}
_SEQ = {True: 8192, False: 128}
_DOCUMENTS = [1, 2, 4, 16, 64]


def add_topic(topics: Any) -> None:
    """Adds the topic to `gtp-jax bench`."""
    topic = topics.add_parser(
        "attention",
        help="attention over packed rows, compared with attention without segment ids",
        description="Times the forward and backward pass of one layer's causal attention on one device: without "
        "segment ids, with several numbers of documents per row, of equal and unequal length, and with an "
        "id that comes back at the end of a row.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    topic.add_argument(
        "--preset",
        choices=PRESETS,
        help="the model whose layer is measured (default: reference on GPUs, tiny on a CPU)",
    )
    topic.add_argument("--seq", type=whole, metavar="N", help="tokens per row (default: 8192; 128 on a CPU)")
    topic.add_argument("--batch", type=whole, default=1, metavar="N", help="number of rows (default: 1)")
    topic.add_argument(
        "--documents",
        type=whole,
        nargs="+",
        default=_DOCUMENTS,
        metavar="N",
        help="numbers of documents per row (default: 1 2 4 16 64)",
    )
    topic.add_argument("--json", type=Path, metavar="FILE", help="also write the measurements to this file")
    topic.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    check_files(args.json)
    choose_devices(1)
    fast = on_gpu()
    preset, seq = args.preset or _PRESET[fast], args.seq or _SEQ[fast]
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        measure = benchmarks.measure_packed_rows(PRESETS[preset], seq=seq, documents=args.documents, batch=args.batch)
        rows = list(measure)
    device = jax.devices()[0].device_kind
    print(f"{device}: causal attention of one layer of {preset}, {args.batch} x {seq} tokens, forward and backward\n")
    base = rows[0].seconds
    cells = [
        (r.documents or "no ids", r.lengths, f"{r.work:.3f}", f"{1e3 * r.seconds:.3f}", f"{r.seconds / base:.3f}")
        for r in rows
    ]
    print(columns(("documents", "lengths", "scores", "ms", "of no ids"), cells, right=(2, 3, 4)))
    if args.json:
        record = {"device": device, "preset": preset, "batch": args.batch, "seq": seq}
        args.json.write_text(json.dumps(record | {"rows": [asdict(r) for r in rows]}, indent=1))
    return 0
