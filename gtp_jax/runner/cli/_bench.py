"""`gtp-jax bench`: runs the benchmarks, whose code is in `benchmarks` of a checkout."""

from __future__ import annotations

import argparse

from ._checkout import ELSEWHERE, benchmarks, has_benchmarks, refuse_elsewhere
from ._parser import AddParser


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = add(
        description="Measures on this machine." if has_benchmarks() else f"Not here: {ELSEWHERE}",
    )
    if has_benchmarks():
        benchmarks(".commands").add_topics(parser.add_subparsers(dest="topic", metavar="TOPIC", required=True))
    else:
        refuse_elsewhere(parser)
    return parser
