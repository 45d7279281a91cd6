"""Provides chains of modules: `Stack` for layers of the same structure, and `run_chain` for any sequence of
`gtp_jax.nn.Layer`s."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.errors import TraceContextError
from jax.sharding import PartitionSpec

from .._numbers import is_size
from ..chain import Remat, Schedule, with_remat
from ..mesh import axes_by_dim, check_mesh_in_scope, current_view, degree
from ._cache import Cache
from ._frozen import Frozen
from ._layer import Layer, refuse_parts, sides_of, states_partitions
from ._shared import SharedInputs
from ._stages import Link, run_links
from ._unstacked import Unstacked
from ._weight import StackedLayers


class Stack(StackedLayers):
    """A chain of `length` layers of the same structure. By default, each layer's weights are gathered while the
    previous layer computes (`Schedule.prefetch`).

    `stack(x, *shared, **named)` equals

        for layer, own in zip(layers, each):
            x = layer(x, *shared, **named, **own)

    The further arguments are the *shared inputs*, such as positions, masks or an encoder's output. Every layer receives
    them, in forward and again in backward, so that no layer saves its own copy. With `each`, every layer also receives
    arguments of its own, which are not arrays.

    Variables that a layer writes, such as `nnx.BatchStat`, the counts of dropout's `nnx.RngStream`,
    `gtp_jax.nn.AuxLoss` or values captured by `nnx.capture`, are updated as in that loop: once per call, even if
    backward recomputes the layer. Gradients flow through the floating-point values of these variables, except those of
    `nnx.BatchStat`, `nnx.RngState`, `gtp_jax.nn.Metric` and `gtp_jax.nn.Cache`, which leave the stack as constants.

    Each variable is stored as one stacked array, with a leading dimension of `length`.

    In global view, layers compute on global arrays: batch statistics are those of the whole batch, and the masks of
    `nnx.Dropout` are the same as without a mesh. Layers that derive from `gtp_jax.nn.Layer` are an exception: each of
    their calls opens a `shard_map`, in which `local` computes on a rank's own part. All layers share one `shard_map` if
    they have no variables other than parameters, frozen weights and caches, if no shared input contains an array, and
    if the output of a layer is partitioned like its input and neither is converted (`Layer.converts`).

    Args:
        factory: a function that makes one layer, called as `factory(rngs=...)`. The layer maps activations to
            activations of the same shape, dtype and partition.
        length: the number of layers.
        schedule: how the chain is run; see `Schedule`.
        remat: the policy for what is saved for backward; see `with_remat`.
        sequence_parallel: whether activations between layers are sharded along the sequence over tp, if a layer does
            not state this itself.
        each: for each layer, further arguments of its call by name, which are hashable constants: for example,
            `[{"reach": reach} for reach in reaches]` for `Attention`s with different windows. Each run of consecutive
            layers with equal arguments is compiled once, if `schedule.unroll` is not `"full"`.
        rngs: the random streams. They are split, so that each layer draws from its own streams: in the factory, and
            also in calls if the layer keeps them.

    Attributes:
        layers: one module, whose variables hold the stacked arrays of all layers.
        length: the number of layers.

    Raises:
        ValueError: if `length` is not a whole number of at least 1, `remat` is not a known policy, or a layer contains
            a `Stack` or variables that `factory` did not make. A call raises it if a layer writes a parameter, or
            changes a plain attribute; if, in global view, a `gtp_jax.nn.Layer` writes a variable that is neither
            a parameter nor a cache; or if the weights were built for other mesh degrees.
        TypeError: if `schedule` is not a `Schedule`. A call raises it if an NNX object is among the shared inputs.
    """

    context_parallel = True

    def __init__(
        self,
        factory: Callable[..., nnx.Module],
        length: int,
        *,
        schedule: Schedule | None = None,
        remat: Remat = "matmuls",
        sequence_parallel: bool = True,
        each: Sequence[Mapping[str, Any]] | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        if not is_size(length):
            raise ValueError(f"`length` is {length}; it must be a whole number of at least 1.")
        if each is not None and len(each) != length:
            raise ValueError(f"`each` has arguments for {len(each)} layers, but `length` is {length}.")
        with_remat(lambda x: x, remat)
        _check_schedule(schedule)
        super().__init__()
        self.length = length = int(length)
        self.schedule = Schedule() if schedule is None else schedule
        self.remat: Remat = remat
        self.sequence_parallel = sequence_parallel
        self.each = tuple(tuple(own.items()) for own in each or ())

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
        if current_view() == "local" and not isinstance(self.layers, Layer):
            refuse_parts(self.layers, self.roles)
        inputs = SharedInputs(shared, named)
        return run_links((self._link(self.remat),), x, self.schedule, inputs)

    @property
    def fewest_dims(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The minimum number of dimensions of the layers' input, as in `Layer`; 1 if the layers state none."""
        return getattr(self.layers, "fewest_dims", 1)

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        """Returns the partitions of input and output in global view: those that the stack's layers state, or the
        defaults of `Layer` if they state none."""
        layer = self.layers
        return layer.partitions(ndim) if states_partitions(layer) else super().partitions(ndim)

    def linked(self, ndim: int) -> bool:
        """Returns whether a layer's output can be the next layer's input without a conversion: for activations of
        `ndim` dimensions, both have the same partition, and, for a `Layer`, both flags of `converts` are false."""
        into, out = self.partitions(ndim)
        return _same(into, out) and not (isinstance(self.layers, Layer) and any(self.layers.converts))

    def _link(self, remat: Remat) -> Link:
        return Link(self.layers, remat, self.length, self.each)


def run_chain(
    x: Any,
    *modules: Layer,
    schedule: Schedule | None = None,
    remat: Remat | None = None,
    shared: Sequence[Any] | Mapping[str, Any] = (),
) -> Any:
    """Calls modules in sequence as one chain, so that the gather of a module's first weights overlaps with the
    computation of the module before it.

    `run_chain(tokens, embed, blocks, head)` equals `head(blocks(embed(tokens)))`. In addition, the first block's
    weights are gathered while the embedding computes, and the head's weights while the last block computes, unless the
    schedule switches prefetching off. In backward, gathers overlap in the same way.

    Args:
        x: the first module's input.
        modules: the modules. They may be `Stack`s.
        schedule: how the chain is run; by default, the schedule of the `Stack`s, or `Schedule()` if there are none.
        remat: the policy for what all modules save for backward. By default, each `Stack` uses its own, and other
            modules use that of the first `Stack`, or `"matmuls"` if there is none.
        shared: further arguments of the layers of each `Stack`, by position or by name; see `Stack`. Other modules do
            not receive them.

    Raises:
        ValueError: if there are no modules; if `Stack`s have different schedules and `schedule` is not given; if a
            module that is not a `Stack` contains a `Stack`; if there are shared inputs but no `Stack`; or if `remat` is
            not a known policy.
        TypeError: if a module is not a `gtp_jax.nn.Layer`, `schedule` is not a `Schedule`, `shared` is not a tuple,
            list or mapping, or an NNX object is among the shared inputs.
    """
    if not modules:
        raise ValueError("`run_chain` got no modules; pass at least one.")
    for number, module in enumerate(modules):
        if not isinstance(module, Layer):
            raise TypeError(
                f"`run_chain` takes gtp_jax modules, but module {number} is a {type(module).__name__}. Derive it "
                "from `gtp_jax.nn.Layer`, and write its call as the method `local`."
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
        raise ValueError("`shared` applies to the layers of a `Stack`, but `run_chain` got no stack. Remove it.")
    others: Remat = stacks[0].remat if stacks else "matmuls"
    links = tuple(m._link(remat or m.remat) if isinstance(m, Stack) else Link(m, remat or others) for m in modules)
    return _call(links, modules, x, schedule or (stacks[0].schedule if stacks else Schedule()), inputs)


def _one_by_one(x: Any, modules: tuple[Layer, ...], shared: Any) -> Any:
    """Calls modules in sequence without a chain, because the weights of `Unstacked` layers are already gathered."""
    for module in modules:
        if not isinstance(module, Unstacked):
            x = module(x)
        else:
            x = module(x, **shared) if isinstance(shared, dict) else module(x, *shared)
    return x


def _call(links: tuple[Link, ...], modules: tuple[Layer, ...], x: Any, schedule: Schedule, shared: SharedInputs) -> Any:
    """Calls a chain in the view in scope. In global view, the chain runs within one `shard_map` if `_is_local` is true
    of all modules, no shared input contains an array, and the modules are linked (`Chain.linked`)."""
    check_mesh_in_scope()
    if current_view() == "global" and not shared.arrays and all(_is_local(link.module) for link in links):
        ndim = jnp.ndim(x) + jnp.issubdtype(jnp.result_type(x), jnp.integer)  # an embedding turns ids into vectors
        chain = Chain(modules, schedule, tuple(link.remat for link in links), ndim)
        args, kwargs = shared.arguments([])
        if chain.linked(jnp.ndim(x)):
            try:
                return chain(x, *args, **kwargs)
            except OtherDimensions as other:
                chain.ndim = other.ndim
            if chain.linked(jnp.ndim(x)):
                return chain(x, *args, **kwargs)
    return run_links(links, x, schedule, shared)


class OtherDimensions(Exception):
    """Raised if the output of a chain does not have the number of dimensions that the chain was built for.

    Attributes:
        ndim: the number of dimensions of the output.
    """

    def __init__(self, ndim: int) -> None:
        super().__init__(f"an output of {ndim} dimensions")
        self.ndim = ndim


class Chain(Layer):
    """A sequence of modules, called as one module within one `shard_map`.

    Args:
        modules: the modules, at least one.
        schedule: how the chain is run.
        remat: for each module, the policy for what is saved for backward.
        ndim: the number of dimensions of the output, and of the activations between modules. A call checks the output.

    Raises:
        OtherDimensions: by a call, if the output does not have `ndim` dimensions.
    """

    context_parallel = True

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

    def local(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        links = [
            m._link(remat) if isinstance(m, Stack) else Link(m, remat)
            for m, remat in zip(self.modules, self.remat, strict=True)
        ]
        y = run_links(links, x, self.schedule, SharedInputs(args, kwargs))
        ndim = max((array.ndim for array in jax.tree.leaves(y)), default=self.ndim)
        if ndim != self.ndim:
            raise OtherDimensions(ndim)
        return y

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        sides = self._sides(ndim)
        return sides[0][0], sides[-1][1]

    def linked(self, ndim: int) -> bool:
        """Returns whether each module's output can be the next module's input without a conversion: both have the same
        partition, and neither is converted. Each `Stack` must also be `linked` in itself.

        If not, as with two column-parallel layers in sequence, each layer opens its own `shard_map` in global view.

        Args:
            ndim: the number of dimensions of the chain's input.
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
        """Returns the partitions of each module's input and output, for a chain's input of `ndim` dimensions."""
        sides = [sides_of(self.modules[0], ndim, self.ndim)]
        for place, module in enumerate(self.modules[1:], 2):
            if states_partitions(module) or place == len(self.modules):
                sides.append(sides_of(module, self.ndim, self.ndim))
            else:  # the module states no partitions, so it works on any part and keeps the partition of its input
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
    """Returns, for each dimension, the axes of more than one rank that shard it. Leaves out trailing dimensions that no
    such axis shards."""
    axes = [tuple(axis for axis in own if degree(axis) > 1) for own in axes_by_dim(spec)]
    while axes and not axes[-1]:
        axes.pop()
    return axes


def _is_local(module: nnx.Module) -> bool:
    """Returns whether a module is a `Layer`, and so is written for local view, and has no variables other than
    parameters, frozen weights and caches."""
    variables = nnx.to_flat_state(nnx.state(module, nnx.Variable))
    return isinstance(module, Layer) and all(isinstance(v, nnx.Param | Frozen | Cache) for _, v in variables)


def _shared_inputs(shared: Any) -> SharedInputs:
    if isinstance(shared, Mapping):
        return SharedInputs((), dict(shared))
    if isinstance(shared, list | tuple):
        return SharedInputs(tuple(shared), {})
    raise TypeError(
        f"`shared` is a {type(shared).__name__}; it must be a tuple or list of positional arguments, or a mapping of "
        "keyword arguments, for the layers of each `Stack`."
    )


def _check_schedule(schedule: Any) -> None:
    if schedule is not None and not isinstance(schedule, Schedule):
        raise TypeError(f"`schedule` is {schedule!r}; it must be a `gtp_jax.nn.Schedule`.")


def _refuse_outer_variables(layer: nnx.Module) -> None:
    """Raises a `ValueError` if a layer has variables that its factory did not make. A stack would give every layer its
    own copy of them."""
    for path, variable in nnx.iter_graph(layer):
        if isinstance(variable, nnx.Variable) and not _is_of_this_trace(variable):
            raise ValueError(
                f"the `factory` of a `Stack` returned a {type(layer).__name__} with the {type(variable).__name__} "
                f"{'.'.join(map(str, path))}, which was created outside the factory. A stack stores separate "
                "variables for each layer. Create it in the factory. To share it among layers, call them in a loop: "
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
            f"{type(module).__name__} contains a `Stack`, which cannot be part of a layer of another chain. Chain "
            "the stacks instead: `run_chain(x, stack, other_stack)`."
        )
