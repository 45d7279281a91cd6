"""The roles of mesh axes, as a value. Code asks for a role, never for an axis by name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection

import jax
from jax.sharding import PartitionSpec

from ._axes import CP, DP, EP, GTP, TP, degree, degrees


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of mesh axes. Everything is replicated over an axis without a role.

    Modules take the roles that are in scope when they are built (`use_roles`), and keep them.

    Attributes:
        batch: axes that shard the batch, outermost first.
        sequence: the axis of context parallelism, whose ranks work on the same examples and divide the tokens of each;
            `None` for none.
        weights: axes that shard weights in storage, outermost first; weights are gathered over them just before use.
        optimizer: axes that further divide the stored shards of a weight, master weights and optimizer state (ZeRO),
            outermost first; a train step gathers over them once. By default, the axes of `batch` that are not in
            `weights`. `()` keeps a replica on each rank of those axes.
        tensor: the axis of tensor parallelism, which also shards the sequence between parallel layers; `None` for none.
        experts: the axis, one of `batch`, whose ranks divide the experts of each layer and exchange tokens (`MoE`);
            `None` for none. If `weights` contains it, it shards only the other weights; experts are gathered over the
            remaining axes of `weights`.

    Raises:
        ValueError: if a role contains an axis twice; if the axis of `tensor` has another role too; if the axis of
            `sequence` shards the batch; if `optimizer`
            contains an axis that shards weights or does not shard the batch; or if `experts` does not shard the batch.
    """

    batch: tuple[str, ...] = (DP, GTP)
    weights: tuple[str, ...] = (GTP,)
    optimizer: tuple[str, ...] | None = None
    tensor: str | None = TP
    experts: str | None = None
    sequence: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "weights", "optimizer"):
            axes = getattr(self, name)
            if name == "optimizer" and axes is None:
                continue
            if not isinstance(axes, tuple) or not all(isinstance(axis, str) for axis in axes):
                raise ValueError(f"`{name}` is {axes!r}; it must be a tuple of mesh axes, such as ('gtp',).")
            if len(set(axes)) < len(axes):
                raise ValueError(f"`{name}` is {axes!r}, which contains an axis twice; list each axis once.")
            if self.tensor in axes:
                raise ValueError(
                    f"`tensor` is {self.tensor!r}, which is also in `{name}` {axes!r}, but ranks of the tensor axis "
                    "work on the same examples with their own parts of a weight. Remove it from one of the two."
                )
        wrong = [axis for axis in self.optimizer or () if axis in self.weights or axis not in self.batch]
        if wrong:
            raise ValueError(
                f"`optimizer` is {self.optimizer!r}, of which {', '.join(wrong)} already shards weights or does not "
                f"shard the batch; allowed are {self._replicas!r}. Leave it out, or pass `()` for replicas."
            )
        if self.tensor is not None and not isinstance(self.tensor, str):
            raise ValueError(f"`tensor` is {self.tensor!r}; it must be the name of one mesh axis, or `None`.")
        if self.sequence is not None and not isinstance(self.sequence, str):
            raise ValueError(f"`sequence` is {self.sequence!r}; it must be the name of one mesh axis, or `None`.")
        if self.sequence is not None and self.sequence in (*self.batch, self.tensor):
            raise ValueError(
                f"`sequence` is {self.sequence!r}, which is also in `batch` {self.batch!r} or is `tensor` "
                f"{self.tensor!r}, but ranks of the sequence axis work on the same examples, with all of a layer's "
                "weights. Remove it from there."
            )
        if self.experts is not None and self.experts not in self.batch:
            raise ValueError(
                f"`experts` is {self.experts!r}; it must be one of `batch` {self.batch!r}, or `None`, because ranks "
                "that divide the experts exchange tokens of different examples."
            )

    @property
    def tokens(self) -> tuple[str, ...]:
        """The axes that divide tokens: those of `batch`, then that of `sequence`."""
        return self.batch if self.sequence is None else (*self.batch, self.sequence)

    @property
    def over_experts(self) -> tuple[str, ...]:
        """The axes over which experts are gathered, unless their module is given axes of its own."""
        return tuple(axis for axis in self.weights if axis != self.experts)

    @property
    def over_optimizer(self) -> tuple[str, ...]:
        """The axes of `optimizer`, with the default filled in."""
        return self._replicas if self.optimizer is None else self.optimizer

    @property
    def _replicas(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.batch if axis not in self.weights)


_scope = jax.make_user_context(default_value=None)
_WITH_EXPERTS = Roles(batch=(DP, GTP, EP), weights=(GTP, EP), experts=EP)


def use_roles(roles: Roles) -> contextlib.AbstractContextManager[None]:
    """Puts roles in scope. They are part of the cache key of `jax.jit`.

    Raises:
        TypeError: if `roles` is not a `Roles`.
    """
    if not isinstance(roles, Roles):
        raise TypeError(f"`roles` is a {type(roles).__name__}; it must be a `gtp_jax.mesh.Roles`.")
    return _scope(roles)


_once = jax.make_user_context(default_value=False)


def use_loss_counted_once() -> contextlib.AbstractContextManager[None]:
    """Declares that the code traced in this scope contributes to a loss that counts once on the whole mesh, as a loss
    of global arrays does. In the `shard_map` of a step, by contrast, the loss counts on every rank of an axis that does
    not divide tokens."""
    return _once(True)


def loss_copies(roles: Roles) -> int:
    """Returns the number of ranks that work on the same tokens and would each add its term to the loss, if the loss
    counts once on the mesh (`use_loss_counted_once`); 1 if it counts on every rank."""
    if not _once.value:
        return 1
    names = jax.sharding.get_abstract_mesh().axis_names
    return degrees(tuple(axis for axis in names if axis not in roles.tokens))


def current_roles() -> Roles:
    """Returns the roles in scope; if there are none, `default_roles` of the mesh in scope."""
    return _scope.value or default_roles(jax.sharding.get_abstract_mesh().axis_names)


def default_roles(axes: Collection[str]) -> Roles:
    """Returns the default roles of mesh axes: the batch is sharded over dp and gtp, weights over gtp, and stored shards
    over dp too; tp is the tensor axis. If there is an axis cp, it divides sequences and also shards the weights. If
    there is an axis ep, it also shards the batch and the weights, and divides the experts.

    Roles without their axis go to none of the others: an absent axis is one of degree 1. Axes with other names need
    roles that name them, so if there are any, or no axes at all, the roles name all default axes.
    """
    roles = _WITH_EXPERTS if EP in axes else Roles()
    if CP in axes:
        roles = dataclasses.replace(roles, weights=(GTP, CP, *roles.weights[1:]), sequence=CP)
    if not axes or set(axes) - {*roles.tokens, *roles.weights, roles.tensor}:
        return roles
    batch, weights = (tuple(axis for axis in names if axis in axes) for names in (roles.batch, roles.weights))
    return dataclasses.replace(
        roles, batch=batch, weights=weights, tensor=roles.tensor if roles.tensor in axes else None
    )


def sequence_axis(roles: Roles, ndim: int) -> str | None:
    """Returns the axis that divides dimension 1 of an activation of `ndim` dimensions, `(batch, sequence, ...,
    features)`; `None` if there is none of more than one rank, or no sequence, as in `(batch, features)`."""
    return roles.sequence if ndim > 2 and degree(roles.sequence) > 1 else None


def refuse_parts_of_sequences(roles: Roles, what: str, remedy: str) -> None:
    """Refuses to run code that may take a part of a sequence for the whole, as a shift of tokens or positions that are
    counted from 0 do.

    Args:
        roles: the roles of the mesh axes.
        what: what is called or computed, as the subject and verb of the message.
        remedy: what to do instead.

    Raises:
        ValueError: if an axis divides sequences.
    """
    if (axis := sequence_axis(roles, 3)) is not None:
        raise ValueError(
            f"{what} in local view, on this rank's part of every sequence ({axis} = {degree(axis)}), and does not say "
            f"that its code is right for a part. {remedy}"
        )


def spec_of_tokens(roles: Roles, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the partition spec of an array with a number for each token, `(batch, sequence)`, or for each example,
    `(batch,)`: that of `spec_of_batch`, and dimension 1 sharded over the axis `sequence` if its ranks divide it."""
    spec, axis = spec_of_batch(roles, shape), sequence_axis(roles, len(shape) + 1)
    if axis is None or shape[1] % degree(axis):
        return spec
    return PartitionSpec(spec[0] if len(spec) else None, axis)


def spec_of_batch(roles: Roles, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the partition spec of an array whose dimension 0 is the batch: sharded over the batch axes if their
    number of ranks divides that dimension, otherwise replicated. A scalar is replicated."""
    return PartitionSpec(roles.batch) if shape and shape[0] % degrees(roles.batch) == 0 else PartitionSpec()
