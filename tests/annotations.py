"""What checks the annotations of the library's functions in tests."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with its annotations checked at every call, but for constructors: JAX also builds pytrees of
    placeholders and of partitions."""
    return function if function.__name__ == "__init__" else beartype(function)
