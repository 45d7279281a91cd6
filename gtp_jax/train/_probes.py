"""Checks, while a program runs, whether the outputs of a model's modules, and the gradients of these outputs, are
finite."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..nn import Stack, split_model
from ._state import TrainState

# The attribute in which a probed model stores each module's path.
_PATH = "_path_in_model"


class Probes:
    """A context manager that adds probes to the calls (`__call__`) of a model's modules.

    Entering the context returns a state. A program has the probes if it is traced inside the context and makes its
    model from that state.

    A probe checks one value while the program runs: a floating-point output of a module in forward, or the gradient of
    that output in backward. It returns the value unchanged. The callbacks of a program arrive in any order, so probes
    are numbered in the order in which they are traced, which is the order of the computation. The layers of a `Stack`
    are unrolled, so that each layer has its own probes.

    Args:
        state: the state of the model; it may be abstract.

    Attributes:
        fired: the numbers of the probes that saw a value that is not finite, in this process.
    """

    def __init__(self, state: TrainState) -> None:
        self.fired: set[int] = set()
        self._names: list[tuple[str, str]] = []
        self._calls: Counter[str] = Counter()
        self._lengths: dict[str, int] = {}
        model = state.model()
        for path, module in nnx.iter_modules(model):
            name = ".".join(map(str, path))
            setattr(module, _PATH, name)
            if isinstance(module, Stack):
                self._lengths[".".join(map(str, (*path, "layers")))] = module.length
                module.schedule = dataclasses.replace(module.schedule, unroll="full")
                module.remat = "everything"  # `jax.checkpoint` would trace equal layers only once
        self._classes = {type(module) for path, module in nnx.iter_modules(model) if callable(module)}
        self._state = dataclasses.replace(state, model_def=split_model(model).model_def)

    def __enter__(self) -> TrainState:
        """Returns the state of the probed model."""
        originals = {cls: cls.__call__ for cls in self._classes}
        self._own = {cls: vars(cls).get("__call__") for cls in self._classes}
        for cls, call in originals.items():
            setattr(cls, "__call__", self._probed(call))  # noqa: B010
        return self._state

    def __exit__(self, *_: object) -> None:
        for cls, call in self._own.items():
            if call is None:
                delattr(cls, "__call__")
            else:
                setattr(cls, "__call__", call)  # noqa: B010

    def name(self, number: int) -> tuple[str, str]:
        """Returns what a probe checks, `output` or `gradient`, and the path of its module."""
        return self._names[number]

    def _probed(self, call: Any) -> Any:
        @functools.wraps(call)
        def probed(module: Any, *args: Any, **kwargs: Any) -> Any:
            path = getattr(module, _PATH, None)
            if path in self._lengths:
                self._calls[path] += 1
            y = call(module, *args, **kwargs)
            if path is None:
                return y
            layer = self._layer(path)
            return jax.tree.map(lambda x: self._probe(x, layer) if _is_float(x) else x, y)

        return probed

    def _layer(self, path: str) -> str:
        """Returns the path of a module that is called. Inside a `Stack`, the path includes the number of the layer
        whose call began last, which is the layer that is running."""
        layers = next((name for name in self._lengths if f"{path}.".startswith(f"{name}.")), None)
        if layers is None:
            return path
        number = (self._calls[layers] - 1) % self._lengths[layers]
        return f"{layers}[{number}]{path.removeprefix(layers)}"

    def _probe(self, x: jax.Array, layer: str) -> jax.Array:
        """Returns `x`; adds one probe for its value and, if it is differentiated, one for its gradient."""

        @jax.custom_vjp
        def probe(x: jax.Array) -> jax.Array:
            return self._report(x, "output", layer)

        probe.defvjp(
            lambda x: (self._report(x, "output", layer), None), lambda _, g: (self._report(g, "gradient", layer),)
        )
        return probe(x)

    def _report(self, x: jax.Array, kind: str, layer: str) -> jax.Array:
        number = len(self._names)
        self._names.append((kind, layer))

        def note(finite: Any) -> None:
            if not finite.all():
                self.fired.add(number)

        jax.debug.callback(note, jnp.isfinite(x).all())
        return x


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)
