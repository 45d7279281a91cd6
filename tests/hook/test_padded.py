"""Weights that the ranks of `gtp.shard` do not divide are stored padded, and are what they are without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import diagonal

import gtp_jax as gtp

from .padded import MESHES, OPTIMIZERS, Model, Stacked, make, on, same, trained


@pytest.mark.parametrize(("mesh", "name"), [(mesh, name) for mesh in MESHES for name in OPTIMIZERS])
@pytest.mark.parametrize("view", ["global", "local"])
def test_steps_of_padded_weights_are_those_of_one_device(mesh, name, view, x64):
    wanted, losses, _ = trained(name)
    found, own, padded = trained(name, tuple(MESHES[mesh].items()), view=view)
    print(padded)
    np.testing.assert_allclose(own, losses, rtol=1e-12)
    same(found, wanted)
