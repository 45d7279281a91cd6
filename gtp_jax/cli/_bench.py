"""`gtp-jax bench`: measures, and prints ratios within one run."""

from __future__ import annotations

import argparse
from typing import Any

from . import (
    _bench_attention,
    _bench_checkpoint,
    _bench_collectives,
    _bench_growth,
    _bench_kernels,
    _bench_recipes,
    _bench_sequence,
    _bench_step,
    _bench_suite,
)


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="measure a training step, kernels, recipes or checkpoints, beside what they compete with",
        description="Measures on this machine.",
    )
    topics = parser.add_subparsers(dest="topic", metavar="TOPIC", required=True)
    for topic in (
        _bench_step,
        _bench_suite,
        _bench_growth,
        _bench_collectives,
        _bench_sequence,
        _bench_attention,
        _bench_recipes,
        _bench_kernels,
        _bench_checkpoint,
    ):
        topic.add_topic(topics)
    return parser
