"""How one weight lies on the mesh: which dimension is cut, over which axes, and how far it is padded."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ._axes import GTP, TP, degree, degrees

# Rows of a slice come in multiples of this, so that no block of a wire format straddles two slices:
# 16 serves BF16, FP8 and NVFP4, 32 serves MXFP8 (TransformerEngine #2960 pads alike).
ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class Layout:
    """The cut of a weight, as plain integers.

    A weight has a *logical* shape, which users, checkpoints and optimizers see. Where the cut does not come out
    even, its array is *physical*: every tp slice of `dim` carries zeros at its tail. With `t` = tp if `tp_dim ==
    dim` else 1, and `align` = alignment * gtp where gtp > 1 (else 1), the invariants are

        physical[dim] = t * ceil(shape[dim] / t / align) * align,    physical[i] = shape[i] elsewhere.

    Attributes:
        shape: logical shape.
        dim: the dimension that is cut over gtp (and over tp, outside gtp, if `tp_dim == dim`).
        tp_dim: the dimension that is cut over tp, or `None`.
        tp: tensor-parallel degree.
        gtp: number of slices.
        alignment: rows of a slice are a multiple of this when gtp > 1.
        axes: the mesh axes that the slices lie along; gtp is the product of their sizes.
    """

    shape: tuple[int, ...]
    dim: int
    tp_dim: int | None
    tp: int = 1
    gtp: int = 1
    alignment: int = ALIGNMENT
    axes: tuple[str, ...] = (GTP,)

    def __post_init__(self) -> None:
        if isinstance(self.axes, str) or not self.axes or len(set(self.axes)) < len(self.axes):
            raise ValueError(f"`axes` is {self.axes!r}; it is a tuple of different mesh axes, such as ('gtp',).")
        if self.tp_dim is not None and TP in self.axes:
            raise ValueError(
                f"`axes` {self.axes} of a weight of shape {self.shape} has {TP!r}, which cuts its dimension "
                f"{self.tp_dim} already. Leave it out, or choose `parallel=None`."
            )
        if not isinstance(self.alignment, int) or self.alignment < 1:
            raise ValueError(f"`alignment` is {self.alignment!r}; it is a whole number of at least 1.")
        if self.tp_dim is not None and self.shape[self.tp_dim] % self.tp:
            raise ValueError(
                f"dimension {self.tp_dim} of a weight of shape {self.shape} is cut over tp, but {self.tp} does not "
                f"divide {self.shape[self.tp_dim]}. Choose a tp degree that divides it."
            )

    @classmethod
    def on_mesh(
        cls,
        shape: tuple[int, ...],
        *,
        dim: int,
        tp_dim: int | None,
        alignment: int = ALIGNMENT,
        axes: tuple[str, ...] = (GTP,),
    ) -> Layout:
        """The layout for the mesh in scope; degree 1 on every axis without one."""
        return cls(shape, dim, tp_dim, degree(TP), degrees(axes), alignment, axes)

    @property
    def tp_outer(self) -> int:
        """Number of tp slices of the gtp dimension."""
        return self.tp if self.tp_dim == self.dim else 1

    @property
    def rows(self) -> int:
        """Logical size of `dim` within one tp slice."""
        return self.shape[self.dim] // self.tp_outer

    @property
    def padded_rows(self) -> int:
        """Physical size of `dim` within one tp slice."""
        step = self.alignment * self.gtp if self.gtp > 1 else 1
        return -(-self.rows // step) * step

    @property
    def physical_shape(self) -> tuple[int, ...]:
        """Shape of the array that is stored, over all ranks."""
        shape = list(self.shape)
        shape[self.dim] = self.tp_outer * self.padded_rows
        return tuple(shape)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of what one rank stores."""
        shape = list(self.shape)
        if self.tp_dim is not None:
            shape[self.tp_dim] //= self.tp
        shape[self.dim] = self.padded_rows // self.gtp
        return tuple(shape)

    @property
    def spec(self) -> PartitionSpec:
        """Partition of the physical array."""
        entries: list[str | tuple[str, ...] | None] = [None] * len(self.shape)
        if self.tp_dim is not None:
            entries[self.tp_dim] = TP
        axes = (TP, *self.axes) if self.tp_dim == self.dim else self.axes
        entries[self.dim] = axes[0] if len(axes) == 1 else axes
        return PartitionSpec(*entries)

    @property
    def matrices(self) -> int:
        """How many matrices one rank stores: its experts; 1 of a weight that is a matrix itself."""
        return math.prod(self.slice_shape[:-2])

    @property
    def matrix(self) -> Layout:
        """The layout of one of the matrices."""
        lead = len(self.shape) - 2
        tp_dim = None if self.tp_dim is None or self.divided else self.tp_dim - lead
        return dataclasses.replace(self, shape=self.shape[lead:], dim=self.dim - lead, tp_dim=tp_dim)

    @property
    def divided(self) -> bool:
        """Whether tp divides the matrices among its ranks, instead of cutting each."""
        return self.tp_dim is not None and self.tp_dim < len(self.shape) - 2

    @property
    def padded(self) -> bool:
        """Whether physical and logical shape differ."""
        return self.physical_shape != self.shape

    def physical(self, logical: jax.Array) -> jax.Array:
        """Logical to physical array; leading dimensions (a stack of layers) are carried along."""
        if not self.padded:
            return logical
        dim = logical.ndim - len(self.shape) + self.dim
        split = jnp.reshape(logical, (*logical.shape[:dim], self.tp_outer, self.rows, *logical.shape[dim + 1 :]))
        widths = [(0, 0)] * split.ndim
        widths[dim + 1] = (0, self.padded_rows - self.rows)
        padded = jnp.pad(split, widths)
        return jnp.reshape(padded, (*logical.shape[:dim], -1, *logical.shape[dim + 1 :]))

    def logical(self, physical: jax.Array) -> jax.Array:
        """Physical to logical array; the exact inverse of `physical`."""
        if not self.padded:
            return physical
        dim = physical.ndim - len(self.shape) + self.dim
        shape = (*physical.shape[:dim], self.tp_outer, self.padded_rows, *physical.shape[dim + 1 :])
        kept = jax.lax.slice_in_dim(jnp.reshape(physical, shape), 0, self.rows, axis=dim + 1)
        return jnp.reshape(kept, (*physical.shape[:dim], -1, *physical.shape[dim + 1 :]))


def stacked_spec(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """`spec` for an array that carries leading dimensions (a stack of layers), which are never cut."""
    return PartitionSpec(*(None,) * (ndim - len(spec)), *spec)


def cut_axes(spec: PartitionSpec) -> frozenset[str]:
    """The mesh axes that a partition uses."""
    return frozenset(a for e in spec if e is not None for a in ((e,) if isinstance(e, str) else e))
