"""The command and its subcommands."""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence

from ... import __version__
from ...mesh import has_gpu, use_cpu
from ...train import all_reduce_with_nccl
from .._exit_codes import of_error, of_signal
from ..trainer import Diverged
from . import (
    _bench,
    _checkpoint,
    _convert,
    _doctor,
    _elastic,
    _generate,
    _inspect,
    _plan_faults,
    _profile,
    _replay,
    _train,
)
from ._errors import EXPECTED, explanation
from ._parser import Parser

_EXAMPLES = """\
examples:
  gtp-jax train                         a small Llama on 8 virtual CPU devices, in 3 minutes
  gtp-jax train --data my_texts/        the same on text of your own
  gtp-jax train --resume                go on where a run was stopped
  gtp-jax train --preset 1b --seq 2048  on the machine's GPUs
  gtp-jax generate gtp-run --prompt "def "
                                        text from a trained model, or from an imported one
  gtp-jax elastic show gtp-run          what failed in a run with --elastic, and what it cost
  gtp-jax inspect --preset 8b --target h200:8
                                        what a step costs on GPUs, on a machine that has none
  gtp-jax plan-faults --tp 8 --failed-devices 3
                                        how a run goes on without some of its devices
  gtp-jax checkpoint verify gtp-run     is every byte of a run's checkpoints as it was written
  gtp-jax convert export gtp-run hf     its weights as Hugging Face's safetensors; also import
  gtp-jax bench step                    a training step here and in its rivals; also collectives, kernels, checkpoint
  gtp-jax profile                       what the devices do during one step, and what waits for what
  gtp-jax replay --out gtp-run          a step again, on two placements: is it the program or a device?
  gtp-jax doctor                        what is installed, what is missing, what to do

`gtp-jax COMMAND --help` explains a command's options.
"""

# Commands that read files and shapes, and compute nothing that needs a device; a GPU's memory may be taken by a run.
_OF_FILES = ("checkpoint", "convert", "elastic", "plan-faults")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: arguments, without the name of the program; those of the process by default.

    Returns:
        The exit status (`_exit_codes.py`): 0; 2 after a mistake in the arguments or in what they name; 75 if something
        outside the run has failed; 76 if the loss is not finite; 1 after any other failure; 128 and the number of the
        signal that has ended it.
    """
    args = parser().parse_args(argv)
    if args.command in _OF_FILES:
        use_cpu()
    elif has_gpu():
        all_reduce_with_nccl()  # before the backend starts, which reads XLA_FLAGS
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except EXPECTED as error:
        if isinstance(error, BrokenPipeError) and not _is_read():
            return of_signal(signal.SIGPIPE)
        if args.traceback or (text := explanation(error)) is None:
            raise
        print(f"gtp-jax {args.command}: error: {text}", file=sys.stderr)
        return of_error(error)
    except Diverged as error:
        print(f"gtp-jax {args.command}: stopped: {error}", file=sys.stderr)
        return of_error(error)
    except KeyboardInterrupt:
        print(f"gtp-jax {args.command}: interrupted", file=sys.stderr)
        return of_signal(signal.SIGINT)


def _is_read() -> bool:
    """Says whether somebody still reads what is printed; if not, as behind `| head`, the rest of it goes nowhere."""
    out = select.poll()
    out.register(sys.stdout.fileno(), 0)
    if not out.poll(0):  # which reports errors of the pipe alone
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # as the interpreter flushes at its end
    return False


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    command_line = Parser(
        prog="gtp-jax",
        description="Trains models whose weights are stored as shards and gathered just in time.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command_line.add_argument("--version", action="version", version=f"gtp_jax {__version__}")
    command_line.add_argument("--traceback", action="store_true", help="show where in the code an error was raised")
    commands = command_line.add_subparsers(dest="command", metavar="COMMAND", required=True)
    tools = (_generate, _elastic, _inspect, _plan_faults, _checkpoint, _convert, _bench, _profile, _replay, _doctor)
    for command in (_train, *tools):
        command.add_parser(commands)
    return command_line
