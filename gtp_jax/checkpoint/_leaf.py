"""One array of a state, and its path on disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import tensorstore as ts

from .._foreign import brief
from .._random_keys import as_key, is_key, key_impl, key_words
from ..formats import QuantizedArray
from ..layout import cut_shape, is_padded, layouts_of_codes, padded_shape, row_blocks_layout
from ..mesh import Path, of_parameter, with_paths
from ._logical import LogicalArray


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of a state.

    Attributes:
        path: the keys on disk, outermost first.
        array: the array, or its shape, dtype and sharding. In memory it may be padded.
        logical: the shape on disk if the array is padded in memory; otherwise `None`.
    """

    path: Path
    array: Any
    logical: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """The path as one string."""
        return "/".join(self.path)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, that of the array on disk."""
        return self.array.shape if self.logical is None else self.logical

    @property
    def dtype(self) -> str:
        """The name of the dtype."""
        return str(self.array.dtype)

    def stored(self) -> jax.ShapeDtypeStruct:
        """Returns the shape, dtype and sharding of the array in memory, as orbax knows them."""
        shape = jax.ShapeDtypeStruct(self.array.shape, self.array.dtype, sharding=self.array.sharding)
        return key_words(shape) if is_key(shape) else shape

    def to_disk(self) -> jax.Array | LogicalArray:
        """Returns the array that is written."""
        if self.logical is not None:
            return LogicalArray(self.array, self.logical)
        return key_words(self.array) if is_key(self.array) else self.array  # orbax restores a typed key as integers

    def of_disk(self, stored: jax.Array) -> jax.Array | LogicalArray:
        """Returns an array that orbax read, as `to_disk` returns it."""
        return stored if self.logical is None else LogicalArray(stored, self.logical)

    def to_memory(self, stored: jax.Array) -> jax.Array:
        """Returns an array that orbax read, as a typed key if `array` is one."""
        return as_key(stored, key_impl(self.array)) if is_key(self.array) else stored


def leaves(state: Any, padded: Mapping[Path, Any] | None = None) -> list[Leaf]:
    """Returns the leaves of a train state, in the order of `jax.tree.leaves`.

    Args:
        state: a train state; a pytree of `nnx` variables; or any other pytree of arrays.
        padded: the layouts of the parameters whose arrays are padded, by path; those of `state.model_def` by default.
            Variables have their own in their metadata.

    Raises:
        TypeError: if a leaf is neither a jax array nor a `ShapeDtypeStruct` with a sharding.
        ValueError: if two leaves have the same path on disk, or one leaf's path lies below another's.
    """
    known: Mapping[Path, Any] = padded or getattr(getattr(state, "model_def", None), "padded", {})
    variables = with_paths(state, is_leaf=_is_variable)
    layouts = [layout for _, one in variables for layout in _layouts(one)]
    listed = [
        _leaf(path, array, of_parameter(path, known) if layout is None else layout)
        for (path, array), layout in zip(with_paths(state), layouts, strict=True)
    ]
    names: dict[str, str] = {}
    for leaf in listed:
        joined = leaf.name.replace("/", ".")  # orbax joins keys with dots, the manifest with slashes
        if joined in names:
            raise ValueError(
                f"`{leaf.name}` and `{names[joined]}` of the state would be one array on disk, where a path's keys "
                "are joined with dots. Rename one of them."
            )
        names[joined] = leaf.name
    arrays = set(names.values())
    for leaf in listed:
        above = next((name for name in _above(leaf.name) if name in arrays), None)
        if above is not None:
            raise ValueError(
                f"`{above}` of the state would be both an array on disk and a dict that holds `{leaf.name}`, because a "
                "slash within a key separates two keys there. Rename one of them."
            )
    return listed


def check_has_params(state: Any) -> None:
    """Refuses a state without parameters in an attribute `params`.

    Raises:
        TypeError: names the type of `state`, and the remedy.
    """
    mapping = isinstance(state, Mapping)  # excluded, because a mapping's keys may be attributes too (`nnx.State`)
    held = None if mapping else getattr(state, "params", None)
    if held is None or not jax.tree.leaves(held):
        keys = f" with the keys {brief(list(state))}," if mapping else ""
        raise TypeError(
            f"`state_like` is a {type(state).__name__}{keys} without an attribute `params` that holds arrays. "
            "`restore_params` takes a `TrainState`, such as "
            "`gtp_jax.TrainState.create(gtp_jax.nn.abstract_model(factory), optimizer)`. If the checkpoint was saved "
            "from an `nnx.State`, call `restore`, which takes one."
        )


def check_savable(leaves: Sequence[Leaf]) -> None:
    """Refuses a state with a leaf that cannot be saved.

    Raises:
        TypeError: if a leaf is only a shape.
        ValueError: if a leaf has been donated, is empty, or has a dtype that orbax or `Digests` do not support.
    """
    for leaf in leaves:
        if not isinstance(leaf.array, jax.Array):
            raise TypeError(f"`{leaf.name}` of the state is a {type(leaf.array).__name__}; only arrays can be saved.")
        if leaf.array.is_deleted():
            raise ValueError(f"`{leaf.name}` of the state has been donated. Save the state that the step returned.")
        if not leaf.array.size or not _has_savable_dtype(leaf):
            raise ValueError(
                f"`{leaf.name}` of the state is {leaf.dtype}{list(leaf.shape)}; only arrays with at least one element, "
                "of a type that orbax stores and that is not complex, can be saved. Leave it out, or store its real "
                "and imaginary parts, or its bits in a type such as uint8."
            )


def _is_variable(node: Any) -> bool:
    return hasattr(node, "get_metadata")


def _layouts(node: Any) -> list[Any]:
    """Returns, for each array of a variable, the layout that its metadata contain, or `None`."""
    metadata = node.get_metadata() if _is_variable(node) else {}
    layout = metadata.get("array") or metadata.get("layout") or metadata.get("padded")
    arrays, value = with_paths(node), None if layout is None else node.get_raw_value()
    if layout is None or not isinstance(value, QuantizedArray):
        return [layout] * len(arrays)
    of_codes = layouts_of_codes(layout, value.format)
    return [of_codes.get(path[-1]) for path, _ in arrays]


def _leaf(path: Path, array: Any, layout: Any) -> Leaf:
    if not isinstance(array, jax.Array | jax.ShapeDtypeStruct) or array.sharding is None:
        raise TypeError(
            f"`{'/'.join(path)}` of the state is a {type(array).__name__} without a sharding; a jax.Array, or a "
            "jax.ShapeDtypeStruct with a sharding, is expected. Make the state under `jax.set_mesh(mesh)`, or place "
            "the array with `jax.device_put(value, sharding)`."
        )
    return Leaf(path, array, _logical(array.shape, layout))


def _logical(shape: tuple[int, ...], layout: Any) -> tuple[int, ...] | None:
    """Returns the logical shape of an array of this shape if it is padded as a layout says, or has one element per
    block of an array that is; otherwise `None`."""
    own = [] if layout is None else [one for one in (layout, row_blocks_layout(layout)) if is_padded(one)]
    return next((cut_shape(shape, one) for one in own if padded_shape(shape, one) == shape), None)


def _above(name: str) -> Iterator[str]:
    """Yields the parents of a path on disk, innermost first."""
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def _has_savable_dtype(leaf: Leaf) -> bool:
    dtype = leaf.stored().dtype
    try:
        ts.dtype(str(dtype))
    except ValueError:
        return False
    return not jnp.issubdtype(dtype, jnp.complexfloating)
