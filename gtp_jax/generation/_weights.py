"""Prepares the weights of a model for computing many tokens: gathers them and casts them to the compute dtype."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..formats import QuantizedArray
from ..layout import AnyLayout, Layout, cut
from ..mesh import device_memory
from ..nn import Layer, padded_codes, partition_of, weight_owners, with_gathered_weights
from ..variables import padded_layout

Gather = Literal["once", "each_token"]

# The memory that a device needs in addition to the whole weights while they are gathered, as a fraction of their size.
_BESIDE = 0.1


# Unsigned integer dtypes by item size in bytes.
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def prepared(model: nnx.Module, gather: Gather | None) -> tuple[nnx.Module, bool]:
    """Prepares a copy of a model for generation: turns off dropout and sequence parallelism, and prepares the weights.

    Args:
        model: the model, which is not modified; the copy shares the arrays that it does not change.
        gather: when weights are gathered; see `generate`.

    Returns:
        The copy, and whether its weights are left to be gathered for each token.
    """
    graph, state = nnx.split(model)
    copy = nnx.merge(graph, jax.tree.map(lambda array: array, state))  # with new variables
    copy.eval()
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, Layer) and getattr(module, "sequence_parallel", False):
            module.sequence_parallel = False  # a single position cannot be sharded
    variables = [(v, owner.dtype) for owner in weight_owners(copy).values() for v in owner.weights()]
    _multiply_in_dtype(variables)
    way = _way(variables, gather)
    if way == "fused":
        return nnx.merge(*_fused(*nnx.split(copy))), False
    if way == "whole":
        _make_whole(variables)
    return copy, way == "each_token"


@functools.partial(jax.jit, static_argnums=0)
def _fused(graph: Any, state: Any) -> tuple[Any, Any]:
    """Gathers and fuses the weights of a model, in one program."""
    model = nnx.merge(graph, jax.tree.map(lambda array: array, state))
    return nnx.split(with_gathered_weights(model))


def with_plain_shardings(state: Any) -> Any:
    """Returns a state whose shardings are in canonical form, such as `P()` for `P(None)`. Nothing is copied.

    `jax.jit` would compile again for an equivalent sharding that is written differently.
    """

    def plain(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
            return x
        spec = [
            entry[0] if isinstance(entry, tuple) and len(entry) == 1 else entry or None for entry in x.sharding.spec
        ]
        while spec and spec[-1] is None:
            spec.pop()
        return jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec(*spec)))

    return jax.tree.map(plain, state)


def check_gather(gather: Any) -> None:
    """Checks the value of `gather`.

    Raises:
        ValueError: if the value is unknown; the message names it and the allowed values.
    """
    if gather is not None and gather not in get_args(Gather):
        raise ValueError(
            f"`gather` is {gather!r}; it must be 'once' (weights are gathered once per call, and stay so), "
            "'each_token' (layer by layer, for each token), or None for 'once' if memory allows it."
        )


def _multiply_in_dtype(variables: list[tuple[nnx.Variable, Any]]) -> None:
    """Makes frozen weights multiply in the compute dtype instead of with quantized operands.

    Operands of some formats share one scale among all rows, so that a row's tokens would depend on the other rows.
    """
    for variable, _ in variables:
        known = variable.get_metadata().get("frozen")
        if known is not None:
            variable.set_metadata(frozen=known._replace(operands=None))


def _way(variables: list[tuple[nnx.Variable, Any]], gather: Gather | None) -> Literal["fused", "whole", "each_token"]:
    """Returns how the weights are prepared.

    - `fused`: gathered, cast, and fused in the form in which they are multiplied.
    - `whole`: gathered but not fused; weights that are not quantized are also cast. Chosen if some are quantized, or if
      none needs a gather and there is no memory for a copy.
    - `each_token`: left as they are, because a whole copy does not fit or the user asked for it.
    """
    codes = any(isinstance(v.get_raw_value(), QuantizedArray) for v, _ in variables)
    bytes_of = [_whole_bytes(v, dtype) for v, dtype in variables]
    travels = [_layout(v).ranks > 1 or _layout(v).copies > 1 for v, _ in variables]
    if gather is not None:
        return "each_token" if gather == "each_token" else "whole" if codes else "fused"
    needed, memory = sum(bytes_of), device_memory()
    if memory is None or needed * (1 + _BESIDE) <= memory.free:
        return "whole" if codes else "fused"
    if not any(travels):
        return "whole"
    from ..hlo import quantity  # part of the reports, which `import gtp_jax` does not load

    sent = sum(one for one, moves in zip(bytes_of, travels, strict=True) if moves)
    warnings.warn(
        f"every device gathers {quantity(sent, 'B')} of weights for every token, because a whole copy, "
        f"{quantity(needed, 'B')}, does not fit into the {quantity(memory.free, 'B')} of free memory. Save a "
        "checkpoint, and generate from it with `gtp-jax generate`, which restores the weights whole.",
        stacklevel=5,
    )
    return "each_token"


def _make_whole(variables: list[tuple[nnx.Variable, Any]]) -> None:
    """Casts weights to the compute dtype (quantized ones are not cast) and gathers them, in one program."""
    values = [v.get_raw_value() for v, _ in variables]
    targets: list[_Target] = []
    for variable, dtype in variables:
        before, padded = _specs(variable), _paddings(variable)
        _lay_out_whole(variable)
        codes = isinstance(variable.get_raw_value(), QuantizedArray)
        kept = None if codes else np.dtype(dtype)
        targets += [_Target(kept, *one) for one in zip(before, _specs(variable), padded, strict=True)]
    ready = _whole(jax.tree.leaves(values), targets=tuple(targets))
    for (variable, _), value in zip(variables, jax.tree.unflatten(jax.tree.structure(values), ready), strict=True):
        variable.set_raw_value(value)


class _Target(NamedTuple):
    """How an array is converted.

    Attributes:
        dtype: the new dtype; `None` to keep the old one.
        before: the partition spec before the gather.
        after: the partition spec after the gather.
        padded: the layout of a stored array that is padded; otherwise `None`.
    """

    dtype: np.dtype | None
    before: PartitionSpec
    after: PartitionSpec
    padded: AnyLayout | None


def _specs(variable: nnx.Variable) -> list[PartitionSpec]:
    return jax.tree.leaves(partition_of(variable))


def _paddings(variable: nnx.Variable) -> list[AnyLayout | None]:
    """Returns the layout of each array that a variable holds; `None` for one that is not padded."""
    value = variable.get_raw_value()
    if not isinstance(value, QuantizedArray):
        return [padded_layout(variable)]
    padded = padded_codes(variable)
    return [padded.get(name) for name in ("codes", "scales", "amax") if getattr(value, name) is not None]


def _lay_out_whole(variable: nnx.Variable) -> None:
    metadata: dict[str, Any] = {"layout": _layout(variable).gathered}
    if (array := variable.get_metadata().get("array")) is not None:
        metadata["array"] = dataclasses.replace(array, matrix=metadata["layout"])
    variable.set_metadata(**metadata)
    if not isinstance(variable.get_raw_value(), QuantizedArray):
        variable.set_metadata(out_sharding=tuple(partition_of(variable)))


@functools.partial(jax.jit, static_argnames=("targets",))
def _whole(arrays: list[jax.Array], *, targets: tuple[_Target, ...]) -> list[jax.Array]:
    return [_whole_array(x, target) for x, target in zip(arrays, targets, strict=True)]


def _whole_array(x: jax.Array, target: _Target) -> jax.Array:
    x = x if target.dtype is None else x.astype(target.dtype)
    if jax.sharding.get_abstract_mesh().empty or target.before == target.after:
        return x
    bits = lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize]) if jnp.issubdtype(x.dtype, jnp.floating) else x
    for spec in (target.before, target.after):  # cast before the gather: XLA does not move a cast across a bitcast
        bits = lax.with_sharding_constraint(bits, spec)
    bits = bits if target.padded is None else cut(bits, target.padded)
    return lax.bitcast_convert_type(bits, x.dtype)


def _layout(variable: nnx.Variable) -> Layout:
    return variable.get_metadata()["layout"]


def _whole_bytes(variable: nnx.Variable, dtype: jax.typing.DTypeLike) -> int:
    """Returns the size in bytes of a gathered weight on one device."""
    value, layout = variable.get_raw_value(), _layout(variable).gathered
    parts = layout.tensor.ranks * layout.experts.ranks
    if isinstance(value, QuantizedArray):
        return sum(x.nbytes for x in jax.tree.leaves(value)) // parts
    return math.prod(value.shape) * np.dtype(dtype).itemsize // parts
