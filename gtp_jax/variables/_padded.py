"""Provides variables that store a padded array, but are read and set in their logical shape."""

from __future__ import annotations

import math
import warnings
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jax.sharding import NamedSharding

from ..layout import SMALL, AnyLayout, ArrayLayout, Layout, Placement, cut, cut_shape, is_padded, pad, padded_shape
from ..mesh import current_view, stacked_spec


class Padded(nnx.Variable):
    """Provides the methods of variables that may hold a padded array; see `gtp_jax.layout.Storage`.

    The layout of the array is in the metadata, under one of three keys: "array" or "layout", for a weight of gtp_jax's
    own layers; "padded", for a weight of another module: its placement, without a first dimension that a loop may
    slice.

    `param[...]`, `param.shape` and `get_value` show the logical array. `param[...] = array`, `set_value` and
    `nnx.update` accept an array of logical shape, and pad it. `nnx.state` and `get_raw_value` return the stored array,
    whose padding is zero. `nnx.update` accepts a state from `nnx.state`, but refuses a bare array of the stored shape:
    `nnx.Optimizer` would otherwise store updates that it computed from the padded array.

    In local view, variables hold this rank's part, which is read and set unchanged.
    """

    def get_value(self, **index: Any) -> Any:
        layout, value = padded_layout(self), self.get_raw_value()
        if layout is None or not _has_shape(value, layout.array_shape):
            return super().get_value(**index)
        if isinstance(value, jax.ShapeDtypeStruct):
            return cut(value, layout)
        whole = cut(super().get_value(), layout)
        at = index.get("index", ...)
        return whole if at is ... else whole[at]

    def set_value(self, value: Any, **index: Any) -> None:
        layout, before = padded_layout(self), self.get_raw_value()
        if layout is None or current_view() == "local":
            super().set_value(value, **index)
            return
        if isinstance(before, jax.Array) and _has_shape(before, layout.array_shape):
            super().set_raw_value(cut(before, layout))
        try:
            super().set_value(value, **index)
        except BaseException:
            super().set_raw_value(before)
            raise
        self.set_raw_value(self.get_raw_value())

    def set_raw_value(self, value: Any, **options: Any) -> None:
        layout = padded_layout(self)
        # only `nnx.update` passes options, and only if it is given an array
        if options and layout is not None and current_view() != "local" and _has_shape(value, layout.array_shape):
            raise _not_updated(self.get_metadata())
        super().set_raw_value(_stored(value, padded_layout(self)), **options)

    def update_from_state(self, variable_state: Any) -> None:
        super().update_from_state(variable_state)
        self.set_raw_value(self.get_raw_value())

    @classmethod
    def from_metadata(cls, value: Any, attributes: dict[str, Any]) -> Self:
        return super().from_metadata(_stored(value, _of_metadata(attributes)), attributes)  # pyright: ignore


class _RefuseOptimizer:
    """A hook for `on_create_value` that raises an error when an `nnx.Optimizer` creates a variable with the metadata
    and the shape of a padded parameter. Its truth value is false, because NNX warns if a new variable has a hook whose
    truth value is true.

    Raises:
        ValueError: if the variable belongs to an `nnx.Optimizer`, and has the logical or the stored shape of the
            parameter.
    """

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "refuse_optimizer"

    def __call__(self, variable: nnx.Variable, value: Any) -> Any:
        layout = _of_metadata(variable.get_metadata())
        shapes = () if layout is None else (layout.shape, layout.array_shape)
        if layout is not None and isinstance(variable, nnx.OptState) and any(_has_shape(value, own) for own in shapes):
            raise _not_updated(variable.get_metadata())
        return value


# a single object, because metadata are equal only if they hold the same object
refuse_optimizer = _RefuseOptimizer()


class _WarnOptimizer:
    """A hook for `on_create_value` that warns when an `nnx.Optimizer` creates a variable with the metadata and the
    shape of a large parameter that a `TrainState` would store padded. Its truth value is false, as that of
    `_RefuseOptimizer`."""

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "warn_optimizer"

    def __call__(self, variable: nnx.Variable, value: Any) -> Any:
        even = even_layout(variable)
        if even is None or not isinstance(variable, nnx.OptState):
            return value
        if _has_shape(value, even.shape) and math.prod(even.shape) > SMALL:
            warnings.warn(
                f"an `nnx.Optimizer` updates a weight of shape {even.shape}, which every device stores whole, or in "
                "larger parts than an even share, because the mesh divides none of its dimensions. A "
                "`gtp_jax.TrainState` stores it padded, in equal parts. Otherwise, choose sizes that the degrees "
                "divide.",
                stacklevel=2,
            )
        return value


warn_optimizer = _WarnOptimizer()


class RefuseLinen:
    """The `linen_meta_type` of a padded weight. `nnx.bridge.to_linen` asks this class what Linen should store. The
    class raises an error, because Linen would store the whole array on every rank, in a separate collection."""

    @classmethod
    def from_nnx_metadata(cls, metadata: dict[str, Any]) -> Any:
        """Refuses to store a padded weight in Linen.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"{_padded_to(metadata)}, which Linen variables do not support. Call `init` of `nnx.bridge.to_linen` "
            "outside of `gtp_jax.layout.even_shares()`, or under `gtp_jax.layout.even_shares(False)`."
        )


def _padded_to(metadata: dict[str, Any]) -> str:
    layout = metadata.get("placement") or _of_metadata(metadata) or metadata["layout"]  # the last is of padded codes
    return f"a weight of shape {layout.shape} is stored padded to {layout.array_shape}"


def _not_updated(metadata: dict[str, Any]) -> ValueError:
    return ValueError(
        f"{_padded_to(metadata)}, and an `nnx.Optimizer` or a call of `nnx.update` does not know which elements are "
        "padding. Train with `gtp_jax.TrainState` and `train_step`; pass `nnx.update` an array of the weight's own "
        "shape; or create the model outside of `gtp_jax.layout.even_shares()`, and do not take it from a `TrainState`."
    )


class PaddedParam(Padded, nnx.Param):
    """A parameter that is stored padded."""


def make_padded(param: nnx.Variable, placement: Placement) -> None:
    """Declares that a parameter is stored padded: changes its class and metadata, but not its value.

    Args:
        param: a parameter of the class `nnx.Param` or `PaddedParam`.
        placement: how it is stored, without a first dimension that a loop may slice.
    """
    param.set_metadata(padded=placement)
    _become_padded(param)


def even_layout(variable: nnx.Variable) -> AnyLayout | None:
    """Returns the layout with which a `TrainState` stores a weight padded that is not padded yet; `None` if there is
    none. See `gtp_jax.layout.even_shares`."""
    metadata = variable.get_metadata()
    layout = metadata.get("array") or metadata.get("layout") or metadata.get("placement")
    return None if layout is None else layout.even


def store_even(param: nnx.Variable) -> None:
    """Stores a weight of gtp_jax's own layers with its `even_layout`: changes the variable in place.

    Args:
        param: a parameter of the class `nnx.Param`, or of a class that may be padded.
    """
    metadata, even = param.get_metadata(), even_layout(param)
    assert isinstance(even, Layout | ArrayLayout), even
    value = param.get_raw_value()
    if "array" in metadata:
        param.set_metadata(array=even)
    param.set_metadata(layout=even.matrix if isinstance(even, ArrayLayout) else even)
    if metadata.get("out_sharding") is not None:
        param.set_metadata(out_sharding=tuple(stacked_spec(even.spec, value.ndim)))
    _become_padded(param)
    if isinstance(value, jax.ShapeDtypeStruct):
        spec, shape = stacked_spec(even.spec, value.ndim), padded_shape(value.shape, even)
        placed = isinstance(value.sharding, NamedSharding)
        sharding = NamedSharding(value.sharding.mesh, spec) if placed else value.sharding
        value = jax.ShapeDtypeStruct(shape, value.dtype, sharding=sharding)
    param.set_raw_value(value)


def _become_padded(param: nnx.Variable) -> None:
    """Gives a parameter the class and the hooks of one that is stored padded."""
    if not isinstance(param, Padded):
        object.__setattr__(param, "__class__", PaddedParam)
    param.set_metadata(on_create_value=refuse_optimizer, linen_meta_type=RefuseLinen)


def padded_by_state(weight: str, shape: tuple[int, ...]) -> ValueError:
    """Returns the error for a weight that is not padded, and whose variable holds the padded array of a `TrainState`.

    Args:
        weight: the weight, as the message names it.
        shape: the shape of the array.
    """
    return ValueError(
        f"{weight} holds an array of shape {shape}, which a `gtp_jax.TrainState` has padded. Take the model from the "
        "state (`state.model()`), or the arrays from `state.logical()`."
    )


def padded_layout(variable: nnx.Variable) -> AnyLayout | None:
    """Returns the layout of a weight whose array is stored padded; `None` for any other variable, and for codes."""
    metadata = variable.get_metadata()
    if "padded" in metadata and not isinstance(variable, Padded):  # an adapter, which has copied the metadata
        return None
    return _of_metadata(metadata)


def logical_shape(variable: nnx.Variable) -> tuple[int, ...]:
    """Returns the shape of a variable's logical array, including a leading dimension of layers. The variable may be
    abstract."""
    layout, shape = padded_layout(variable), tuple(variable.get_raw_value().shape)
    if layout is None or not _has_shape(variable.get_raw_value(), layout.array_shape):
        return shape
    return cut_shape(shape, layout)


def _of_metadata(metadata: dict[str, Any]) -> AnyLayout | None:
    layout = metadata.get("array") or metadata.get("layout") or metadata.get("padded")
    if layout is None or not is_padded(layout):
        return None
    return None if getattr(metadata.get("frozen"), "wire", None) else layout  # of codes, see `padded_codes`


def _has_shape(value: Any, shape: tuple[int, ...]) -> bool:
    own = getattr(value, "shape", ())
    return len(own) - len(shape) in (0, 1) and tuple(own[len(own) - len(shape) :]) == shape


def _stored(value: Any, layout: AnyLayout | None) -> Any:
    """Returns what a variable stores when `value` is put into it. An array of logical shape is padded, and, unless JAX
    traces a program, sharded on the mesh in scope. Other values, abstract arrays, and all values in local view are
    returned unchanged."""
    if layout is None or current_view() == "local" or not _has_shape(value, layout.shape):
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return value
    padded = pad(jnp.asarray(value), layout)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or isinstance(padded, Tracer):
        return padded
    return jax.device_put(padded, NamedSharding(jax.sharding.get_mesh(), stacked_spec(layout.spec, padded.ndim)))
