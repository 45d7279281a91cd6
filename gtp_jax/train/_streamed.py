"""Updates a state whose arrays are in the memory of the host, one part at a time.

[Note: streamed updates] A part of every array of a parameter moves to the device, is updated, and moves back. While it
is updated, the next parts arrive and those before it leave. The parts come in the order in which backward computes
their gradients. An update that depends on all gradients, by their norm, runs after backward. One that depends on its
own gradient only may run under the rest of backward; see `_under_backward`.
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

from ..mesh import Path, is_on_host, of_parameter, with_paths
from ..ops import Part
from ._block_update import Trace, evaluated, needed, owners_of_blocks, traced
from ._host_memory import device_shapes
from ._known_at import Piece, Place
from ._moved import Gradients, Known, Move, moved

Tree = Any
Function = Callable[[Tree, Tree, Tree, Tree], tuple[Tree, Tree]]

_BYTES_PER_PART = 128 << 20  # of one array


@dataclasses.dataclass(frozen=True)
class _Group:
    """The arrays of one parameter that are updated in parts.

    Attributes:
        path: the path of the parameter.
        inputs: the numbers of the arguments that are given in parts, among all arguments of the update: the gradient,
            and the arrays that the update replaces.
        outputs: the numbers of the results that replace the last of `inputs`, in the same order.
        spec: the partition of the arrays.
        shape: the shape of a device's part of the arrays.
    """

    path: Path
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    spec: PartitionSpec
    shape: tuple[int, ...]

    def parts(self, pieces: Sequence[Piece], itemsize: int) -> list[tuple[Place, Part]]:
        """Returns the parts in which the arrays move, each with the place at which its gradient is known.

        Args:
            pieces: the pieces of the gradient, and when each is known; empty if all is known at once.
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
        pieces = pieces or (Piece(1, ()),)
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


class Update:
    """An update of a state that is partly on the host, which has been traced but not computed.

    Attributes:
        paths: the paths of the parameters that are updated in parts, in the order of the arrays of `run`.
        waits: whether the scalars that the parts read depend on gradients.
        of_scalars: whether those scalars are computed from scalars only, and from no gradient.
    """

    def __init__(
        self,
        function: Function,
        gradients: Tree,
        opt_state: Tree,
        params: Tree,
        scalars: Tree,
        specs: Tree,
        *,
        skips: bool,
    ) -> None:
        """Traces an update.

        Args:
            function: `(gradients, opt_state, params, scalars)` returns the new `(opt_state, params)`, of the same
                forms.
            gradients: the gradients, of the parameters' shapes, or their forms.
            opt_state: the optimizer's state.
            params: the parameters.
            scalars: a pytree of the other values that the update reads, or their forms.
            specs: the partitions of the parameters.
            skips: whether the update may be skipped.

        Raises:
            ValueError: if the update of an array on the host is not elementwise; the message names the array. Or if the
                update changes the structure of the optimizer's state.
        """
        given = (gradients, opt_state, params, scalars)
        leaves, self._structure = jax.tree.flatten(given)
        self._result = jax.tree.structure(given[1:3])
        names = [path for path, _ in with_paths(given)]
        self._function, self._forms = function, jax.tree.leaves(device_shapes(given))
        self._first = len(jax.tree.leaves(gradients))
        self._groups = _groups(given, specs)
        self.paths = [group.path for group in self._groups]
        whole = self._whole = self._traced()
        owners = {number: group.path for group in self._groups for number in group.inputs}
        shapes = [self._parts(group)[0][1].shape for group in self._groups]
        try:
            blocks = self._blocks = owners_of_blocks(whole, self._traced(shapes), owners)
        except (TypeError, ValueError) as error:
            raise _refused("the optimizer's update", "its operations depend on the shapes of the arrays") from error
        for group in self._groups:
            for number, before in zip(group.outputs, group.inputs[1:], strict=True):
                if blocks.get(whole.outputs[number]) not in (owners[before], ()):
                    why = "it is not elementwise, or depends on the shape of its array"
                    raise _refused(f"the update of {'.'.join(names[before][1:])!r}", why)
        in_blocks = {number for group in self._groups for number in group.outputs}
        self._rest = [number for number in range(len(whole.outputs)) if number not in in_blocks]
        # What blocks read of whole arrays: scalars, such as counts and norms.
        read_by = [needed(whole, _of(whole, group.outputs), blocks.__contains__)[1] for group in self._groups]
        # A copy of what the update does not read would arrive in a buffer that XLA gives to others.
        self._reading = [
            {n for n, number in enumerate(group.inputs[1:]) if skips or number in numbers}
            for group, numbers in zip(self._groups, read_by, strict=True)
        ]
        self._unrelated = [
            set() if skips else {n for n in reading if group.inputs[n + 1] not in self._read_by(group.outputs[n])}
            for group, reading in zip(self._groups, self._reading, strict=True)
        ]
        self._common = sorted({number for numbers in read_by for number in numbers} - blocks.keys())
        _, arguments = needed(whole, [*self._common, *_of(whole, self._rest)], effects=True)
        for number in arguments:
            if is_on_host(leaves[number]):
                name = ".".join(names[number][1:])
                raise _refused("the optimizer's update", f"it reads {name!r} as a whole, not in parts")
        self._ops_of_common, self._of_common = needed(whole, self._common)
        self.waits = any(number < self._first for number in self._of_common)
        self.of_scalars = not self.waits and all(self._forms[number].shape == () for number in self._of_common)

    def _traced(self, shapes: Sequence[tuple[int, ...]] | None = None) -> Trace:
        """Traces the update, for parts of these shapes if there are any."""
        changed = list(self._forms)
        for group, shape in zip(self._groups, shapes or (), strict=shapes is not None):
            for number in group.inputs:
                changed[number] = jax.ShapeDtypeStruct(shape, self._forms[number].dtype)

        def kept(*args: Tree) -> tuple[Tree, Tree]:
            result = self._function(*args)
            if jax.tree.structure(result) != jax.tree.structure(args[1:3]):
                raise _refused("the optimizer's update", "it changes the structure of its state")
            return result

        return traced(kept, *jax.tree.unflatten(self._structure, changed))

    def _read_by(self, output: int) -> list[int]:
        """Returns the numbers of the values that an output in blocks is computed from."""
        return needed(self._whole, _of(self._whole, [output]), self._blocks.__contains__)[1]

    def _parts(self, group: _Group, pieces: Sequence[Piece] = ()) -> list[tuple[Place, Part]]:
        return group.parts(pieces, max(self._forms[number].dtype.itemsize for number in group.inputs))

    def arrays(self, gradients: Tree, opt_state: Tree, params: Tree) -> tuple[list[list[Any]], list[list[Any]]]:
        """Returns the gradients and the arrays of the parameters that are updated in parts, for each parameter."""
        leaves = jax.tree.leaves((gradients, opt_state, params))
        own = [[leaves[number] for number in group.inputs] for group in self._groups]
        return [of_group[:1] for of_group in own], [of_group[1:] for of_group in own]

    def specs(self) -> list[list[PartitionSpec]]:
        """Returns the partitions of these arrays, without the gradients."""
        return [[group.spec for _ in group.outputs] for group in self._groups]

    def read(self, gradients: Tree, opt_state: Tree, params: Tree) -> dict[int, jax.Array]:
        """Returns the arrays from which the scalars that the parts read are computed, by number of the argument. The
        other scalars of the update may belong to them too."""
        leaves = jax.tree.leaves((gradients, opt_state, params))
        return {number: leaves[number] for number in self._of_common if number < len(leaves)}

    def common(self, read: Mapping[int, jax.Array], scalars: Tree, *, on_rank: bool = False) -> list[jax.Array]:
        """Returns the scalars that the parts read.

        Args:
            read: what `read` returned.
            scalars: the other scalars of the update.
            on_rank: whether this is called on each rank, not where the update was made.
        """
        # A trace belongs to the `shard_map` around it.
        ops, _ = needed(self._traced(), self._common) if on_rank else (self._ops_of_common, None)
        own = jax.tree.leaves(scalars)
        leaves = {**read, **dict(enumerate(own, start=len(self._forms) - len(own)))}
        return evaluated(ops, self._apart(leaves, self._of_common), self._common)

    def _apart(self, leaves: Any, numbers: Iterable[int]) -> dict[int, Any]:
        """Returns arguments of the update by number; gradients pass through barriers.

        A step without offload that may be skipped has its update in a branch, so XLA does not fuse gradients with it.
        The barriers here and in `moved` do the same, and the results are the same bit for bit.
        """
        return {n: lax.optimization_barrier(leaves[n]) if n < self._first else leaves[n] for n in numbers}

    def finished(
        self,
        gradients: Tree,
        opt_state: Tree,
        params: Tree,
        scalars: Tree,
        new: Sequence[Sequence[jax.Array]],
        skipped: jax.Array | None,
    ) -> tuple[Tree, Tree]:
        """Returns the optimizer's state and the parameters after the update, given what `run` returned."""
        given = (gradients, opt_state, params, scalars)
        leaves, outputs = jax.tree.leaves(given), _of(self._whole, self._rest)

        def of_rest() -> list[jax.Array]:
            ops, arguments = needed(self._whole, outputs, effects=True)
            return evaluated(ops, self._apart(leaves, arguments), outputs)

        if skipped is None:
            found = of_rest()
        else:
            found = lax.cond(skipped, lambda: [leaves[number + self._first] for number in self._rest], of_rest)
        results = dict(zip(self._rest, found, strict=True))
        for group, own in zip(self._groups, new, strict=True):
            results |= zip(group.outputs, own, strict=True)
        return jax.tree.unflatten(self._result, [results[n] for n in range(len(results))])

    def run(
        self,
        gradients: Gradients,
        pieces: Mapping[Path, Sequence[Piece]],
        arrays: Sequence[Sequence[jax.Array]],
        common: Sequence[jax.Array],
        skipped: jax.Array | None,
        *,
        in_place: bool,
    ) -> list[list[jax.Array]]:
        """Returns the arrays that are updated in parts, of each parameter. Runs on each rank.

        Args:
            gradients: the gradients of parts.
            pieces: the pieces of the gradients, by path of the parameter, and when each is known.
            arrays: the rank's parts of the arrays.
            common: the scalars that the parts read.
            skipped: a bool scalar. If it is true, all arrays keep their values. `None` has the effect of false.
            in_place: as for `moved`.
        """
        each = [self._parts(group, pieces.get(group.path, ())) for group in self._groups]
        moves = sorted(Move(at, number, part) for number, own in enumerate(each) for at, part in own)
        shapes = [list(dict.fromkeys(part.shape for _, part in own)) for own in each]
        traces = [self._traced([own[min(n, len(own) - 1)] for own in shapes]) for n in range(max(map(len, shapes)))]

        def new(number: int, part: Part, given: Sequence[Any]) -> list[jax.Array]:
            group, of_shape = self._groups[number], traces[shapes[number].index(part.shape)]
            gradient = given[0].astype(self._forms[group.inputs[0]].dtype)
            known = dict(zip(self._common, common, strict=True))
            known |= zip(group.inputs, (gradient, *given[1:]), strict=True)
            outputs = _of(of_shape, group.outputs)
            after = evaluated(needed(of_shape, outputs, self._blocks.__contains__)[0], known, outputs)
            if skipped is None:
                return after
            return [lax.select(skipped, *pair) for pair in zip(given[1:], after, strict=True)]

        return moved(new, moves, gradients, arrays, self._reading, self._unrelated, in_place=in_place)


def streamed(
    function: Function,
    gradients: Tree,
    opt_state: Tree,
    params: Tree,
    scalars: Tree,
    specs: Tree,
    pieces: Mapping[Path, Sequence[Piece]],
    skipped: jax.Array | None,
    *,
    waits: bool,
) -> tuple[Tree, Tree]:
    """Returns `function(gradients, opt_state, params, scalars)`, and updates the arrays on the host in parts.

    Args:
        function: as for `Update`, and so are the arguments up to `specs`.
        gradients: the gradients.
        opt_state: the optimizer's state.
        params: the parameters.
        scalars: the other values.
        specs: the partitions of the parameters.
        pieces: the pieces of the gradients, by path of the parameter, and when each is known.
        skipped: a bool scalar. If it is true, all arrays keep their values. `None` has the effect of false.
        waits: whether `scalars` or `skipped` depend on all gradients.

    Raises:
        ValueError: as for `Update`.
    """
    given = (gradients, opt_state, params, scalars)
    update = Update(function, *given, specs, skips=skipped is not None)
    own = update.arrays(*given[:3])

    def run(
        gradients: list[list[jax.Array]], arrays: list[list[jax.Array]], common: list[jax.Array], skipped: Any
    ) -> list[list[jax.Array]]:
        known = Known([gradient for (gradient,) in gradients])
        return update.run(known, pieces, arrays, common, skipped, in_place=waits or update.waits)

    if not jax.sharding.get_abstract_mesh().empty:
        specs = update.specs()
        into = ([of_group[:1] for of_group in specs], specs, PartitionSpec(), PartitionSpec())
        run = jax.shard_map(run, in_specs=into, out_specs=specs, check_vma=False)
    return update.finished(*given, run(*own, update.common(update.read(*given[:3]), scalars), skipped), skipped)


def _groups(given: tuple[Tree, Tree, Tree, Tree], specs: Tree) -> list[_Group]:
    """Returns the parameters that have arrays on the host. All arrays of such a parameter that have its shape are
    updated in parts.

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
            groups.append(_Group(path, (gradient, *replaced), outputs, spec, part))
    return groups


def _of(trace: Trace, outputs: Sequence[int]) -> list[Any]:
    return [trace.outputs[number] for number in outputs]


def _refused(what: str, why: str) -> ValueError:
    return ValueError(
        f"the state is partly on the host (`offload`), but {what} cannot be computed in blocks: {why}. Use an "
        "elementwise optimizer, such as `optax.adamw` or `optax.lion`, without `per_layer`; put clipping by the "
        "global norm in `max_grad_norm`; or leave `offload` out."
    )
