"""Optimizers that keep square preconditioners beside weights of odd sizes."""

import numpy as np
import pytest

import gtp_jax as gtp

from .meshes import OPTIMIZERS, PLACES
from .runs import Run


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp", "hsdp_tp2"])
def test_preconditioned_steps_are_those_on_one_device(mesh):
    seen = []
    for name in (mesh, "one_device"):
        run = Run(PLACES[name], gtp.BF16(), OPTIMIZERS["shampoo"])
        seen.append(run.go_on(run.begin(seed=3), 2)[1])
    np.testing.assert_allclose(seen[0], seen[1], rtol=1e-3)
