"""Updates a state whose arrays are in the memory of the host, one part at a time.

[Note: streamed updates] A part of every array of a parameter moves to the device, is updated, and moves back. While it
is updated, the next parts arrive and those before it leave. The parts come in the order in which backward computes
their gradients. So an update that depends on its own gradient only may run under the rest of backward, if XLA schedules
it there. An update that depends on all gradients, by their norm, runs after backward.

[Note: copies that XLA does not know] XLA must not reuse, copy or hand on a buffer while a copy runs. What arrives is
given to `arrive`, which XLA keeps, and all that reads a buffer in between (the `after` of other calls) comes before its
`arrive` or `leave` by data. Otherwise XLA would insert a copy of the buffer; the handlers would then find no copy to
its address, and end the program with an error. An array on the host is read only after `leave` has returned it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ..mesh import UPDATE_IN_BLOCKS, Path, is_on_host, of_parameter, with_paths
from ..ops import HostCopies, Leaving, Part
from ._block_update import Trace, evaluated, needed, owners_of_blocks, traced
from ._host_memory import device_shapes
from ._known_at import Piece

Tree = Any
Update = Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree]]

_BYTES_PER_PART = 128 << 20  # of one array
_BYTES_IN_FLIGHT = 1 << 30  # that have begun to arrive before the part that is updated, and the same to leave


@dataclasses.dataclass(frozen=True)
class _Streamed:
    """The arrays of one parameter that are updated in parts.

    Attributes:
        inputs: the numbers of the arguments that are given in parts, among all arguments of the update: the gradient,
            and the arrays that the update replaces.
        outputs: the numbers of the results that replace the last of `inputs`, in the same order.
        spec: the partition of the arrays.
        shape: the shape of a device's part of the arrays.
        pieces: the pieces of the gradient, and when each is known.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    spec: PartitionSpec
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def parts(self, itemsize: int) -> list[tuple[tuple[int, ...], Part]]:
        """Returns the parts in which the arrays move, each with the place at which its gradient is known.

        Args:
            itemsize: the largest size of an element, in bytes.
        """
        *lead, rows, columns = self.shape
        rows_per_index = math.prod((*lead[1:], rows)) if lead else 1
        total = math.prod((*lead, rows))
        most = max(1, _BYTES_PER_PART // (columns * itemsize))
        if most > rows_per_index:
            most -= most % rows_per_index
        else:  # as few parts as possible per index, of nearly equal sizes
            most = -(-rows_per_index // -(-rows_per_index // most))
        pieces = self.pieces or (Piece(1, ()),)
        sizes = list(itertools.accumulate(piece.size for piece in pieces))
        ends = [(size * total // sizes[-1], piece.at) for size, piece in zip(sizes, pieces, strict=True)]
        found, first = [], 0
        while first < total:
            # a part ends with its piece of the gradient, which is known before the next, and with its index
            bounds = [end for end, _ in ends if end > first] + [total]
            if most < rows_per_index:
                bounds.append(first - first % rows_per_index + rows_per_index)
            size = min(most, min(bounds) - first)
            at = next((at for end, at in ends if end >= first + size), ())
            found.append((at, Part(first, size, (*(1 for _ in lead), size, columns))))
            first += size
        return found


def streams(params: Tree, opt_state: Tree) -> bool:
    """Returns whether any of these arrays is in the memory of the host."""
    return any(map(is_on_host, jax.tree.leaves((params, opt_state))))


def streamed(
    update: Update,
    gradients: Tree,
    opt_state: Tree,
    params: Tree,
    scalars: Tree,
    specs: Tree,
    pieces: Mapping[Path, tuple[Piece, ...]],
    skipped: jax.Array | None,
    *,
    waits: bool,
) -> Tree:
    """Returns `update(gradients, opt_state, params, scalars)`, and updates the arrays on the host in parts.

    Args:
        update: a function that returns the new `(opt_state, params)`, of the same forms.
        gradients: the gradients, of the parameters' shapes.
        opt_state: the optimizer's state.
        params: the parameters.
        scalars: a pytree of the other values that the update reads.
        specs: the partitions of the parameters.
        pieces: the pieces of the gradients, by path of the parameter, and when each is known.
        skipped: a bool scalar. If it is true, all arrays keep their values. `None` has the effect of false.
        waits: whether `scalars` or `skipped` depend on all gradients.

    Raises:
        ValueError: if the update of an array on the host is not elementwise; the message names the array. Or if the
            update changes the structure of the optimizer's state.
    """
    given = (gradients, opt_state, params, scalars)
    leaves, structure = jax.tree.flatten(given)
    paths = [path for path, _ in with_paths(given)]
    first = len(jax.tree.leaves(gradients))
    groups = _groups(given, specs, pieces)
    forms = jax.tree.leaves(device_shapes(given))

    def kept(*args: Tree) -> tuple[Tree, Tree]:
        result = update(*args)
        if jax.tree.structure(result) != jax.tree.structure(args[1:3]):
            raise _refused("the optimizer's update", "it changes the structure of its state")
        return result

    def trace(of_groups: Sequence[tuple[int, ...]] | None = None) -> Trace:
        changed = list(forms)
        for group, shape in zip(groups, of_groups or (), strict=of_groups is not None):
            for number in group.inputs:
                changed[number] = jax.ShapeDtypeStruct(shape, forms[number].dtype)
        return traced(kept, *jax.tree.unflatten(structure, changed))

    itemsize = lambda group: max(forms[number].dtype.itemsize for number in group.inputs)  # noqa: E731
    parts = sorted(
        (at, number, part) for number, group in enumerate(groups) for at, part in group.parts(itemsize(group))
    )
    shapes: list[list[tuple[int, ...]]] = [
        list(dict.fromkeys(part.shape for _, own, part in parts if own == number)) for number in range(len(groups))
    ]
    whole = trace()
    owners = {number: paths[group.inputs[0]][1:] for group in groups for number in group.inputs}
    try:
        blocks = owners_of_blocks(whole, trace([own[0] for own in shapes]), owners)
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
    read_by = [needed(whole, _of(whole, group.outputs), blocks.__contains__)[1] for group in groups]
    read = {number for numbers in read_by for number in numbers}
    # A copy of what the update does not read would arrive in a buffer that XLA gives to others.
    reading = [
        {n for n, number in enumerate(group.inputs[1:]) if skipped is not None or number in numbers}
        for group, numbers in zip(groups, read_by, strict=True)
    ]
    common = sorted(read - blocks.keys())
    _, arguments = needed(whole, [*common, *_of(whole, rest)], effects=True)
    for number in arguments:
        if is_on_host(leaves[number]):
            name = ".".join(paths[number][1:])
            raise _refused("the optimizer's update", f"it reads {name!r} as a whole, not in parts")
    # A step without offload that may be skipped has its update in a branch, so XLA does not fuse gradients with it. The
    # barriers here and below do the same, and the results are the same bit for bit.
    inputs = {
        n: lax.optimization_barrier(leaf) if n < first else leaf
        for n, leaf in enumerate(leaves)
        if not is_on_host(leaf)
    }
    ops_of_shared, of_shared = needed(whole, common)
    shared = evaluated(ops_of_shared, dict(inputs), common)
    waits = waits or any(number < first for number in of_shared)

    def of_rest() -> list[jax.Array]:
        outputs = _of(whole, rest)
        return evaluated(needed(whole, outputs, effects=True)[0], dict(inputs), outputs)

    if skipped is None:
        found = of_rest()
    else:
        found = lax.cond(skipped, lambda: [leaves[number + first] for number in rest], of_rest)

    def run(
        arrays: list[list[jax.Array]], scalars: list[jax.Array], skipped: jax.Array | None
    ) -> list[list[jax.Array]]:
        # Traced again, because a trace belongs to the `shard_map` around it.
        most = max(map(len, shapes))
        traces = [trace([own[min(n, len(own) - 1)] for own in shapes]) for n in range(most)]

        def new(number: int, part: Part, given: Sequence[Any]) -> list[jax.Array]:
            group, of_shape = groups[number], traces[shapes[number].index(part.shape)]
            known = dict(zip(common, scalars, strict=True)) | dict(zip(group.inputs, given, strict=True))
            outputs = _of(of_shape, group.outputs)
            after = evaluated(needed(of_shape, outputs, blocks.__contains__)[0], known, outputs)
            if skipped is None:
                return after
            return [lax.select(skipped, *pair) for pair in zip(given[1:], after, strict=True)]

        with jax.named_scope(UPDATE_IN_BLOCKS):
            return _moved(new, [(number, part) for _, number, part in parts], arrays, reading, waits)

    arrays = [[leaves[n] for n in group.inputs] for group in groups]
    if not jax.sharding.get_abstract_mesh().empty:
        partitions = [[group.spec for _ in group.inputs] for group in groups]
        replaced = [[group.spec for _ in group.outputs] for group in groups]
        run = jax.shard_map(
            run, in_specs=(partitions, PartitionSpec(), PartitionSpec()), out_specs=replaced, check_vma=False
        )
    new = run(arrays, shared, skipped)
    results = dict(zip(rest, found, strict=True))
    for group, own in zip(groups, new, strict=True):
        results |= zip(group.outputs, own, strict=True)
    return jax.tree.unflatten(jax.tree.structure(given[1:3]), [results[n] for n in range(len(results))])


def _moved(
    new: Callable[[int, Part, list[Any]], list[jax.Array]],
    parts: Sequence[tuple[int, Part]],
    arrays: Sequence[Sequence[jax.Array]],
    reading: Sequence[set[int]],
    in_place: bool,
) -> list[list[jax.Array]]:
    """Returns the arrays of all parameters after their update, without the gradients.

    Args:
        new: `(number, part, arrays)` returns a part of the arrays of a parameter after their update. Its arrays are
            that part of the gradient and of those before, or `None` for one that the update does not read.
        parts: the number of a parameter and a part of its arrays, in the order in which they move.
        arrays: for each parameter, the gradient, which the update only reads, and the arrays that it replaces.
        reading: for each parameter, the numbers of the arrays that the update reads, among those that it replaces.
        in_place: whether the parts on the device are replaced one by one, because nothing else reads the arrays.
    """
    copies = HostCopies()
    current = [list(own[1:]) for own in arrays]
    on_host = [[n for n, array in enumerate(own) if is_on_host(array)] for own in current]
    ends = [0, *itertools.accumulate(_bytes(part, current[number]) for number, part in parts)]
    gradients = [part.of(arrays[number][0]) for number, part in parts]
    known = [lax.slice_in_dim(gradient.reshape(-1), 0, 1) for gradient in gradients]
    reads: list[dict[int, jax.Array]] = []  # for each part that has begun to arrive, what arrives, by number
    leaving: dict[int, dict[int, Leaving]] = {}  # for each part that has begun to leave, by number of the array
    left: list[jax.Array] = []  # what comes after the last parts that have left
    updated: list[jax.Array] = []  # an array of the last part
    written: list[jax.Array] = []  # what the last part has become, so that it comes before the next arrives

    def leave(places: Iterable[int]) -> list[jax.Array]:
        gone = []
        for place in places:
            number = parts[place][0]
            for n, one in leaving.pop(place).items():
                current[number][n] = copies.leave(current[number][n], one, updated)
                gone.append(current[number][n])
        return gone

    for place, (number, part) in enumerate(parts):
        left = leave([p for p in leaving if ends[place] - ends[p + 1] >= _BYTES_IN_FLIGHT]) or left
        begun = len(reads)
        while len(reads) < len(parts) and (
            len(reads) <= place or ends[len(reads)] - ends[place + 1] < _BYTES_IN_FLIGHT
        ):
            next_number, next_part = parts[len(reads)]
            of_next = {n: current[next_number][n] for n in on_host[next_number] if n in reading[next_number]}
            reads.append({n: copies.read(array, next_part, left) for n, array in of_next.items()})
        # A gradient is often known before the last use of its weight. If XLA updated the weight then, it would copy it.
        coming = [read for more in reads[max(begun, place + 1) :] for read in more.values()]
        after = [*known[place : place + 2], *coming, *written]
        own = [None if n in on_host[number] else part.of(array) for n, array in enumerate(current[number])]
        for n, read in reads[place].items():
            own[n] = copies.arrive(read, after)
        results = new(number, part, [lax.optimization_barrier(gradients[place]), *own])
        updated, written = results[:1], []
        # The part before of the same arrays leaves first.
        leave([p for p in leaving if parts[p][0] == number])
        leaving[place] = {}
        for n, result in enumerate(results):
            if n in on_host[number]:
                current[number][n], leaving[place][n] = copies.write(current[number][n], part, result)
                written.append(current[number][n])
            else:
                written.append(result)
                current[number][n] = part.put(current[number][n], result)
                if in_place:  # otherwise XLA reads the next part from the old array, which it then keeps
                    current[number][n] = lax.optimization_barrier(current[number][n])
    leave(list(leaving))
    return current


def _bytes(part: Part, arrays: Iterable[jax.Array]) -> int:
    """Returns the bytes of a part of the arrays that are on the host."""
    return sum(math.prod(part.shape) * array.dtype.itemsize for array in arrays if is_on_host(array))


def _groups(
    given: tuple[Tree, Tree, Tree, Tree], specs: Tree, pieces: Mapping[Path, tuple[Piece, ...]]
) -> list[_Streamed]:
    """Returns the parameters that have arrays on the host. All arrays of such a parameter that have its shape are
    updated in parts.

    Args:
        given: the arguments of the update: gradients, optimizer's state, parameters and others.
        specs: the partitions of the parameters.
        pieces: the pieces of the gradients, by path of the parameter.
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
            groups.append(_Streamed((gradient, *replaced), outputs, spec, part, pieces.get(path, ())))
    return groups


def _of(trace: Trace, outputs: Sequence[int]) -> list[Any]:
    return [trace.outputs[number] for number in outputs]


def _refused(what: str, why: str) -> ValueError:
    return ValueError(
        f"the state is partly on the host (`offload`), but {what} cannot be computed in blocks: {why}. Use an "
        "elementwise optimizer, such as `optax.adamw` or `optax.lion`, without `per_layer`; put clipping by the "
        "global norm in `max_grad_norm`; or leave `offload` out."
    )
