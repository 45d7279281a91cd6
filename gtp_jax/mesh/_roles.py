"""The roles of mesh axes, as a value: code asks for a role and never for an axis by name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection

import jax
from jax.sharding import PartitionSpec

from ._axes import DP, EP, GTP, TP, degrees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of mesh axes. An axis that no role names replicates everything.

    Modules take the roles in scope when they are built (`use_roles`), and keep them.

    Attributes:
        batch: axes that shard the batch, outermost first.
        weights: axes that shard weights in storage, outermost first; weights are gathered over them just before use.
        optimizer: axes that divide what is stored of a weight further, master and optimizer state (ZeRO), outermost
            first; a train step gathers over them once. By default those of `batch` that `weights` does not name; `()`
            keeps a replica on each of their ranks.
        tensor: the axis of tensor parallelism, which also shards the sequence between parallel layers; `None` for none.
        experts: the axis whose ranks divide the experts of each layer and exchange tokens (`MoE`), one of `batch`;
            `None` for none. What `weights` says of it holds for all other weights: experts are gathered over the rest.

    Raises:
        ValueError: if an axis is named twice in a role, `tensor` has another role too, `optimizer` names an axis that
            shards weights, or one that does not shard the batch, or `experts` one that does not shard the batch.
    """

    batch: tuple[str, ...] = (DP, GTP)
    weights: tuple[str, ...] = (GTP,)
    optimizer: tuple[str, ...] | None = None
    tensor: str | None = TP
    experts: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "weights", "optimizer"):
            axes = getattr(self, name)
            if name == "optimizer" and axes is None:
                continue
            if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in axes):
                raise ValueError(f"`{name}` is {axes!r}; it must be a tuple of mesh axes, such as ('gtp',).")
            if len(set(axes)) < len(axes):
                raise ValueError(f"`{name}` is {axes!r}, which names an axis twice; name each once.")
            if self.tensor in axes:
                raise ValueError(
                    f"`tensor` is {self.tensor!r}, which `{name}` {axes!r} names too: ranks of the tensor axis work on "
                    "the same examples with their own parts of a weight. Take it out of one of them."
                )
        wrong = [axis for axis in self.optimizer or () if axis in self.weights or axis not in self.batch]
        if wrong:
            raise ValueError(
                f"`optimizer` is {self.optimizer!r}, of which {', '.join(wrong)} shards weights already or does not "
                f"shard the batch; allowed are {self._replicas!r}. Leave it out, or pass `()` for replicas."
            )
        if self.tensor is not None and not isinstance(self.tensor, str):
            raise ValueError(f"`tensor` is {self.tensor!r}; it must be the name of one mesh axis, or `None`.")
        if self.experts is not None and self.experts not in self.batch:
            raise ValueError(
                f"`experts` is {self.experts!r}; it must be one of `batch` {self.batch!r}, or `None`: the ranks that "
                "divide the experts exchange tokens of different examples."
            )

    @property
    def over_experts(self) -> tuple[str, ...]:
        """The axes over which experts are gathered, unless they name their own."""
        return tuple(axis for axis in self.weights if axis != self.experts)

    @property
    def over_optimizer(self) -> tuple[str, ...]:
        """The axes of `optimizer`, also where they are those by default."""
        return self._replicas if self.optimizer is None else self.optimizer

    @property
    def _replicas(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.batch if axis not in self.weights)


_scope = jax.make_user_context(default_value=None)
_WITH_EXPERTS = Roles(batch=(DP, GTP, EP), weights=(GTP, EP), experts=EP)


def use_roles(roles: Roles) -> contextlib.AbstractContextManager[None]:
    """Puts roles in scope. They are part of the key of `jax.jit`'s cache.

    Raises:
        TypeError: if `roles` is no `Roles`.
    """
    if not isinstance(roles, Roles):
        raise TypeError(f"`roles` is a {type(roles).__name__}; it must be a `gtp_jax.Roles`.")
    return _scope(roles)


_once = jax.make_user_context(default_value=False)


def use_loss_counted_once() -> contextlib.AbstractContextManager[None]:
    """Says that the code traced here contributes to a loss that counts once on the whole mesh, as one of global arrays
    does; in a step's `shard_map` it counts on every rank of an axis that does not shard the batch."""
    return _once(True)


def loss_copies(roles: Roles) -> int:
    """Returns how many ranks add the gradient of one example to a loss that counts once; 1 where it counts on all."""
    if not _once.value:
        return 1
    names = jax.sharding.get_abstract_mesh().axis_names
    return degrees(tuple(axis for axis in names if axis not in roles.batch))


def current_roles() -> Roles:
    """Returns the roles in scope; by default those of `default_roles` for the mesh in scope."""
    return _scope.value or default_roles(jax.sharding.get_abstract_mesh().axis_names)


def default_roles(axes: Collection[str]) -> Roles:
    """Returns the roles of a mesh's axes where nothing says otherwise: batch over dp and gtp, weights over gtp, what is
    stored of them over dp too, tensor parallelism over tp; of a mesh with an axis ep, batch and weights over that too,
    and experts over ep."""
    return _WITH_EXPERTS if EP in axes else Roles()


def spec_of_batch(roles: Roles, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the partition of an array whose dimension 0 is the batch: sharded over the ranks that divide the batch if
    they divide this one, and whole otherwise. A scalar is whole."""
    return PartitionSpec(roles.batch) if shape and shape[0] % degrees(roles.batch) == 0 else PartitionSpec()
