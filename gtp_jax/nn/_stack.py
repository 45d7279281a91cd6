"""Modules joined into a chain: `Stack`, layers alike, and `run_chain`, modules of any kind in a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import PartitionSpec

from ..chain import Remat, Schedule, with_remat
from ..mesh import check_mesh_in_scope, current_view, degree
from ._cache import Cache
from ._frozen import Frozen
from ._layer import Layer, sides_of, states_partitions
from ._shared import SharedInputs
from ._stages import Link, run_links
from ._unstacked import Unstacked
from ._weight import StackedLayers


class Stack(StackedLayers):
    """`length` layers alike, run as a chain: each layer's weights are gathered under the layer ahead of it.

    `stack(x, *shared, **shared)` equals

        for layer in layers:
            x = layer(x, *shared, **shared)

    Arrays among the shared inputs (positions, masks, an encoder's output) are supplied to each layer, again in
    backward, and never saved with a layer. Variables that a layer writes, such as `nnx.BatchStat`, the counts of
    dropout's `nnx.RngStream`, `gtp_jax.AuxLoss` or what is captured by `nnx.capture`, are updated as in that loop,
    once a call whatever is recomputed in backward. Gradients flow through the floats among them, but not through
    `nnx.BatchStat` and `gtp_jax.Metric`, which leave the stack as constants.

    All variables are stored stacked: one array each, with a leading dimension of `length`.

    Under a mesh in global view layers compute on global arrays: batch statistics are those of the whole batch, and
    dropout's masks those of the model without a mesh. Layers that derive from `gtp_jax.nn.Layer`, whose `local` is
    written for a rank's own part, and have no variables but parameters, are called within one `shard_map`.

    Args:
        factory: makes one layer, called as `factory(rngs=...)`. The layer maps activations to activations of the same
            shape, dtype and partition.
        length: number of layers.
        schedule: when things happen; see `Schedule`.
        remat: what is kept for backward; see `with_remat`.
        sequence_parallel: whether the activation that is handed on is sharded along the sequence over tp, for a
            `gtp_jax.nn.Layer` that does not say so itself.
        rngs: split, so that every layer draws from streams of its own, in the factory and, if it keeps them, in calls.

    Attributes:
        layers: one module, whose variables are all layers', stacked.
        length: how many layers.

    Raises:
        ValueError: if `length` is less than 1, `remat` is not a known policy, a layer holds a `Stack` of its own, or
            variables that `factory` did not make; by a call, if a layer writes a parameter.
        TypeError: by a call, if an NNX object is among the shared inputs.
    """

    def __init__(
        self,
        factory: Callable[..., nnx.Module],
        length: int,
        *,
        schedule: Schedule | None = None,
        remat: Remat = "matmuls",
        sequence_parallel: bool = True,
        rngs: nnx.Rngs,
    ) -> None:
        if length < 1:
            raise ValueError(f"`length` is {length}; a stack has at least one layer.")
        with_remat(lambda x: x, remat)
        _check_schedule(schedule)
        super().__init__()
        self.length = length
        self.schedule = Schedule() if schedule is None else schedule
        self.remat: Remat = remat
        self.sequence_parallel = sequence_parallel

        @nnx.split_rngs(splits=length)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def make(rngs: nnx.Rngs) -> nnx.Module:
            layer = factory(rngs=rngs)
            _refuse_outer_variables(layer)
            return nnx.clone(layer)  # the layer may hold `rngs`, which `vmap` cannot both take and return

        self.layers = make(rngs)
        _refuse_inner_stacks(self.layers)

    def __call__(self, x: Any, *shared: Any, **named: Any) -> Any:
        return _call((self._link(self.remat),), (self,), x, self.schedule, SharedInputs(shared, named))

    def local(self, x: Any, *shared: Any, **named: Any) -> Any:
        inputs = SharedInputs(shared, named)
        return run_links((self._link(self.remat),), x, self.schedule, inputs)

    @property
    def fewest_dims(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The fewest dimensions of an input of its layers."""
        return getattr(self.layers, "fewest_dims", 1)

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        """Partitions of input and output in global view: those of a layer that states its own."""
        layer = self.layers
        return layer.partitions(ndim) if states_partitions(layer) else super().partitions(ndim)

    def linked(self, ndim: int) -> bool:
        """Returns whether a layer returns the same part of an activation of `ndim` dimensions as it takes."""
        into, out = self.partitions(ndim)
        return _same(into, out) and not (isinstance(self.layers, Layer) and any(self.layers.converts))

    def _link(self, remat: Remat) -> Link:
        return Link(self.layers, remat, self.length)


def run_chain(
    x: Any,
    *modules: Layer,
    schedule: Schedule | None = None,
    remat: Remat | None = None,
    shared: Sequence[Any] | Mapping[str, Any] = (),
) -> Any:
    """Calls modules one after the other as one chain, so that the gathers between them are hidden too.

    `run_chain(tokens, embed, blocks, head)` equals `head(blocks(embed(tokens)))`; but the first block's weights are
    gathered under the embedding, the head's under the last block, and likewise in backward.

    Args:
        x: the first module's input.
        modules: `Stack`s and other modules.
        schedule: that of the `Stack`s by default.
        remat: for all modules; by default each `Stack` has its own, and the others that of the first.
        shared: further arguments of the layers of each `Stack`, by position or by name; see `Stack`. Other modules
            get none.

    Raises:
        ValueError: without modules; if `Stack`s differ in their schedules and none is given; if a module holds a
            `Stack`; if there are shared inputs and no `Stack`.
        TypeError: if one is not a `gtp_jax.nn.Layer`, or `shared` is neither a sequence nor a mapping.
    """
    if not modules:
        raise ValueError("`run_chain` joins one module or more; it got none.")
    for number, module in enumerate(modules):
        if not isinstance(module, Layer):
            raise TypeError(
                f"`run_chain` joins modules of gtp_jax; number {number} is a {type(module).__name__}. Derive it from "
                "`gtp_jax.nn.Layer`, with the call as its method `local`."
            )
        if not isinstance(module, Stack):
            _refuse_inner_stacks(module)
    _check_schedule(schedule)
    if any(isinstance(module, Unstacked) for module in modules):
        inputs = dict(shared) if isinstance(shared, Mapping) else tuple(shared)
        return _one_by_one(x, modules, inputs)
    stacks = [m for m in modules if isinstance(m, Stack)]
    schedules = {m.schedule for m in stacks}
    if schedule is None and len(schedules) > 1:
        raise ValueError(
            f"the stacks of a chain have different schedules: {', '.join(map(str, schedules))}. Pass `schedule` to "
            "`run_chain`."
        )
    inputs = _shared_inputs(shared)
    if not inputs.empty and not stacks:
        raise ValueError("`shared` is for the layers of a `Stack`, and `run_chain` got none. Leave it out.")
    others: Remat = stacks[0].remat if stacks else "matmuls"
    links = tuple(m._link(remat or m.remat) if isinstance(m, Stack) else Link(m, remat or others) for m in modules)
    return _call(links, modules, x, schedule or (stacks[0].schedule if stacks else Schedule()), inputs)


def _one_by_one(x: Any, modules: tuple[Layer, ...], shared: Any) -> Any:
    """Calls modules one after another, of which nothing is gathered."""
    for module in modules:
        if not isinstance(module, Unstacked):
            x = module(x)
        else:
            x = module(x, **shared) if isinstance(shared, dict) else module(x, *shared)
    return x


def _call(links: tuple[Link, ...], modules: tuple[Layer, ...], x: Any, schedule: Schedule, shared: SharedInputs) -> Any:
    """Calls a chain as the view in scope requires: in global view within one `shard_map` if all of its modules are
    written for local view, and each hands on what the next one takes."""
    check_mesh_in_scope()
    if current_view() == "global" and shared.empty and all(_is_local(link.module) for link in links):
        ndim = jnp.ndim(x) + jnp.issubdtype(jnp.result_type(x), jnp.integer)  # ids become vectors
        chain = Chain(modules, schedule, tuple(link.remat for link in links), ndim)
        if chain.linked(jnp.ndim(x)):
            try:
                return chain(x)
            except OtherDimensions as other:
                chain.ndim = other.ndim
            if chain.linked(jnp.ndim(x)):
                return chain(x)
    return run_links(links, x, schedule, shared)


class OtherDimensions(Exception):
    """An output has another number of dimensions than a chain was traced for.

    Attributes:
        ndim: the number that it has.
    """

    def __init__(self, ndim: int) -> None:
        super().__init__(f"an output of {ndim} dimensions")
        self.ndim = ndim


class Chain(Layer):
    """Modules in a row, called like one module, within one `shard_map`.

    Args:
        modules: at least one.
        schedule: when things happen.
        remat: what each module keeps for backward.
        ndim: dimensions of the output, and of what modules hand on to each other. The trace checks it.

    Raises:
        OtherDimensions: if the output of a call has another number of dimensions.
    """

    def __init__(self, modules: tuple[Layer, ...], schedule: Schedule, remat: tuple[Remat, ...], ndim: int) -> None:
        super().__init__()
        self.modules = nnx.List(modules)
        self._roles = modules[0].roles
        self.schedule = schedule
        self.remat = remat
        self.ndim = ndim
        self.sequence_parallel = False
        self.fewest_dims = modules[0].fewest_dims

    @property
    def title(self) -> str:
        return " + ".join(module.title for module in self.modules)

    def local(self, x: Any) -> Any:
        links = [
            m._link(remat) if isinstance(m, Stack) else Link(m, remat)
            for m, remat in zip(self.modules, self.remat, strict=True)
        ]
        y = run_links(links, x, self.schedule, SharedInputs((), {}))
        ndim = max((array.ndim for array in jax.tree.leaves(y)), default=self.ndim)
        if ndim != self.ndim:
            raise OtherDimensions(ndim)
        return y

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        sides = self._sides(ndim)
        return sides[0][0], sides[-1][1]

    def linked(self, ndim: int) -> bool:
        """Returns whether each layer hands on exactly the part of an activation that the next one takes, so that no
        global array lies between them; `ndim` is the input's.

        Where they do not, as between two column-parallel layers, every layer finds its own way in global view.
        """
        if any(isinstance(m, Stack) and not m.linked(self.ndim) for m in self.modules):
            return False
        sides = self._sides(ndim)
        converts = [m.converts for m in self.modules]
        return all(
            _same(one[1], other[0]) and not gives[1] and not takes[0]
            for one, other, gives, takes in zip(sides, sides[1:], converts, converts[1:], strict=False)
        )

    def _sides(self, ndim: int) -> list[tuple[PartitionSpec, PartitionSpec]]:
        """Returns the partitions of every module's input and output."""
        sides = [sides_of(self.modules[0], ndim, self.ndim)]
        for place, module in enumerate(self.modules[1:], 2):
            if states_partitions(module) or place == len(self.modules):
                sides.append(sides_of(module, self.ndim, self.ndim))
            else:  # works on what it is given
                sides.append((sides[-1][1], sides[-1][1]))
        return sides

    def from_global(self, x: Any) -> Any:
        return self.modules[0].from_global(x)

    def to_global(self, y: Any) -> Any:
        return self.modules[-1].to_global(y)


def _same(one: PartitionSpec, other: PartitionSpec) -> bool:
    """Returns whether two partitions shard an array the same way on the mesh in scope."""
    return _sharding_axes(one) == _sharding_axes(other)


def _sharding_axes(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """Returns the axes of more than one rank that shard each dimension, without the whole dimensions at the end."""
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    axes = [tuple(axis for axis in entry if degree(axis) > 1) for entry in entries]
    while axes and not axes[-1]:
        axes.pop()
    return axes


def _is_local(module: nnx.Module) -> bool:
    """Says whether a module is written for local view, and has no variables other than parameters and caches."""
    variables = nnx.to_flat_state(nnx.state(module, nnx.Variable))
    return isinstance(module, Layer) and all(isinstance(v, nnx.Param | Frozen | Cache) for _, v in variables)


def _shared_inputs(shared: Any) -> SharedInputs:
    if isinstance(shared, Mapping):
        return SharedInputs((), dict(shared))
    if isinstance(shared, list | tuple):
        return SharedInputs(tuple(shared), {})
    raise TypeError(
        f"`shared` is a {type(shared).__name__}; it must be a tuple of positional arguments, or a dict of named ones, "
        "for the layers of each `Stack`."
    )


def _check_schedule(schedule: Any) -> None:
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(f"`schedule` is {schedule!r}; it must be a `gtp_jax.Schedule`.")


def _refuse_outer_variables(layer: nnx.Module) -> None:
    """Refuses a layer with variables that its factory did not make: a stack would give every layer its own copy."""
    for path, variable in nnx.iter_graph(layer):
        if isinstance(variable, nnx.Variable) and not _is_of_this_trace(variable):
            raise ValueError(
                f"the `factory` of a `Stack` returned a {type(layer).__name__} with the {type(variable).__name__} "
                f"{'.'.join(map(str, path))}, which was made outside of the factory. A stack stores variables of its "
                "own for every layer. Make it in the factory. To share it among layers, call them in a loop: "
                "`nnx.List([factory(rngs=rngs) for _ in range(length)])`."
            )


def _is_of_this_trace(variable: nnx.Variable) -> bool:
    try:
        variable.set_raw_value(variable.get_raw_value())
    except TraceContextError:
        return False
    return True


def _refuse_inner_stacks(module: nnx.Module) -> None:
    if any(isinstance(inner, Stack) for _, inner in nnx.iter_modules(module)):
        raise ValueError(
            f"{type(module).__name__} holds a `Stack`, which cannot be a part of another chain's layer. Put stacks "
            "side by side: `run_chain(x, stack, other_stack)`."
        )
