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
from ._warnings import plain_warnings

_EXAMPLES = """\
examples:
  gtp-jax train                         a small Llama on 8 virtual CPU devices, in 3 minutes
  gtp-jax train --data my_texts/        the same on your own text
  gtp-jax train --resume                continue where a run was stopped
  gtp-jax train --preset 1b --seq 2048  on the machine's GPUs
  gtp-jax generate gtp-run --prompt "def "
                                        text from a trained model, or from an imported one
  gtp-jax elastic show gtp-run          what failed in a run with --elastic, and what it cost
  gtp-jax inspect --preset 8b --target h200:8
                                        what a step costs on GPUs, on a machine that has none
  gtp-jax plan-faults --tp 8 --failed-devices 3
                                        how a run continues without some of its devices
  gtp-jax checkpoint verify gtp-run     checks that no byte of a run's checkpoints has changed
  gtp-jax convert export gtp-run hf     its weights as Hugging Face's safetensors; also import
  gtp-jax bench step                    a training step here and in its rivals; also collectives, kernels, checkpoint
  gtp-jax profile                       what the devices do during one step, and what waits for what
  gtp-jax replay --out gtp-run          repeats a step on two placements: is it the program or a device?
  gtp-jax doctor                        what is installed, what is missing, what to do

`gtp-jax COMMAND --help` explains a command's options.
"""

# Commands that only read files and shapes. They run on the CPU, because a run may occupy the memory of the GPUs.
_OF_FILES = ("checkpoint", "convert", "elastic", "plan-faults")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: the arguments, without the name of the program; by default, those of the process.

    Returns:
        The exit status (`_exit_codes.py`): 0 after success; 2 if an argument, or what it names, is invalid; 75 if
        something outside the run failed; 76 if the loss is not finite; 1 after any other failure; 128 plus the number
        of the signal if a signal ended the command.
    """
    args = parser().parse_args(argv)
    if args.command in _OF_FILES:
        use_cpu()
    elif has_gpu():
        all_reduce_with_nccl()  # before the backend starts, which reads XLA_FLAGS
    try:
        with plain_warnings(args.command):
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
    """Returns whether standard output still has a reader; otherwise (for example, after `| head`) discards the rest."""
    out = select.poll()
    out.register(sys.stdout.fileno(), 0)
    if not out.poll(0):  # reports only errors of the pipe
        return True
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # because the interpreter flushes when it exits
    return False


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands."""
    command_line = Parser(
        prog="gtp-jax",
        description="Trains models whose weights are sharded and gathered just in time.",
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
