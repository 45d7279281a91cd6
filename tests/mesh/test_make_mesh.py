"""Meshes: degrees, and their errors."""

import jax
import pytest

import gtp_jax as gtp
from gtp_jax.mesh import degrees


def test_mesh_degrees_must_multiply_to_the_devices():
    with pytest.raises(ValueError, match=r"dp 1 x gtp 3 x tp 2 = 6, but there are 8 devices. Choose degrees whose"):
        gtp.make_mesh(gtp=3, tp=2)
    with pytest.raises(ValueError, match=r"dp 2 x gtp 8 x tp 1 = 16, but there are 8 devices"):
        gtp.make_mesh(dp=2, gtp=8)
    with pytest.raises(ValueError, match=r"dp 1 x gtp 4 x tp 1 = 4, but there are 2 devices"):
        gtp.make_mesh(gtp=4, devices=jax.devices()[:2])


@pytest.mark.parametrize("axis", ["dp", "gtp", "tp"])
def test_degree_zero_is_refused_by_name(axis):
    with pytest.raises(ValueError, match=rf"`{axis}` is 0; a degree is a whole number of at least 1"):
        gtp.make_mesh(**{axis: 0})


def test_mesh_takes_what_is_left_for_dp_and_keeps_the_order_of_devices():
    mesh = gtp.make_mesh(gtp=2, tp=2)
    assert dict(mesh.shape) == {"dp": 2, "gtp": 2, "tp": 2}
    given = jax.devices()[::-1]
    assert list(gtp.make_mesh(gtp=2, tp=2, devices=given).devices.flat) == given
    with jax.set_mesh(mesh):
        assert degrees(("dp", "gtp")) == 4
