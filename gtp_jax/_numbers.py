"""Reads the whole numbers that users pass."""

from __future__ import annotations

import numbers
import operator
from typing import Any, TypeGuard


def is_size(value: Any) -> TypeGuard[int]:
    """Returns whether a value is a whole number of at least 1, of Python or of NumPy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def whole(value: Any) -> int | None:
    """Returns a whole number of Python, NumPy or JAX as an int; `None` for anything else, including a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
