"""The weights of a model in the form in which many tokens are computed with them: whole, in the dtype of compute."""

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
from ..layout import Layout
from ..mesh import of_all_processes
from ..nn import Layer, partition_of, weight_owners, with_gathered_weights

Gather = Literal["once", "each_token"]

# What a device needs beside the weights while they are gathered, as a share of them.
_BESIDE = 0.1

_MIB = 1 << 20

# Integers of as many bytes as a float.
_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def prepared(model: nnx.Module, gather: Gather | None) -> tuple[nnx.Module, bool]:
    """Returns a copy of a model that generates, without dropout, without sequence parallelism, its weights ready; and
    whether its calls gather weights.

    Args:
        model: is left as it is; what the copy does not change is shared with it.
        gather: see `generate`.
    """
    graph, state = nnx.split(model)
    copy = nnx.merge(graph, jax.tree.map(lambda array: array, state))  # variables of its own
    copy.eval()
    for _, module in nnx.iter_modules(copy):
        if isinstance(module, Layer) and getattr(module, "sequence_parallel", False):
            module.sequence_parallel = False  # one position cannot be divided
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
    """Returns a state whose shardings are written in one way, such as `P()` for `P(None)`: `jax.jit` would compile
    again for another way of writing the same. Nothing is copied."""

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
    """Refuses another name.

    Raises:
        ValueError: naming it and what is allowed.
    """
    if gather is not None and gather not in get_args(Gather):
        raise ValueError(
            f"`gather` is {gather!r}; it must be 'once' (weights are whole on every device during the call), "
            "'each_token' (they are gathered layer by layer), or None for 'once' where memory allows it."
        )


def _multiply_in_dtype(variables: list[tuple[nnx.Variable, Any]]) -> None:
    """Has codes decoded before they are multiplied: operands in formats share one scale among all rows, which would
    make a row's tokens depend on the others."""
    for variable, _ in variables:
        known = variable.get_metadata().get("frozen")
        if known is not None:
            variable.set_metadata(frozen=known._replace(operands=None))


def _way(variables: list[tuple[nnx.Variable, Any]], gather: Gather | None) -> Literal["fused", "whole", "each_token"]:
    """Returns what becomes of the weights: they are gathered, and fused as they are multiplied; or stored whole, where
    some are codes, or nothing travels and there is no memory for a copy; or left as they are, where a copy does not
    fit."""
    codes = any(isinstance(v.get_raw_value(), QuantizedArray) for v, _ in variables)
    bytes_of = [_whole_bytes(v, dtype) for v, dtype in variables]
    travels = [_layout(v).ranks > 1 or _layout(v).copies > 1 for v, _ in variables]
    if gather is not None:
        return "each_token" if gather == "each_token" else "whole" if codes else "fused"
    needed, free = sum(bytes_of), _free_bytes()
    if free is None or needed * (1 + _BESIDE) <= free:
        return "whole" if codes else "fused"
    if not any(travels):
        return "whole"
    from ..hlo import quantity  # with the reports, which `import gtp_jax` does not load

    sent = sum(one for one, moves in zip(bytes_of, travels, strict=True) if moves)
    warnings.warn(
        f"every device gathers {quantity(sent, 'B')} of weights for every token, because a whole copy, "
        f"{quantity(needed, 'B')}, does not fit into the {quantity(free, 'B')} that are free beside the model. Save a "
        "checkpoint, and generate from it with `gtp-jax generate`, which restores the weights whole.",
        stacklevel=5,
    )
    return "each_token"


def _make_whole(variables: list[tuple[nnx.Variable, Any]]) -> None:
    """Casts weights to the dtype of compute, and gathers them, in one program."""
    values = [v.get_raw_value() for v, _ in variables]
    targets: list[_Target] = []
    for variable, dtype in variables:
        before = _specs(variable)
        _lay_out_whole(variable)
        codes = isinstance(variable.get_raw_value(), QuantizedArray)
        targets += [
            _Target(None if codes else np.dtype(dtype), *pair) for pair in zip(before, _specs(variable), strict=True)
        ]
    ready = _whole(jax.tree.leaves(values), targets=tuple(targets))
    for (variable, _), value in zip(variables, jax.tree.unflatten(jax.tree.structure(values), ready), strict=True):
        variable.set_raw_value(value)


class _Target(NamedTuple):
    """What becomes of an array: its dtype, `None` for the same; and its partition before and after."""

    dtype: np.dtype | None
    before: PartitionSpec
    after: PartitionSpec


def _specs(variable: nnx.Variable) -> list[PartitionSpec]:
    return jax.tree.leaves(partition_of(variable), is_leaf=lambda node: isinstance(node, PartitionSpec))


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
    for spec in (target.before, target.after):  # what travels has been cast: XLA moves no cast across its bits
        bits = lax.with_sharding_constraint(bits, spec)
    return lax.bitcast_convert_type(bits, x.dtype)


def _layout(variable: nnx.Variable) -> Layout:
    return variable.get_metadata()["layout"]


def _whole_bytes(variable: nnx.Variable, dtype: Any) -> int:
    """Returns the bytes of a weight on a device that has gathered it."""
    value, layout = variable.get_raw_value(), _layout(variable).gathered
    parts = 1 if layout.takes_part else layout.tensor_degree
    if isinstance(value, QuantizedArray):
        return sum(x.nbytes for x in jax.tree.leaves(value)) // (parts * layout.experts_degree)
    return math.prod(value.shape) * np.dtype(dtype).itemsize // (parts * layout.experts_degree)


def _free_bytes() -> int | None:
    """Returns the bytes that are free on the first device of the process that has the least; `None` where devices do
    not say."""
    stats = jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    free = (stats["bytes_limit"] - stats["bytes_in_use"]) // _MIB
    return int(of_all_processes(np.int32(free)).min()) * _MIB  # all have to take the same way
