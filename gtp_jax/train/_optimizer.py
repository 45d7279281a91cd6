"""Adapts an optax optimizer to the way a step calls it."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import optax

from ..mesh import Path, with_paths
from ..nn import ModelDef
from ._on_padding import left_in_padding
from ._padding import paddings
from ._scope import Placed, arrays_in_scope

Tree = Any


def check_optimizer(optimizer: Any) -> None:
    """Refuses an optimizer that is not an optax optimizer.

    Raises:
        TypeError: if it is not; the message names its type.
    """
    if not all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        tx = " From an `nnx.Optimizer`, pass its `tx`." if hasattr(optimizer, "tx") else ""
        raise TypeError(
            f"`optimizer` is a {type(optimizer).__name__}, which does not have both `init` and `update`; it must be an "
            f"optax optimizer, such as `optax.adamw(1e-3)`.{tx}"
        )


def of_model(optimizer: optax.GradientTransformation, model_def: ModelDef) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer for the parameters of a model, as they are stored.

    The wrapper takes and returns stored arrays, some of which may be padded. It gives the optimizer the logical arrays,
    without padding, unless the optimizer can update the padded arrays with the same result; see [Note: optimizers on
    padding]. While it calls the optimizer, a `per_layer` inside knows which parameters hold the layers of a `Stack`,
    and the optimizer may ask how its arrays lie on the mesh (`placed_in`).
    The wrapper's update accepts any extra arguments, and passes on those that the optimizer's update accepts.

    Raises:
        TypeError: by `update`, if the optimizer's update requires an extra argument that was not passed.
        ValueError: by `init` and `update`, if a `per_layer` in the optimizer raises it.
    """
    names = _extra_names(optimizer)

    def init(params: Tree) -> Tree:
        padding = paddings(model_def, params)
        with arrays_in_scope(model_def.layer_counts):
            return padding.pad(optimizer.init(padding.cut(params)))

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        padding = paddings(model_def, updates)
        dirty = left_in_padding(optimizer, model_def, padding, updates)
        if dirty is None:
            updates, state, params = map(padding.cut, (updates, state, params))
            extra = {name: padding.cut_argument(value) for name, value in extra.items()}
        known = {name: value for name, value in extra.items() if names is None or name in names}
        with arrays_in_scope(model_def.layer_counts, placed=_placed(model_def, updates)):
            try:
                updated = optimizer.update(updates, state, params, **known)  # pyright: ignore[reportCallIssue]
            except TypeError as error:
                if "required keyword-only argument" not in str(error):
                    raise
                raise TypeError(
                    f"the optimizer's update needs an argument that a step does not have: {error}. A step passes "
                    "`value`, the loss; `grad`, the gradients; and `value_fn`, the loss as a function of the "
                    "parameters. For other arguments write your own step with `gtp_jax.train.loss_and_gradients`."
                ) from error
        return padding.pad(updated) if dirty is None else padding.with_zeros(updated, dirty)

    return optax.GradientTransformationExtraArgs(init, update)


def _placed(model_def: ModelDef, updates: Tree) -> dict[Path, Placed] | None:
    """Returns how the arrays that an optimizer gets for each parameter lie on the mesh in scope; `None` if there is no
    mesh, or it has one device."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return None
    specs = with_paths(model_def.specs)
    pairs = zip(specs, jax.tree.leaves(updates), strict=True)
    return {path: Placed(leaf.shape, spec) for (path, spec), leaf in pairs}


def _extra_names(optimizer: optax.GradientTransformation) -> frozenset[str] | None:
    """Returns the names of the extra arguments that an optimizer's update accepts; `None` if it accepts any name."""
    parameters = list(inspect.signature(optimizer.update).parameters.values())
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters[3:])  # after updates, state and params
