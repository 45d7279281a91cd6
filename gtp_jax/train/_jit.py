"""Jits functions with XLA options that depend on the mesh in scope at the call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.core

from ..flight_recorder import step_recorded
from ._memory import check_distinct

# Words of JAX's messages about arguments: deleted arrays, shapes without values, and what is no array.
_REFUSED = ("has been deleted", "valid JAX type", "as an abstract array")


class Jitted:
    """A jitted function whose compile options are chosen when it is called, not when it is built.

    If an argument is traced (in an outer `jax.jit`, or a `lax.scan` over steps), calls the function without a `jax.jit`
    of its own, because XLA options belong to the outermost `jax.jit`.

    Args:
        function: the function to compile.
        options: a function that returns the XLA options for the mesh in scope, given the arguments of a call.
        donate_argnums: the positions of donated arguments, as in `jax.jit`.
        check: a function that refuses bad arguments, unless one of them is traced. To save time, it is called only
            before the first call under given options, and if JAX refuses an argument.
        kept: a function that returns the part of a result that is not donated to a later call.
        after: a function that is called with the arguments and the result of each call, unless an argument is traced.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: Callable[..., dict[str, Any]],
        donate_argnums: tuple[int, ...] = (),
        check: Callable[..., None] = lambda *_: None,
        kept: Callable[[Any], Any] = lambda result: result,
        after: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.__wrapped__ = function
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        self._options = options
        self._donated, self._check, self._kept, self._after = donate_argnums, check, kept, after
        self._signature = inspect.signature(function)
        self._by_options: dict[Any, Any] = {}
        self._ran: set[Any] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = self._by_place(args, kwargs)
        if any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, jax.tree.leaves(args)))):
            return self.__wrapped__(*args)
        jitted = self.jitted(*args)
        if jitted not in self._ran:
            self._check(*args)
        try:
            with step_recorded() as record:
                result = jitted(*args)
                record(self._kept(result))
        except (RuntimeError, TypeError, ValueError) as error:
            self._explain(error, args)
            raise
        self._ran.add(jitted)
        self._after(args, result)
        return result

    def _explain(self, error: Exception, args: tuple[Any, ...]) -> None:
        """Raises an error of our own in the place of one with which JAX refuses an argument."""
        text = str(error)
        try:
            if any(words in text for words in _REFUSED):
                self._check(*args)
            if "donate the same buffer twice" in text:
                check_distinct(args[0])
        except (TypeError, ValueError) as ours:
            raise ours from None

    def jitted(self, *args: Any) -> Any:
        """Returns the `jax.jit` of the function with the options for the mesh in scope and these arguments."""
        options = self._options(*args)
        key = tuple(sorted(options.items()))
        if key not in self._by_options:
            self._by_options[key] = jax.jit(self.__wrapped__, donate_argnums=self._donated, compiler_options=options)
        return self._by_options[key]

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what `jax.jit(...).lower` returns."""
        args = self._by_place(args, kwargs)
        return self.jitted(*args).lower(*args)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what `jax.jit(...).trace` returns."""
        args = self._by_place(args, kwargs)
        return self.jitted(*args).trace(*args)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what `jax.jit(...).eval_shape` returns."""
        args = self._by_place(args, kwargs)
        return self.jitted(*args).eval_shape(*args)

    def _by_place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Returns all arguments of a call by position, because donation and checks identify them by position."""
        return self._signature.bind(*args, **kwargs).args if kwargs else args
