"""The command and its subcommands."""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Collection, Sequence

from ... import __version__
from ._parser import Parser
from ._streams import open_closed_streams

_EXAMPLES = """\
examples:
  gtp-jax train                         a small Llama on 8 virtual CPU devices, in 3 minutes
  gtp-jax train --data my_texts/        the same on your own text
  gtp-jax train --resume                continue where a run was stopped
  gtp-jax train --preset 1b --seq 2048  on the machine's GPUs
  gtp-jax generate gtp-run --prompt "def "
  gtp-jax elastic show gtp-run          what failed in a run with --elastic, and what it cost
  gtp-jax inspect --target h200:8       what a step costs on GPUs, on a machine that has none
  gtp-jax plan 8b --target h200:64      which mesh is fastest, why, and what fits
  gtp-jax checkpoint verify gtp-run     checks that no byte of a run's checkpoints has changed
  gtp-jax convert export gtp-run hf     its weights as Hugging Face's safetensors; also import
  gtp-jax bench step                    a training step here and in its rivals; also collectives, kernels, checkpoint
  gtp-jax profile                       what the devices do during one step, and what waits for what
  gtp-jax replay --out gtp-run          repeats a step on two placements: is it the program or a device?
  gtp-jax doctor                        what is installed, what is missing, what to do

`gtp-jax COMMAND --help` explains a command's options.
"""

# The commands, with their lines of help. The module of a command has its name.
_COMMANDS = {
    "train": "train a language model, or a model of your own",
    "generate": "continue text with a trained or an imported model",
    "elastic": "show a run with --elastic, and bring a device back to it",
    "inspect": "show what a step costs on a mesh, without allocating the model",
    "plan": "propose a mesh for a model on GPUs, and show what fits",
    "plan-faults": "plan how a run continues without some devices",
    "checkpoint": "list, show, verify and compare checkpoints",
    "convert": "import and export Hugging Face models",
    "bench": "measure steps, kernels, recipes or checkpoints, and their rivals",
    "profile": "draw what the devices do during one training step",
    "replay": "repeat a step on two placements: is it the program or a device?",
    "doctor": "report what is installed, what is missing, and what to do",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments, without the name of the program; by default, those of the process.

    Returns:
        The exit status (`_exit_codes.py`): 0 after success; 2 if an argument, or what it names, is invalid; 75 if
        something outside the run failed; 76 if the loss is not finite; 1 after any other failure; 128 plus the number
        of the signal if a signal ended the command.
    """
    open_closed_streams()
    words = sys.argv[1:] if argv is None else argv
    # no flag before the command takes a value
    command = next((word for word in words if not word.startswith("-")), "")
    args = parser([command]).parse_args(words or ["--help"])
    from ._run import run  # imports JAX, without which `--help` and misspelt commands are quick

    return run(args)


def parser(complete: Collection[str] = tuple(_COMMANDS)) -> argparse.ArgumentParser:
    """Returns the parser of all commands.

    Args:
        complete: the commands whose arguments are parsed too. Their modules are imported, which takes a second or two.
    """
    command_line = Parser(
        prog="gtp-jax",
        description="Trains models whose weights are sharded and gathered just in time.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_argument("--version", action="version", version=f"gtp_jax {__version__}")
    command_line.add_argument("--traceback", action="store_true", help="show where in the code an error was raised")
    commands = command_line.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in _COMMANDS.items():
        add = functools.partial(commands.add_parser, name, help=text)
        if name in complete:
            importlib.import_module(f"{__package__}._{name.replace('-', '_')}").add_parser(add)
        else:
            add()
    return command_line
