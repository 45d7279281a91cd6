"""Meshes, orders of axes and optimizers between which checkpoints move."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import NamedSharding, PartitionSpec

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig
from gtp_jax.nn import abstract_model

# No mesh of more than 3 divides the vocabulary, and three ranks of tp divide neither heads nor width; width 128 is what
# Adafactor starts to factor at.
SIZES = dict(vocab_size=1002, hidden_size=128, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=32)
SIZES |= dict(intermediate_size=120)


@dataclasses.dataclass(frozen=True)
class Place:
    """A mesh and how weights lie on it.

    Attributes:
        degrees: of the axes, for `make_mesh`.
        gtp_major: shard dimensions over gtp first and tp inside it, as strided shards do; no model of ours trains so.
    """

    degrees: dict[str, int]
    gtp_major: bool = False

    def mesh(self) -> jax.sharding.Mesh:
        """The mesh, of the first devices."""
        count = 1
        for degree in self.degrees.values():
            count *= degree
        return gtp.make_mesh(**self.degrees, devices=jax.devices()[:count])

    def state(
        self, optimizer: optax.GradientTransformation, recipe: gtp.recipes.Recipe | None = None, **sizes: Any
    ) -> gtp.TrainState:
        """Shapes and shardings of a small Llama's state; nothing is computed."""
        config = LlamaConfig(**{**SIZES, "dtype": "float32", **sizes})
        state = _state(self.mesh(), config, optimizer, recipe)
        return jax.tree.map(_gtp_major, state) if self.gtp_major else state


@functools.lru_cache(64)  # of every place and optimizer here: tests ask for each of them many times
def _state(
    mesh: jax.sharding.Mesh,
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    recipe: gtp.recipes.Recipe | None,
) -> gtp.TrainState:
    with jax.set_mesh(mesh), gtp.layout.even_shares(False):
        return gtp.TrainState.create(abstract_model(lambda rngs: Llama(config, rngs=rngs)), optimizer, recipe=recipe)


def _gtp_major(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    spec = [tuple(reversed(entry)) if isinstance(entry, tuple) else entry for entry in leaf.sharding.spec]
    sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


PLACES = {
    "fsdp": Place({"gtp": 8}),
    "hsdp": Place({"dp": 2, "gtp": 4}),
    "gtp4_tp2": Place({"gtp": 4, "tp": 2}),
    "gtp4_tp2_strided": Place({"gtp": 4, "tp": 2}, gtp_major=True),
    "tp3": Place({"gtp": 2, "tp": 3}),
    "hsdp_tp2": Place({"dp": 2, "gtp": 2, "tp": 2}),
    "gtp2_cp4": Place({"gtp": 2, "cp": 4}),
    "three_devices": Place({"gtp": 3}),
    "one_device": Place({"gtp": 1}),
}


def muon() -> optax.GradientTransformation:
    """Muon for all matrices, those in stacks too; AdamW for the rest."""

    def matrices(params: Any) -> Any:
        def dims(path: Any, leaf: Any) -> Any:
            return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1) if path[-1].key != "scale" else None

        return jax.tree_util.tree_map_with_path(dims, params)

    return optax.contrib.muon(1e-3, muon_weight_dimension_numbers=matrices)


def shampoo(limit: int = 256) -> optax.GradientTransformation:
    """As Shampoo (Gupta et al., 2018), with inverses for roots: sums of G G^T and of G^T G beside every matrix, but a
    scalar for a dimension above the limit."""

    def zeros(leaf: Any, dim: int) -> Any:
        size = leaf.shape[dim] if leaf.ndim > 1 else limit + 1
        return jnp.zeros((*leaf.shape[:-2], size, size) if size <= limit else ())

    def init(params: Any) -> dict[str, Any]:
        return {side: jax.tree.map(lambda p, d=d: zeros(p, d), params) for side, d in (("left", -2), ("right", -1))}

    def inverse(matrix: Any) -> Any:
        return jnp.linalg.inv(matrix + jnp.eye(matrix.shape[-1]))

    def divided(g: Any, a: Any, b: Any) -> Any:
        g = inverse(a) @ g if a.ndim else g
        return -1e-2 * (g @ inverse(b) if b.ndim else g)

    def update(updates: Any, state: dict[str, Any], params: Any = None) -> tuple[Any, dict[str, Any]]:
        del params
        left = jax.tree.map(lambda g, a: a + g @ g.mT if a.ndim else a, updates, state["left"])
        right = jax.tree.map(lambda g, b: b + g.mT @ g if b.ndim else b, updates, state["right"])
        return jax.tree.map(divided, updates, left, right), {"left": left, "right": right}

    return optax.GradientTransformation(init, update)


OPTIMIZERS = {"adamw": optax.adamw(1e-3), "adafactor": optax.adafactor(1e-3), "muon": muon(), "shampoo": shampoo()}
