"""Outputs of layers beside the activation: variables that they write."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..chain import Outputs
from ._cache import Cache
from ._layer import Leaf, layout_of, value_of

# Variables of one layer, or the stacked ones of all layers of a stack, and arrays that are attributes, by path.
Written = dict[tuple[Any, ...], Leaf]


class AuxLoss(nnx.Variable):
    """An auxiliary loss, such as one that balances experts: declare it in `__init__`, write it in the call.

        self.balance = gtp_jax.AuxLoss(jnp.zeros(()))   # in `__init__`
        self.balance.set_value(loss)                    # in `__call__`

    After the call, `nnx.state(model, gtp_jax.AuxLoss)` holds the losses, of a `Stack` one a layer, stacked; a loss
    function adds them to its own, and gradients flow through them. This is how NNX hands values out of a module: as
    variables, which every transformation already carries, so that the same module works alone, in a Python loop and in
    a `Stack`. A returned tuple would change what a layer returns, and `Module.sow` creates variables during the call,
    which NNX has deprecated outside of `nnx.capture`; both it and any other variable type work all the same.
    """


class Metric(nnx.Variable):
    """A value that a layer reports, declared and written like an `AuxLoss`. Gradients do not flow through it."""


# Types whose values a `Stack` hands on without a gradient.
_WITHOUT_GRADIENT = (nnx.BatchStat, nnx.RngState, Cache)


def variables_of(module: nnx.Module) -> Written:
    """Returns the module's variables and arrays by path, weights that are gathered excepted."""
    flat = nnx.to_flat_state(nnx.split(module)[1])
    return {path: v for path, v in flat if layout_of(v) is None}


def values_of(variables: Written) -> dict[tuple[Any, ...], Any]:
    """Returns the variables' present values, which a call may replace, or write to: `sow` adds to a dict in place."""
    return {path: jax.tree.map(lambda a: a, value_of(variable)) for path, variable in variables.items()}


def outputs_of(before: dict[tuple[Any, ...], Any], after: Written, name: str) -> Outputs:
    """Returns what a call has written, as the chain's outputs.

    Args:
        before: the values of the module's variables ahead of the call, by path.
        after: the variables after it, perhaps more of them.
        name: of the module.

    Raises:
        ValueError: if the call has written a parameter, or an attribute that is an array.
    """
    kinds: dict[str, list[tuple[Any, nnx.Variable]]] = {"state": [], "scalars": [], "metrics": []}
    for path, variable in after.items():
        if path in before and _is_same(before[path], value_of(variable)):
            continue
        if not isinstance(variable, nnx.Variable):
            raise ValueError(
                f"a call of {name} writes {'.'.join(map(str, path))}, an array that is an attribute. A layer of a "
                "chain may write variables: make it an `nnx.Variable`."
            )
        if isinstance(variable, nnx.Param):
            raise ValueError(
                f"a call of {name} writes the parameter {'.'.join(map(str, path))}. A layer of a chain may write other "
                "variables, such as `nnx.BatchStat`; parameters are updated by an optimizer."
            )
        if isinstance(variable, Metric):
            kinds["metrics"].append((path, variable))
        elif isinstance(variable, _WITHOUT_GRADIENT):
            kinds["state"].append((path, variable))
        else:  # floats are differentiated, as they would be in a Python loop over the layers
            kinds["scalars"].append((path, _only(variable, floats=True)))
            kinds["state"].append((path, _only(variable, floats=False)))
    return Outputs(**{kind: nnx.from_flat_state(variables) if variables else () for kind, variables in kinds.items()})


def write(module: nnx.Module, parts: list[Outputs], *, stacked: bool) -> None:
    """Writes what a chain returned for a module to its variables.

    Args:
        module: a module, or the layers of a stack.
        parts: one, or of a stack one for each of its stretches of layers, in order.
        stacked: whether arrays have a leading dimension of layers.
    """
    outputs = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts) if stacked and len(parts) > 1 else parts[0]
    merged: Written = {}
    for state in (outputs.metrics, outputs.state, outputs.scalars):
        for path, variable in nnx.to_flat_state(state) if state else ():
            merged[path] = variable if path not in merged else _joined(merged[path], variable)
    if not merged:
        return
    before = variables_of(module)
    written = [(path, before[path].replace(v.get_value()) if path in before else v) for path, v in merged.items()]
    nnx.update(module, nnx.from_flat_state(written))


def _only(variable: nnx.Variable, *, floats: bool) -> nnx.Variable:
    """Returns the variable with `None` in place of its other arrays."""
    value = jax.tree.map(lambda a: a if is_float(a) is floats else None, variable.get_value())
    return variable.replace(value)


def _joined(one: nnx.Variable, other: nnx.Variable) -> nnx.Variable:
    value = jax.tree.map(
        lambda a, b: b if a is None else a, one.get_value(), other.get_value(), is_leaf=lambda a: a is None
    )
    return one.replace(value)


def is_float(leaf: Any) -> bool:
    """Says whether gradients are taken with respect to an array."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return jnp.issubdtype(dtype, jnp.inexact)


def _is_same(one: Any, other: Any) -> bool:
    before, after = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))
