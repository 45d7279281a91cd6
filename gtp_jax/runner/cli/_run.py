"""Runs a command whose arguments are parsed, and turns its errors into messages and statuses."""

from __future__ import annotations

import argparse
import select
import signal
import sys

from .._exit_codes import of_error, of_signal
from ..trainer import Diverged
from ._errors import explanation
from ._streams import discard_output, discard_unwritable_output
from ._warnings import plain_warnings

# Commands that only read files and shapes. They run on the CPU, because a run may occupy the memory of the GPUs.
_OF_FILES = ("checkpoint", "convert", "elastic", "inspect", "plan", "plan-faults")


def run(args: argparse.Namespace) -> int:
    """Runs the command that `args` names, and returns its exit status, as `main` does.

    A command may have a `check`, which refuses arguments before JAX is imported.
    """
    try:
        with plain_warnings(args.command):
            if hasattr(args, "check"):
                args.check(args)
            _prepare(args.command)
            code = args.run(args)
        sys.stdout.flush()
        return code
    except Diverged as error:
        _say(f"gtp-jax {args.command}: stopped: {error}")
        return of_error(error)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and not _is_read():
            return of_signal(signal.SIGPIPE)
        if (text := explanation(error)) is None or args.traceback:
            raise
        if isinstance(error, OSError):
            discard_unwritable_output()
        _say(f"gtp-jax {args.command}: error: {text}")
        return of_error(error)
    except KeyboardInterrupt:
        _say(f"gtp-jax {args.command}: interrupted")
        return of_signal(signal.SIGINT)


def _prepare(command: str) -> None:
    """Chooses what JAX reads when its backend starts."""
    from ...mesh import has_gpu, use_cpu
    from ...train import all_reduce_with_nccl

    if command in _OF_FILES:
        use_cpu()
    elif has_gpu():
        all_reduce_with_nccl()


def _say(text: str) -> None:
    """Prints the reason for an exit status, which is right even if nobody can read the reason."""
    try:
        print(text, file=sys.stderr)
    except OSError:
        discard_output(sys.stderr)


def _is_read() -> bool:
    """Returns whether standard output still has a reader; otherwise (for example, after `| head`) discards the rest."""
    out = select.poll()
    out.register(sys.stdout.fileno(), 0)
    if not out.poll(0):  # reports only errors of the pipe
        return True
    discard_output()
    return False
