"""Collects the variables that a layer writes in a call: its outputs in addition to the activation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..chain import Outputs, is_float
from ..variables import Leaf, is_same, is_variable, leaves_of, raw_value
from ._cache import Cache
from ._set_weights import Held, is_weight

# The variables of one layer, or the stacked variables of a stack's layers, and arrays that are plain attributes, by
# path.
Written = dict[tuple[Any, ...], Leaf]


class AuxLoss(nnx.Variable):
    """An auxiliary loss, such as one that balances experts. Declare it in `__init__`, and write it in the call.

        self.balance = gtp_jax.nn.AuxLoss(jnp.zeros(()))   # in `__init__`
        self.balance.set_value(loss)                    # in `__call__`

    After the call, `nnx.state(model, gtp_jax.nn.AuxLoss)` contains the losses; those of a `Stack` are stacked, one per
    layer. A loss function adds them to its own loss, and gradients flow through them.

    The loss is a variable and not a second return value, because every NNX transformation carries variables: the same
    module works alone, in a Python loop and in a `Stack`. Other types of variables work too. So does `Module.sow`, but
    it creates variables during the call, which NNX has deprecated outside of `nnx.capture`.
    """


class Metric(nnx.Variable):
    """A value that a layer reports, declared and written like an `AuxLoss`. In a `Stack`, gradients do not flow through
    it."""


# The types of variables, besides `Metric`, whose values have no gradient in a `Stack`.
_WITHOUT_GRADIENT = (nnx.BatchStat, nnx.RngState, Cache)


def outputs_of(before: Held, after: Written, name: str) -> Outputs:
    """Returns the variables, other than parameters, that a call has written, as outputs of a layer in a chain.

    Args:
        before: what `held_in` returned for leaves that are not weights before the call.
        after: the leaves of the module after the call, which may have created some.
        name: the name of the module in error messages.

    Raises:
        ValueError: if the call has written a plain attribute that is an array.
    """
    kinds: dict[str, list[tuple[Any, nnx.Variable]]] = {"state": [], "scalars": [], "metrics": []}
    for path, variable in after.items():
        if is_weight(variable):  # see `refuse_set_weights`
            continue
        if path in before and is_same(before[path], jax.tree.leaves(raw_value(variable))):
            continue
        if not is_variable(variable):
            raise ValueError(
                f"a call of {name} writes {'.'.join(map(str, path))}, an array that is an attribute. A layer of a "
                "chain may only write variables; make it an `nnx.Variable`."
            )
        if isinstance(variable, Metric):
            kinds["metrics"].append((path, variable))
        elif isinstance(variable, _WITHOUT_GRADIENT):
            kinds["state"].append((path, variable))
        else:  # floating-point arrays are differentiated, as they would be in a Python loop over the layers
            kinds["scalars"].append((path, _only(variable, floats=True)))
            kinds["state"].append((path, _only(variable, floats=False)))
    return Outputs(**{kind: nnx.from_flat_state(variables) if variables else () for kind, variables in kinds.items()})


def write(module: nnx.Module, parts: list[Outputs], *, stacked: bool) -> None:
    """Writes the outputs that a chain returned for a module to the module's variables.

    Args:
        module: the module, or the layers of a stack.
        parts: the outputs of the module's stages, in order: one for each stretch of a stack's layers (see `_stages`),
            or one if the module is not a stack.
        stacked: whether arrays have a leading dimension of layers.
    """
    outputs = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts) if stacked and len(parts) > 1 else parts[0]
    merged: Written = {}
    for state in (outputs.metrics, outputs.state, outputs.scalars):
        for path, variable in nnx.to_flat_state(state) if state else ():
            merged[path] = variable if path not in merged else _joined(merged[path], variable)
    if not merged:
        return
    before = leaves_of(module)
    written = [(path, before[path].replace(v.get_value()) if path in before else v) for path, v in merged.items()]
    nnx.update(module, nnx.from_flat_state(written))


def _only(variable: nnx.Variable, *, floats: bool) -> nnx.Variable:
    """Returns the variable with only its floating-point arrays, or only its other arrays; the rest is replaced by
    `None`."""
    value = jax.tree.map(lambda a: a if is_float(a) is floats else None, variable.get_value())
    return variable.replace(value)


def _joined(one: nnx.Variable, other: nnx.Variable) -> nnx.Variable:
    value = jax.tree.map(
        lambda a, b: b if a is None else a, one.get_value(), other.get_value(), is_leaf=lambda a: a is None
    )
    return one.replace(value)
