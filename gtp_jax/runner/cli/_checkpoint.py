"""`gtp-jax checkpoint`: inspects checkpoints on disk, without a model and without GPUs."""

from __future__ import annotations

import argparse
from pathlib import Path

from ._later import later
from ._parser import AddParser

_EXAMPLES = """\
examples:
  gtp-jax checkpoint list gtp-run                  the steps that a run has saved
  gtp-jax checkpoint show gtp-run --step 100       the arrays of one step
  gtp-jax checkpoint verify gtp-run                read every byte: are all steps intact?
  gtp-jax checkpoint diff gtp-run@100 gtp-run@200  which arrays differ

A directory is the directory of a run, or its `checkpoints`. A digest depends only on an array's values, not on the mesh
that saved it.
"""


def add_parser(add: AddParser) -> argparse.ArgumentParser:
    """Adds the subcommand."""
    parser = add(
        description="Inspects checkpoints on disk. Needs neither the model nor a GPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, run: str, text: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(run=later("_checkpoint_views", run))
        return added

    for name, run, text in (
        ("list", "list_steps", "the steps saved, with their sizes"),
        ("show", "show", "a step's arrays: shape, dtype, bytes, digest"),
        ("verify", "verify", "read every file and list those that have changed since they were written"),
    ):
        added = verb(name, run, text)
        added.add_argument("directory", type=Path, help="the directory of a run, or its checkpoints")
        if name != "list":
            which = "every one" if name == "verify" else "the latest"
            added.add_argument("--step", type=int, help=f"the step (default: {which})")
        if name == "show":
            added.add_argument("--json", action="store_true", help="print the manifest as JSON")
    added = verb("diff", "diff", "arrays that differ between two checkpoints, by digest")
    added.add_argument("left", metavar="DIR[@STEP]")
    added.add_argument("right", metavar="DIR[@STEP]")
    return parser
