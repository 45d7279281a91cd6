"""`gtp-jax elastic`: looks at a run under a supervisor, and brings devices back to it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..elastic import ask_to_rejoin, draw_timeline, read_events, table
from ..trainer import RunDirectory

_EXAMPLES = """\
examples:
  gtp-jax elastic show gtp-run                             what failed, how many steps and seconds it cost
  gtp-jax elastic show gtp-run --picture timeline.png      the same as a picture
  gtp-jax elastic rejoin gtp-run --device 3                GPU 3 works again: use it from the next snapshot on
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "elastic",
        help="look at a run with --elastic, bring a device back to it",
        description="Looks at a run that was started with `gtp-jax train --elastic`, and brings devices back to it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    show = verbs.add_parser("show", help="what happened", description="Prints events.jsonl as tables.")
    show.add_argument("directory", type=Path, help="of a run")
    show.add_argument("--picture", type=Path, metavar="FILE", help="draw the timeline into this PNG file")
    show.set_defaults(run=_show)
    rejoin = verbs.add_parser(
        "rejoin",
        help="use a lost device again",
        description="Asks the supervisor to use a lost device again. It probes the device first.",
    )
    rejoin.add_argument("directory", type=Path, help="of a run")
    rejoin.add_argument(
        "--device", type=int, required=True, metavar="N", help="its number, as the run's events have it"
    )
    rejoin.set_defaults(run=_rejoin)
    return parser


def _show(args: argparse.Namespace) -> int:
    directory = _existing(args.directory)
    if not (directory.is_of_run or directory.events.exists()):
        raise FileNotFoundError(f"no run in {directory.root}. Give the --out of a run with --elastic.")
    events = read_events(directory.events)
    print(table(events))
    if args.picture is not None:
        draw_timeline(events, args.picture)
        print(f"\ndrawn in {args.picture}")
    return 0


def _rejoin(args: argparse.Namespace) -> int:
    ask_to_rejoin(_existing(args.directory).elastic, args.device)
    print(f"asked for device {args.device}; `gtp-jax elastic show {args.directory}` says when it is taken back")
    return 0


def _existing(directory: Path) -> RunDirectory:
    if not directory.is_dir():
        raise FileNotFoundError(f"no directory {directory}. Give the --out of a run with --elastic.")
    return RunDirectory(directory)
