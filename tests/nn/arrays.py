"""Meshes and comparisons of tests of weights of any shape."""

import contextlib

import jax
import numpy as np

import gtp_jax as gtp

MESHES = {
    "gtp 8": dict(gtp=8),
    "gtp 4 x tp 2": dict(gtp=4, tp=2),
    "dp 2 x gtp 2 x tp 2": dict(dp=2, gtp=2, tp=2),
    "dp 2 x gtp 2": dict(dp=2, gtp=2),
    "gtp 3": dict(gtp=3),
    "tp 3": dict(tp=3),
}


def mesh_in_scope(name: str | None):
    """Puts a mesh in scope, of as many of the devices as it needs; none for `None`."""
    if name is None:
        return contextlib.nullcontext()
    degrees = MESHES[name]
    return jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))]))


def assert_close(found, wanted) -> None:
    """Compares float64 arrays to 1e-12 of the largest."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype == np.float64
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1.0, np.abs(b).max()))
