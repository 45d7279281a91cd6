"""Chooses the code that runs an operation: the reference, in plain jax.numpy, or the native kernel of the platform.

Every operation with a choice has an argument `implementation`, where `None` selects the best available. Native kernels
depend on the platform: this library's own kernels, cuDNN's attention, or Pallas kernels. Quantization, packing and
their inverses are equal bit for bit in both implementations; products and attention may differ in rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from ..mesh import platform

Implementation = Literal["reference", "native"]


class Row(Protocol):
    """A row of a table of the implementations of an operation, which are called in the same way.

    Attributes:
        native: whether it is a native kernel, rather than a reference.
        lacks: returns why it does not compute what is asked for; an empty string if it does.
    """

    @property
    def native(self) -> bool: ...
    @property
    def lacks(self) -> Callable[..., str]: ...


def choose[R: Row](operation: str, implementation: Implementation | None, table: Sequence[R], asked: Any) -> R:
    """Returns the first row of a table that computes what is asked for.

    Args:
        operation: the name of the operation, for messages.
        implementation: the implementation that the caller asks for; `None` uses a native kernel if there is one.
        table: the implementations. The last native one is the one that takes the most, so a message says what it lacks;
            the last reference lacks nothing.
        asked: what `lacks` of every row takes.

    Raises:
        ValueError, NotImplementedError: as in `runs_native`.
    """
    reasons = [row.lacks(asked) for row in table]
    of_natives = [reason for row, reason in zip(table, reasons, strict=True) if row.native]
    native = runs_native(operation, implementation, "" if "" in of_natives else of_natives[-1])
    return next(row for row, reason in zip(table, reasons, strict=True) if row.native == native and not reason)


def runs_native(operation: str, implementation: Implementation | None, missing: str) -> bool:
    """Returns whether an operation runs as a native kernel.

    Args:
        operation: the name of the operation, for messages.
        implementation: the implementation that the caller asks for; `None` uses the native kernel if there is one.
        missing: why there is no native kernel for these operands on the current platform; empty if there is one.

    Raises:
        ValueError: if `implementation` is not one of the allowed values.
        NotImplementedError: if it is `"native"`, and there is no native kernel.
    """
    if implementation not in (None, "reference", "native"):
        raise ValueError(
            f"`implementation` is {implementation!r}; it must be 'reference', 'native' or None for the best."
        )
    if implementation == "native" and missing:
        raise NotImplementedError(
            f"there is no native {operation!r} for {platform()!r} here: {missing}. "
            "Leave `implementation` out to use the reference."
        )
    return implementation != "reference" and not missing
