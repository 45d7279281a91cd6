"""Checks the sizes that users pass to layers."""

from __future__ import annotations

import numbers
from typing import Any, TypeGuard


def is_size(value: Any) -> TypeGuard[int]:
    """Returns whether a value is a whole number of at least 1, of Python or of NumPy."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1
