"""`gtp-jax elastic`: shows what happened in a run under a supervisor, and brings devices back to it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ._parser import AddParser

if TYPE_CHECKING:
    from ..trainer import RunDirectory

_EXAMPLES = """\
examples:
  gtp-jax elastic show gtp-run                             what failed, and the steps and seconds that were lost
  gtp-jax elastic show gtp-run --picture timeline.png      the same as a picture
  gtp-jax elastic rejoin gtp-run --device 3                GPU 3 works again: use it from the next snapshot on
"""


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = add(
        description="Shows what happened in a run of `gtp-jax train --elastic`, and brings devices back to it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    show = verbs.add_parser("show", help="show what happened", description="Prints events.jsonl as tables.")
    show.add_argument("directory", type=Path, help="the directory of a run")
    show.add_argument("--picture", type=Path, metavar="FILE", help="also draw the timeline to this PNG file")
    show.set_defaults(run=_show)
    rejoin = verbs.add_parser(
        "rejoin",
        help="use a lost device again",
        description="Asks the supervisor to use a lost device again. It probes the device first.",
    )
    rejoin.add_argument("directory", type=Path, help="the directory of a run")
    rejoin.add_argument(
        "--device", type=int, required=True, metavar="N", help="the number of the device in the run's events"
    )
    rejoin.set_defaults(run=_rejoin)
    return parser


def _show(args: argparse.Namespace) -> int:
    from ..elastic import draw_timeline, read_events, table

    directory = _existing(args.directory)
    if not (directory.is_of_run or directory.events.exists()):
        raise FileNotFoundError(f"no run in {directory.root}. Give the --out of a run with --elastic.")
    events = read_events(directory.events)
    print(table(events))
    if args.picture is not None:
        draw_timeline(events, args.picture)
        print(f"\ndrawn to {args.picture}")
    return 0


def _rejoin(args: argparse.Namespace) -> int:
    from ..elastic import ask_to_rejoin

    ask_to_rejoin(_existing(args.directory).elastic, args.device)
    print(f"asked for device {args.device}; `gtp-jax elastic show {args.directory}` shows when it is used again")
    return 0


def _existing(directory: Path) -> RunDirectory:
    from ..trainer import RunDirectory

    if not directory.is_dir():
        raise FileNotFoundError(f"no directory {directory}. Give the --out of a run with --elastic.")
    return RunDirectory(directory)
