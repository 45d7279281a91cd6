"""What the exit status of the command line means; launchers and schedulers act on it."""

from __future__ import annotations

import errno

DONE = 0
# An error of the program itself.
FAILED = 1
# A mistake in the arguments, or in what they name: the same command will fail again.
MISTAKE = 2
# Something outside the run failed, a device, a host, a disk: the same command with --resume may go on. `EX_TEMPFAIL`.
RETRY = 75
# The loss is not finite.
DIVERGED = 76

# How JAX begins its message.
EXHAUSTED = "RESOURCE_EXHAUSTED"

# What a system refuses though nothing is wrong with the command.
_PASSING = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.ENODEV,
    errno.ENXIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.EAGAIN,
    errno.EINTR,
    errno.EBUSY,
    errno.EREMOTEIO,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    errno.EPIPE,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.ENETDOWN,
}


def of_signal(number: int) -> int:
    """Returns the status of a run that a signal has ended, as shells have it."""
    return 128 + number


def of_device(error: BaseException) -> bool:
    """Returns whether JAX's runtime raised the error."""
    if not isinstance(error, RuntimeError):
        return False
    import jax

    return isinstance(error, jax.errors.JaxRuntimeError)


def out_of_memory(error: BaseException) -> bool:
    """Says whether a device had too little memory."""
    return of_device(error) and EXHAUSTED in str(error)


def of_error(error: BaseException) -> int:
    """Returns the status of a command that an error has ended; an error may have one of its own, `exit_code`."""
    if (own := getattr(error, "exit_code", None)) is not None:
        return own
    if of_device(error):  # memory that is too small will be so again
        return MISTAKE if out_of_memory(error) else RETRY
    if isinstance(error, OSError):
        return RETRY if error.errno in _PASSING else MISTAKE
    return MISTAKE if isinstance(error, (ValueError, ImportError)) else FAILED
