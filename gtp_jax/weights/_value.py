"""Defines what a weight's variable holds: its array with the decisions about it, or the gathered weight in a chain."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ..layout import Layout
from ..mesh import current_view, stacked_spec
from ._group import WeightGroup
from ._ranks import ranks_spec
from ._resolve import Layers
from ._rounding import CallKeys
from ._stretch import Stretch


class Holds(enum.Enum):
    """The kind of array that a weight's variable holds."""

    MASTER = "what this rank stores"
    REPLACED = "another array than the one that was prepared: user code put it there"
    PLACEHOLDER = "an array whose values mean nothing: gradients are taken of it, and others are gathered"
    ROUNDED = "what this rank stores, rounded to the dtype in which it travels"


@functools.partial(jax.tree_util.register_dataclass, data_fields=("amaxes", "slot"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Scaling:
    """Holds what the products of a module get besides their operands, if their scales follow from the amaxes of earlier
    steps.

    Attributes:
        amaxes: the amaxes that set the scales of input, weight and gradient, float32 `(*stack, 3)`.
        slot: an array whose gradient is each rank's amaxes of the input and of the incoming gradient: `(*stack, 2)`,
            or `(*stack, ranks * 2)` in global view. Its values are never read.
    """

    amaxes: Any
    slot: Any

    @property
    def of_weight(self) -> jax.Array:
        """The amax that sets the scale of the weight, float32 `(*stack,)`."""
        return self.amaxes[..., 1]

    @staticmethod
    def slot_for(amaxes: jax.Array) -> jax.Array:
        """Returns zeros as the slot that goes with `amaxes`. In local view, or without a mesh, it has one zero for this
        rank's amax of the input, and one for that of the gradient; in global view, it has those of all ranks."""
        in_global = current_view() == "global"
        ranks = jax.sharding.get_abstract_mesh().size if in_global else 1
        zeros = jnp.zeros((*amaxes.shape[:-1], 2 * ranks), jnp.float32)
        return lax.with_sharding_constraint(zeros, ranks_spec(stacked=amaxes.ndim > 1)) if in_global else zeros

    @staticmethod
    def specs(*, stacked: bool = False) -> Scaling:
        """Returns the partitions of its arrays in global view."""
        return Scaling(PartitionSpec(), ranks_spec(stacked=stacked))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("shard", "prepared", "keys", "scaling"),
    meta_fields=("groups", "holds"),
)
@dataclasses.dataclass(frozen=True)
class Stored:
    """A kernel's stored array, with the decisions about it. The kernels of a stack's layers are stacked.

    For a weight that `gtp_jax.shard` has sharded, `groups` is empty, and every member of a wire holds it in `prepared`.

    Attributes:
        shard: the array with respect to which gradients are taken.
        groups: the decisions about the kernel, by layers.
        prepared: what is gathered instead of the array. The first kernel of a wire's first member holds it for all.
        keys: the keys of stochastic rounding, if anything is rounded stochastically. The first kernel of a module holds
            them for all its kernels.
        holds: the kind of array that `shard` is.
        scaling: the scaling by amaxes of earlier steps, if its operands are scaled so. The first kernel of a module
            holds it for all its kernels.
    """

    shard: jax.Array
    groups: tuple[tuple[Layers, WeightGroup], ...]
    prepared: tuple[Stretch, ...] = ()
    keys: CallKeys | None = None
    holds: Holds = Holds.MASTER
    scaling: Scaling | None = None

    def specs(self, layout: Layout) -> Stored:
        """Returns the partitions of its arrays in global view.

        Args:
            layout: the kernel's layout.
        """
        (layers, _), *_ = self.groups
        stacked = layers.stack is not None
        prepared = tuple(one.specs(stacked=stacked) for one in self.prepared)
        shard: Any = stacked_spec(layout.spec, self.shard.ndim)
        scaling = None if self.scaling is None else Scaling.specs(stacked=stacked)
        keys: Any = PartitionSpec()
        return dataclasses.replace(self, shard=shard, prepared=prepared, keys=keys, scaling=scaling)


# What has been made since the innermost `forget_after` began; `None` outside all of them.
_PUT: contextvars.ContextVar[list[Beside] | None] = contextvars.ContextVar("put_beside_weights", default=None)


@contextlib.contextmanager
def forget_after() -> Iterator[None]:
    """Returns a context that drops, at its end, the arrays of every `Beside` that was made within it.

    Static metadata outlive a trace: `nnx.jit` and `nnx.remat` keep them as keys of their caches, and would keep the
    trace's arrays with them. The context also works as a decorator.
    """
    put: list[Beside] = []
    token = _PUT.set(put)
    try:
        yield
    finally:
        _PUT.reset(token)
        for beside in put:
            beside.forget()


class Beside:
    """Holds a `Stored` as metadata of its kernel's variable. The variable's value stays the array, so that a model's
    code sees only weights.

    Compared by identity, because metadata are static. What was gathered or quantized belongs to one array. If code puts
    another array in its place (a noisy weight, or the same one inside `nnx.remat`), that one is gathered and quantized
    anew.

    Args:
        stored: the `Stored` of the array that the variable holds.
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        if (put := _PUT.get()) is not None:
            put.append(self)

    def forget(self) -> None:
        """Drops the arrays. From then on, `of` treats every array as a replacement."""
        self._stored = Stored(_FORGOTTEN, self._stored.groups, holds=self._stored.holds)

    def of(self, shard: Any) -> Stored:
        """Returns the `Stored` of an array that the variable holds.

        Raises:
            ValueError: if the array has replaced a placeholder.
        """
        stored = self._stored
        if stored.shard is shard:
            return stored
        if stored.holds is Holds.PLACEHOLDER:
            raise ValueError(
                "a weight is replaced by another, or passed through a transformation such as `nnx.remat`, in a step "
                "with `reduce_over_dp='last'`, where its array is a placeholder. Use `reduce_over_dp='each'`."
            )
        return Stored(shard, stored.groups, keys=stored.keys, holds=Holds.REPLACED, scaling=stored.scaling)


_FORGOTTEN: Any = object()  # replaces a dropped array

_GATHERED = (
    "the array of a weight is read or written by a layer of a `Stack` or of `run_chain`, where the weight is "
    "gathered in one buffer with others that multiply the same input. Call its module, or make it an `nnx.Param`, "
    "which is whole on every rank."
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("weight", "keys", "scaling"), meta_fields=("group",))
@dataclasses.dataclass(frozen=True)
class Gathered:
    """The fused weight of a module's kernels, held by the variable of the first; the variables of the others hold
    `None`.

    Attributes:
        weight: the weight, an array or a `SlottedWeight`.
        group: the group of the kernels.
        keys: the keys of stochastic rounding; `None` if nothing is rounded stochastically.
        scaling: the scaling by amaxes of earlier steps, if its operands are scaled so.
    """

    weight: Any
    group: WeightGroup
    keys: CallKeys | None = None
    scaling: Scaling | None = None

    def __getitem__(self, _: Any) -> Any:
        raise TypeError(_GATHERED)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{_GATHERED} (asked for `{name}`)")
