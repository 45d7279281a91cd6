"""One replica's part of a step: moves weights from the core, sums gradients, and moves those back to the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..mesh import TP
from ..nn import ModelDef
from ..train import Jitted, Request, TrainState, gradients, in_dtypes_of
from ._faults import Replica
from ._gradient_codes import encoded, sent_back
from ._layouts import LeafSpecs, plan_fold, plan_unfold
from ._models import leaf_specs, with_whole_sequences
from ._replica_dtypes import ReplicaDtypes
from ._transfer import Parts, Transfer, parts_of, settled

Tree = Any
Sums = tuple[jax.Array, jax.Array]


class ReplicaStep:
    """Moves weights from the core to a replica, computes gradients of its rows, and moves those back to the core.

    Args:
        request: what the step computes.
        replica: the replica of the plan.
        mesh: the mesh of the replica's devices.
        model_def: the definition of the model on that mesh.
        state: the state on the core: arrays, or their shapes and dtypes.
        wires: the dtypes in which weights and gradients travel.
        options: a function that returns the XLA options for the mesh in scope.
        donates: whether the weights may be overwritten, because the core stores its own.
    """

    def __init__(
        self,
        request: Request,
        replica: Replica,
        mesh: Mesh,
        model_def: ModelDef,
        state: TrainState,
        wires: ReplicaDtypes,
        *,
        options: Callable[[], dict[str, Any]],
        donates: bool,
    ) -> None:
        self._request, self._mesh, self._model_def = request._replace(rounded=wires.rounded), mesh, model_def
        leaves, self._structure = jax.tree.flatten(state.params)
        core = state.model_def
        params = leaf_specs(core, state.params, model_def, wires.weights)
        gradients = leaf_specs(core, state.params, model_def, wires.gradients)
        number = LeafSpecs((), np.dtype(state.step.dtype), PartitionSpec(), PartitionSpec(), (), ())
        devices = list(mesh.devices.flat)
        self.unfold = Transfer(plan_unfold(replica, [*params, number]), devices, "unfold")
        self.fold = Transfer(plan_fold(replica, sent_back(gradients, wires.coded)), devices, "fold")
        # the number of updates made travels with the weights
        self._shapes = [jax.ShapeDtypeStruct(leaf.replica_shape, leaf.dtype) for leaf in (*params, number)]
        self._stored = [np.dtype(x.dtype) for x in leaves]
        self._sent_back, self._coded = wires.gradients, wires.coded
        self._shardings = [NamedSharding(mesh, leaf.replica) for leaf in (*params, number)]
        self._sums: Sums | None = None
        self._program: Any = Jitted(self._sum_gradients, options, donate_argnums=(0,) if donates else ())

    def __call__(self, stored: Parts, frozen: Tree, batch: Tree) -> tuple[Parts, Sums]:
        """Returns the parts of the summed gradients that this process's core devices store, or of their codes and
        scales, and the sums of loss and tokens, each of shape `(1,)` and replicated on all devices of the replica.

        Args:
            stored: the parts that this process's core devices store of each parameter and, last, of the number of
                updates made. Emptied to free its memory.
            frozen: the frozen weights, on this replica's mesh.
            batch: this replica's rows.
        """
        params, number = self.weights(stored)
        for part in stored:
            part.clear()
        with jax.set_mesh(self._mesh):
            found, sums = self._program(params, frozen, number, batch)
        settled(found)
        folded = self.fold([parts_of(g) for g in jax.tree.leaves(found)])
        settled([one for part in folded for one in part.values()])
        return folded, sums

    def compile(self, frozen: Tree, batch: Tree) -> tuple[dict[str, jax.stages.Compiled], Sums]:
        """Compiles the programs that run on several devices. Later steps use them.

        Args:
            frozen: the frozen weights on this replica's mesh, or their shapes and shardings.
            batch: this replica's rows, or their shapes and shardings.

        Returns:
            The programs by name, and the shapes of the sums of loss and tokens.
        """
        arrays = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            for x, sharding in zip(self._shapes, self._shardings, strict=True)
        ]
        params, number = jax.tree.unflatten(self._structure, arrays[:-1]), arrays[-1]
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch)
        with jax.set_mesh(self._mesh):
            if isinstance(self._program, Jitted):
                lowered = self._program.lower(params, frozen, number, batch)
                self._program, self._sums = lowered.compile(), lowered.out_info[1]
        found = {"gradients": self._program}
        for name, transfer in (("unfold", self.unfold), ("fold", self.fold)):
            if transfer.moves.rounds:
                found[name] = transfer.compile()
        assert self._sums is not None
        return found, self._sums

    def weights(self, stored: Parts) -> tuple[Tree, jax.Array]:
        """Returns the parameters, in the dtypes in which they travel, and the number of updates made, both on this
        replica's mesh; see `__call__`."""
        arrays = [
            jax.make_array_from_single_device_arrays(x.shape, sharding, list(part.values()), dtype=x.dtype)
            for x, sharding, part in zip(self._shapes, self._shardings, self.unfold(stored), strict=True)
        ]
        settled(arrays)
        return jax.tree.unflatten(self._structure, arrays[:-1]), arrays[-1]

    def _sum_gradients(self, params: Tree, frozen: Tree, number: jax.Array, batch: Tree) -> tuple[Tree, Sums]:
        # in local view every rank of tp counts the same tokens: loss, tokens and gradients are `copies` times too large
        copies = self._mesh.shape[TP]
        lengths = {x.shape[1] for x in jax.tree.leaves(batch) if x.ndim > 1}
        model_def = self._model_def
        if any(length % copies for length in lengths):
            model_def = with_whole_sequences(model_def)
        # the cast weights are not read: a weight that was rounded before is used as it arrived, see `with_groups`
        params = self._cast(params, self._stored)
        state = TrainState(params, (), number, model_def, frozen=frozen)
        computed = gradients(self._request, state, batch)
        assert computed.tokens is not None
        found = in_dtypes_of(params, computed.gradients)
        found = self._cast(jax.tree.map(lambda g: g / copies, found), self._sent_back)
        whole = jnp.issubdtype(computed.tokens.dtype, jnp.integer)
        tokens = computed.tokens // copies if whole else computed.tokens / copies
        sums = (jnp.reshape(computed.total / copies, (1,)), jnp.reshape(tokens, (1,)))
        pairs = zip(jax.tree.leaves(found), self._shardings[:-1], strict=True)
        held: list[Any] = [lax.with_sharding_constraint(g, sharding) for g, sharding in pairs]
        for place, dim in self._coded.items():
            held[place] = encoded(held[place], self._shardings[place], dim)
        return jax.tree.unflatten(self._structure, held), sums

    def _cast(self, tree: Tree, dtypes: Sequence[np.dtype]) -> Tree:
        leaves = [x.astype(dtype) for x, dtype in zip(jax.tree.leaves(tree), dtypes, strict=True)]
        return jax.tree.unflatten(self._structure, leaves)
