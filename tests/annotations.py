"""What checks the annotations of the library's functions in tests."""

from collections.abc import Callable
from typing import Any

from beartype import beartype

_checks: dict[Any, Callable[..., Any]] = {}


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with its annotations checked at every call, but for constructors: JAX also builds pytrees of
    placeholders and of partitions.

    jaxtyping passes a function without a body, which has the signature of the one to check. It does so for an inner
    function whenever the outer one runs, so checks are kept for the next function with this name and signature.
    """
    if function.__name__ == "__init__":
        return function
    if function.__defaults__ or function.__kwdefaults__:
        return beartype(function)  # a default may be an array, which is not to be kept
    named = function.__module__, function.__qualname__, function.__code__
    key = *named, tuple(function.__annotations__.items())
    if key not in _checks:
        _checks[key] = beartype(function)
    return _checks[key]
