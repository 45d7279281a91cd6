"""Moves frozen weights to the replicas, once: no step changes them."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from ..mesh import DP, axes_of
from ..train import TrainState
from ._batches import is_here
from ._layouts import LeafSpecs, plan_unfold, without_replicas
from ._meshes import ReplicaMeshes
from ._models import frozen_leaf_specs
from ._transfer import Transfer, of_devices, parts_of, settled

Tree = Any


class FrozenWeights:
    """The frozen weights of a state in each replica's own layout: values, or codes and scales bit for bit.

    They are moved on the first call with a state that holds them. The state that a step returns has the same arrays, so
    later steps move nothing. A device that stores the same part in both layouts has one array for both.

    Args:
        replicas: the replicas and their meshes.
    """

    def __init__(self, replicas: ReplicaMeshes) -> None:
        self._replicas = replicas
        self._known: list[jax.Array] | None = None  # held, so that no other array can have the identity of one of them
        self._placed: list[Tree] = []

    def __call__(self, state: TrainState) -> list[Tree]:
        """Returns the frozen weights on each replica's mesh; `None` for replicas of which this process has no device.

        Every process that has a device of a replica must call it, in the same order relative to other programs over
        these devices.
        """
        leaves, structure = jax.tree.flatten(state.frozen)
        if self._known is None or any(one is not other for one, other in zip(leaves, self._known, strict=True)):
            self._known, self._placed = leaves, []  # frees what is no longer used before making other arrays
            stored = [parts_of(x) for x in self._gathered(state)]
            for place, mesh in enumerate(self._replicas.meshes):
                found = None
                if is_here(mesh):
                    specs = self._specs(state, place)
                    moves = plan_unfold(self._replicas.plan.replicas[place], specs)
                    after = Transfer(moves, list(mesh.devices.flat), "unfold_frozen")(of_devices(stored, mesh))
                    found = [
                        jax.make_array_from_single_device_arrays(
                            leaf.replica_shape, NamedSharding(mesh, leaf.replica), list(part.values()), dtype=leaf.dtype
                        )
                        for leaf, part in zip(specs, after, strict=True)
                    ]
                    settled(found)
                self._placed.append(None if found is None else jax.tree.unflatten(structure, found))
        return self._placed

    def shapes(self, state: TrainState) -> list[Tree]:
        """Returns the shapes and shardings of the frozen weights on each replica's mesh; the state may be abstract."""
        structure = jax.tree.structure(state.frozen)
        return [
            jax.tree.unflatten(
                structure,
                [
                    jax.ShapeDtypeStruct(leaf.replica_shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.replica))
                    for leaf in self._specs(state, place)
                ],
            )
            for place, mesh in enumerate(self._replicas.meshes)
        ]

    def check(self, state: TrainState) -> None:
        """Checks that the state freezes the same weights, in the same formats, as the model of the replicas.

        Raises:
            ValueError: if it freezes other weights, or in another format.
        """
        ours = jax.tree.structure(state.frozen)
        theirs = jax.tree.structure(self._replicas.model_defs[0].frozen_specs)
        if ours != theirs:
            raise ValueError(
                "the frozen weights of the state, or the format of their codes, are not those of the model that "
                "`replicas` was made for. Pass the same `factory` to both."
            )

    def _specs(self, state: TrainState, place: int) -> list[LeafSpecs]:
        return frozen_leaf_specs(state.model_def, state.frozen, self._replicas.model_defs[place])

    def _gathered(self, state: TrainState) -> list[jax.Array]:
        """Returns the arrays on the core, gathered over replicas if these divide them, as with `gtp_jax.shard`."""
        leaves, core = jax.tree.leaves(state.frozen), self._replicas.core
        specs = jax.tree.leaves(state.model_def.frozen_specs)
        divided = [place for place, spec in enumerate(specs) if DP in axes_of(spec)]
        if divided and is_here(core):
            whole = [NamedSharding(core, without_replicas(specs[place])) for place in divided]
            with jax.set_mesh(core):
                found = jax.jit(lambda some: some, out_shardings=whole)([leaves[place] for place in divided])
            settled(found)
            for place, array in zip(divided, found, strict=True):
                leaves[place] = array
        return leaves
