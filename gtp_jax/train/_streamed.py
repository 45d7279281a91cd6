"""Updates a state whose arrays are in the memory of the host, one block at a time.

[Note: streamed updates] One loop moves a block of every array to the device, updates it, and moves it back: while the
blocks of one parameter are sent back, those of the next arrive. The arrays on the host change in place, and the device
holds one block of each. The loop begins when all gradients are known, because an update that may be skipped depends on
the norm of all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..mesh import UPDATE_IN_BLOCKS, Path, is_on_host, of_parameter, with_paths
from ._block_update import Trace, evaluated, needed, owners_of_blocks, traced
from ._host_memory import device_shapes

Tree = Any
Update = Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree]]

_BYTES_PER_BLOCK = 1 << 30  # of all arrays together
_MOST_BLOCKS = 64


@dataclasses.dataclass(frozen=True)
class _Streamed:
    """The arrays of one parameter that are updated in blocks: runs of rows of an array's matrices. The matrices of an
    array are joined along their rows.

    Attributes:
        inputs: the numbers of the arguments that are given in blocks, among all arguments of the update.
        outputs: the numbers of the results that replace the last of `inputs`, in the same order.
        spec: the partition of the arrays.
        rows: the rows that a device has.
        columns: the last dimension of a device's part.
        ndim: the number of dimensions.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    spec: PartitionSpec
    rows: int
    columns: int
    ndim: int

    def block(self, rows: int) -> tuple[int, ...]:
        """Returns the shape of a block of some rows, with the number of dimensions of the array."""
        return (*(1,) * (self.ndim - 2), rows, self.columns)


def streams(params: Tree, opt_state: Tree) -> bool:
    """Returns whether any of these arrays is in the memory of the host."""
    return any(map(is_on_host, jax.tree.leaves((params, opt_state))))


def streamed(update: Update, gradients: Tree, opt_state: Tree, params: Tree, scalars: Tree, specs: Tree) -> Tree:
    """Returns `update(gradients, opt_state, params, scalars)`, and updates the arrays on the host in blocks.

    Args:
        update: a function that returns the new `(opt_state, params)`, of the same forms.
        gradients: the gradients, of the parameters' shapes.
        opt_state: the optimizer's state.
        params: the parameters.
        scalars: a pytree of the other values that the update reads.
        specs: the partitions of the parameters.

    Raises:
        ValueError: if the update of an array on the host is not elementwise; the message names the array. Or if the
            update changes the structure of the optimizer's state.
    """
    given = (gradients, opt_state, params, scalars)
    leaves, structure = jax.tree.flatten(given)
    paths = [path for path, _ in with_paths(given)]
    groups = _groups(given, specs)
    forms = jax.tree.leaves(device_shapes(given))

    def kept(*args: Tree) -> tuple[Tree, Tree]:
        result = update(*args)
        if jax.tree.structure(result) != jax.tree.structure(args[1:3]):
            raise _refused("the optimizer's update", "it changes the structure of its state")
        return result

    def trace(shape_of: Callable[[_Streamed], tuple[int, ...] | None]) -> Trace:
        changed = list(forms)
        for group in groups:
            if (shape := shape_of(group)) is not None:
                for number in group.inputs:
                    changed[number] = jax.ShapeDtypeStruct(shape, forms[number].dtype)
        return traced(kept, *jax.tree.unflatten(structure, changed))

    count = _count(leaves, groups)
    sizes = [-(-group.rows // count) for group in groups]
    rows_of = dict(zip(groups, sizes, strict=True))
    shape_of_block = lambda one: one.block(rows_of[one])  # noqa: E731
    whole = trace(lambda _: None)
    owners = {number: paths[group.inputs[0]][1:] for group in groups for number in group.inputs}
    try:
        blocks = owners_of_blocks(whole, trace(shape_of_block), owners)
    except (TypeError, ValueError) as error:
        raise _refused("the optimizer's update", "its operations depend on the shapes of the arrays") from error
    for group in groups:
        for number, before in zip(group.outputs, group.inputs[1:], strict=True):
            made = whole.outputs[number]
            if blocks.get(made) not in (owners[before], ()):
                name = ".".join(paths[before][1:])
                raise _refused(f"the update of {name!r}", "it is not elementwise, or depends on the shape of its array")

    in_blocks = {number for group in groups for number in group.outputs}
    rest = [number for number in range(len(whole.outputs)) if number not in in_blocks]
    # What blocks read of whole arrays: scalars, such as counts and norms.
    read = {n for group in groups for n in needed(whole, _of(whole, group.outputs), blocks.__contains__)[1]}
    common = sorted(read - blocks.keys())
    ops, arguments = needed(whole, [*common, *_of(whole, rest)], effects=True)
    for number in arguments:
        if is_on_host(leaves[number]):
            name = ".".join(paths[number][1:])
            raise _refused("the optimizer's update", f"it reads {name!r} as a whole, not in blocks")
    known = {number: leaves[number] for number in arguments}
    found = evaluated(ops, known, [*common, *_of(whole, rest)])

    def run(arrays: list[list[jax.Array]], scalars: list[jax.Array]) -> list[list[jax.Array]]:
        # Traced again, because a trace belongs to the `shard_map` around it.
        in_block = trace(shape_of_block)
        flat = [[a.reshape(-1, a.shape[-1]) for a in own] for own in arrays]

        def body(i: jax.Array, moving: list[list[jax.Array]]) -> list[list[jax.Array]]:
            return [
                _updated(
                    in_block, group, blocks, dict(zip(common, scalars, strict=True)), i, count, size, [own[0], *more]
                )
                for group, size, own, more in zip(groups, sizes, flat, moving, strict=True)
            ]

        replaced = [own[1:] for own in arrays]
        with jax.named_scope(UPDATE_IN_BLOCKS):
            new = lax.fori_loop(0, count, body, [own[1:] for own in flat])
        return jax.tree.map(lambda array, like: array.reshape(like.shape), new, replaced)

    arrays = [[leaves[n] for n in group.inputs] for group in groups]
    if not jax.sharding.get_abstract_mesh().empty:
        partitions = [[group.spec for _ in group.inputs] for group in groups]
        replaced = [[group.spec for _ in group.outputs] for group in groups]
        run = jax.shard_map(run, in_specs=(partitions, PartitionSpec()), out_specs=replaced, check_vma=False)
    new = run(arrays, found[: len(common)])
    results = dict(zip(rest, found[len(common) :], strict=True))
    for group, own in zip(groups, new, strict=True):
        results |= zip(group.outputs, own, strict=True)
    return jax.tree.unflatten(jax.tree.structure(given[1:3]), [results[n] for n in range(len(results))])


def _updated(
    trace: Trace,
    group: _Streamed,
    blocks: Mapping[int, Path],
    known: dict[int, Any],
    number: jax.Array,
    count: int,
    rows: int,
    arrays: list[jax.Array],
) -> list[jax.Array]:
    """Updates one block of the arrays of one parameter.

    Args:
        trace: the trace of the update for blocks of this size.
        group: the arrays.
        blocks: the values of the trace that are blocks.
        known: the other values that blocks read, by number.
        number: the number of the block.
        count: the number of blocks.
        rows: the number of rows in a block.
        arrays: the gradient, which the update only reads, and the arrays that it replaces, each `(rows, columns)`.

    Returns:
        `arrays` after the update, without the gradient.
    """
    whole = group.rows % rows == 0 and group.rows // rows == count
    # XLA copies by DMA only if the start is a multiple of the loop's counter, and by slower kernels otherwise. The last
    # of other blocks begin early enough to be whole, and keep the rows that blocks before them have updated.
    start = number * rows if whole else jnp.minimum(number * rows, group.rows - rows)
    parts = [lax.dynamic_slice_in_dim(array, start, rows) for array in arrays]
    parts = [jax.device_put(part, jax.memory.Space.Device) if is_on_host(part) else part for part in parts]
    shape = group.block(rows)
    outputs = _of(trace, group.outputs)
    known |= zip(group.inputs, (part.reshape(shape) for part in parts), strict=True)
    results = evaluated(needed(trace, outputs, blocks.__contains__)[0], known, outputs)

    def replaced(array: jax.Array, part: jax.Array, new: jax.Array) -> jax.Array:
        new = new.reshape(rows, group.columns)
        if not whole:
            old = start + lax.broadcasted_iota(jnp.int32, (rows, 1), 0) < number * rows
            new = jnp.where(old, part, new)
        new = jax.device_put(new, jax.memory.Space.Host) if is_on_host(array) else new
        return lax.dynamic_update_slice_in_dim(array, new, start, 0)

    return list(map(replaced, arrays[1:], parts[1:], results))


def _groups(given: tuple[Tree, Tree, Tree, Tree], specs: Tree) -> list[_Streamed]:
    """Returns the parameters that have arrays on the host. All arrays of such a parameter that have its shape are
    updated in blocks.

    Args:
        given: the arguments of the update: gradients, optimizer's state, parameters and others.
        specs: the partitions of the parameters.
    """
    listed = with_paths(given)
    partitions = dict(with_paths(specs))
    shapes = {path: leaf.shape for path, leaf in with_paths(given[2])}
    names, own = {path: path for path in shapes}, {}
    for number, (path, leaf) in enumerate(listed):
        owner = of_parameter(path[1:], names) if path[0] != "3" else None
        if owner is not None and leaf.shape == shapes[owner]:
            own.setdefault(owner, []).append(number)
    first = len(jax.tree.leaves(given[0]))
    mesh = jax.sharding.get_abstract_mesh()
    groups = []
    for path, numbers in own.items():
        if any(is_on_host(listed[number][1]) for number in numbers):
            shape, spec = shapes[path], partitions[path]
            part = shape if mesh.empty else NamedSharding(mesh, spec).shard_shape(shape)
            gradient, *replaced = numbers
            outputs = tuple(number - first for number in replaced)
            sizes = math.prod(part[:-1]), part[-1], len(part)
            groups.append(_Streamed((gradient, *replaced), outputs, spec, *sizes))
    return groups


def _of(trace: Trace, outputs: Sequence[int]) -> list[Any]:
    return [trace.outputs[number] for number in outputs]


def _count(leaves: Sequence[Any], groups: Sequence[_Streamed]) -> int:
    """Returns the number of blocks in which the arrays on the host move."""
    size = sum(
        group.rows * group.columns * leaves[number].dtype.itemsize
        for group in groups
        for number in group.inputs
        if is_on_host(leaves[number])
    )
    least = min(max(2, -(-size // _BYTES_PER_BLOCK)), _MOST_BLOCKS)
    return 1 << (least - 1).bit_length()  # a power of two divides the rows of most arrays


def _refused(what: str, why: str) -> ValueError:
    return ValueError(
        f"the state is partly on the host (`offload`), but {what} cannot be computed in blocks: {why}. Use an "
        "elementwise optimizer, such as `optax.adamw` or `optax.lion`, without `per_layer`; put clipping by the "
        "global norm in `max_grad_norm`; or leave `offload` out."
    )
