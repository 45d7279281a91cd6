"""What is known of a weight beside its array, and what a chain puts in its place."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax

from ..collectives import Packed
from ._group import WeightGroup
from ._resolve import Layers
from ._rounding import CallKeys


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("shard", "packed", "keys", "joined"),
    meta_fields=("groups", "starts", "changed", "stands_in", "rounded"),
)
@dataclasses.dataclass(frozen=True)
class Stored:
    """What a rank stores of a kernel, for which something is decided or gathered already; of a stack's layers, stacked.

    Attributes:
        shard: what gradients are taken of.
        groups: what is decided about it, by layers.
        packed: buffers of codes that are gathered in place of shards: of all layers and, ahead of them, of those whose
            codes have been gathered already. The first member of a buffer holds it, in the first kernel.
        keys: of stochastic rounding; `None` where nothing is rounded so.
        joined: shards that are gathered in place of `shard`, each of some layers of a stack.
        starts: the first layer of each of `joined`.
        changed: whether the array is another than the one of which codes and shards were gathered ahead.
        stands_in: whether `shard` is a placeholder, whose values mean nothing.
        rounded: whether `shard` has values of a narrower dtype, that in which it travels.
    """

    shard: jax.Array
    groups: tuple[tuple[Layers, WeightGroup], ...]
    packed: tuple[Packed, ...] = ()
    keys: CallKeys | None = None
    joined: tuple[jax.Array, ...] = ()
    starts: tuple[int, ...] = ()
    changed: bool = False
    stands_in: bool = False
    rounded: bool = False

    def joined_layers(self, start: int, stop: int) -> jax.Array:
        """Returns `joined` of layers `start` to `stop` (exclusive) of a stack."""
        first, own = max((first, i) for i, first in enumerate(self.starts) if first <= start)
        whole = self.joined[own]
        return whole if stop - start == len(whole) else whole[start - first : stop - first]


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
        known = self._stored
        self._stored = Stored(
            _FORGOTTEN, known.groups, changed=known.changed, stands_in=known.stands_in, rounded=known.rounded
        )

    def of(self, shard: Any) -> Stored:
        """Returns what is known of this array.

        Raises:
            ValueError: if it is another than what stands in for a weight.
        """
        stored = self._stored
        if stored.shard is shard:
            return stored
        if stored.stands_in:
            raise ValueError(
                "a weight is replaced by another, or passed through a transformation such as `nnx.remat`, in a step "
                "with `reduce_over_dp='last'`, where its array is a placeholder. Take `reduce_over_dp='each'`."
            )
        return Stored(shard, stored.groups, keys=stored.keys, changed=True)


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
