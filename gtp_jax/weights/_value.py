"""What is known of a weight beside its array, and what a chain puts in its place."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import enum
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ..layout import Layout
from ..mesh import stacked_spec
from ._group import WeightGroup
from ._resolve import Layers
from ._rounding import CallKeys
from ._stretch import Stretch


class Holds(enum.Enum):
    """What the array in a weight's variable is."""

    MASTER = "what this rank stores"
    REPLACED = "another array than the one that was prepared: user code put it there"
    PLACEHOLDER = "an array whose values mean nothing: gradients are taken of it, and others are gathered"
    ROUNDED = "what this rank stores, rounded to the dtype in which it travels"


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("shard", "prepared", "keys"), meta_fields=("groups", "holds")
)
@dataclasses.dataclass(frozen=True)
class Stored:
    """What a rank stores of a kernel about which something has been decided; of a stack's layers, stacked.

    Attributes:
        shard: the array of which gradients are taken.
        groups: what is decided about it, by layers.
        prepared: what is gathered in its place; the first kernel of a module has it for all of them.
        keys: keys of stochastic rounding; `None` where nothing is rounded so.
        holds: what `shard` is.
    """

    shard: jax.Array
    groups: tuple[tuple[Layers, WeightGroup], ...]
    prepared: tuple[Stretch, ...] = ()
    keys: CallKeys | None = None
    holds: Holds = Holds.MASTER

    def specs(self, layout: Layout) -> Stored:
        """Returns the partitions of its arrays in global view.

        Args:
            layout: the kernel's.
        """
        (layers, _), *_ = self.groups
        prepared = tuple(one.specs(stacked=layers.stack is not None) for one in self.prepared)
        shard: Any = stacked_spec(layout.spec, self.shard.ndim)
        return dataclasses.replace(self, shard=shard, prepared=prepared, keys=PartitionSpec())  # pyright: ignore[reportArgumentType]


# Made since the innermost `forget_after` began; `None` outside of any.
_PUT: contextvars.ContextVar[list[Beside] | None] = contextvars.ContextVar("put_beside_weights", default=None)


@contextlib.contextmanager
def forget_after() -> Iterator[None]:
    """Drops, at its end, the arrays of every `Beside` that was made within it.

    Static metadata outlive a trace: `nnx.jit` and `nnx.remat` keep them as keys of their caches, and would keep the
    trace's arrays with them. It is also a decorator.
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
    """A `Stored` as metadata of its kernel's variable, whose value stays the array: a model's code sees weights alone.

    Compared by identity, as metadata are static. What was gathered or quantized belongs to one array. Code that puts
    another in its place (a noisy weight, or the same one inside `nnx.remat`) has that one gathered and quantized anew.

    Args:
        stored: of the array that the variable holds.
    """

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        if (put := _PUT.get()) is not None:
            put.append(self)

    def forget(self) -> None:
        """Drops the arrays: every array is another than the one that was known."""
        self._stored = Stored(_FORGOTTEN, self._stored.groups, holds=self._stored.holds)

    def of(self, shard: Any) -> Stored:
        """Returns what is known of this array.

        Raises:
            ValueError: if it is another than what stands in for a weight.
        """
        stored = self._stored
        if stored.shard is shard:
            return stored
        if stored.holds is Holds.PLACEHOLDER:
            raise ValueError(
                "a weight is replaced by another, or passed through a transformation such as `nnx.remat`, in a step "
                "with `reduce_over_dp='last'`, where its array is a placeholder. Take `reduce_over_dp='each'`."
            )
        return Stored(shard, stored.groups, keys=stored.keys, holds=Holds.REPLACED)


_FORGOTTEN: Any = object()  # stands where an array was

_GATHERED = (
    "the array of a weight is read or written by a layer of a `Stack`, or of `run_chain`, where the weight is gathered "
    "and fused with others that meet the same input. Call its module, or make it an `nnx.Param`, which is whole on "
    "every rank."
)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("weight", "keys"), meta_fields=("group",))
@dataclasses.dataclass(frozen=True)
class Gathered:
    """The fused weight of a module's kernels, in the variable of the first; the others' hold `None`.

    Attributes:
        weight: an array or a `SlottedWeight`.
        group: the kernels.
        keys: of stochastic rounding; `None` where nothing is rounded so.
    """

    weight: Any
    group: WeightGroup
    keys: CallKeys | None = None

    def __getitem__(self, _: Any) -> Any:
        raise TypeError(_GATHERED)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{_GATHERED} (asked for `{name}`)")
