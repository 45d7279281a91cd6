"""A finding of `gtp-jax doctor`."""

from __future__ import annotations

import dataclasses
from typing import Literal

Status = Literal["ok", "optional", "broken"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: what was checked.
        status: `ok`; `optional` if something can be improved; `broken` if training cannot work.
        found: what was found.
        remedy: what to do, if anything.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message."""
    return str(error).splitlines()[0]
