"""Layouts: where the padding lies, that it is zeros, and that a device holds what the layout says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import gtp_jax as gtp
from gtp_jax.mesh import Layout, degrees, stacked_spec

COLUMN, ROW, WHOLE, TABLE = (1, 1), (1, 0), (1, None), (0, 0)  # (dim, tp_dim)


def layout(size: int, cut, *, gtp: int, tp: int, alignment: int = 16, other: int = 12) -> Layout:
    dim, tp_dim = cut
    shape = (size, other) if dim == 0 else (other, size)
    return Layout(shape, dim, tp_dim, tp, gtp, alignment)


def padding(mine: Layout) -> np.ndarray:
    """Which rows of the physical array belong to no logical row, by the definition: the tail of each tp slice."""
    return np.concatenate([np.arange(mine.padded_rows) >= mine.rows] * mine.tp_outer)


@pytest.mark.parametrize("cut", [COLUMN, ROW, WHOLE, TABLE], ids=["column", "row", "whole", "table"])
@pytest.mark.parametrize("degree, tp, alignment", [(1, 2, 32), (2, 1, 16), (4, 2, 16), (8, 2, 32)])
def test_round_trip_is_exact_and_padding_is_zeros_at_the_tail_of_each_tp_slice(cut, degree, tp, alignment):
    rng = np.random.default_rng([degree, *map(bool, cut)])
    for size, lead in ((56, ()), (120, (3,)), (1000, (2, 3)), (2 * int(rng.integers(1, 400)), (2,))):
        mine = layout(size, cut, gtp=degree, tp=tp, alignment=alignment)
        logical = rng.uniform(1, 2, (*lead, *mine.shape)).astype(np.float32)  # never zero
        physical, again = jax.jit(lambda a, mine=mine: (mine.physical(a), mine.logical(mine.physical(a))))(logical)
        assert physical.shape == (*lead, *mine.physical_shape)
        np.testing.assert_array_equal(again, logical)
        rows = np.moveaxis(np.asarray(physical), len(lead) + mine.dim, -1)
        assert np.all((rows == 0) == padding(mine))
        assert degree == 1 or mine.padded_rows % (alignment * degree) == 0
        assert mine.padded_rows - mine.rows < alignment * degree  # and no more than needed


def test_padding_may_fill_whole_slices_of_several_ranks():
    mine = layout(20, WHOLE, gtp=8, tp=1)
    slices = np.split(np.asarray(mine.physical(jnp.ones(mine.shape))), 8, axis=1)
    assert [int(s[0].sum()) for s in slices] == [16, 4, 0, 0, 0, 0, 0, 0]


def test_degree_one_never_pads():
    for size in (1, 7, 56, 1000):
        for alignment in (16, 32):
            mine = layout(size, WHOLE, gtp=1, tp=4, alignment=alignment)
            assert not mine.padded and mine.physical_shape == mine.slice_shape == mine.shape


def test_upstreams_worked_example():
    """TransformerEngine #2960: tp 2 x gtp 2, MXFP8's alignment, 192 outputs."""
    mine = layout(192, COLUMN, gtp=2, tp=2, alignment=32)
    assert (mine.rows, mine.padded_rows, mine.physical_shape[1], mine.slice_shape[1]) == (96, 128, 256, 64)
    slices = np.split(np.asarray(mine.physical(jnp.arange(1, 12 * 192 + 1).reshape(12, 192))), 4, axis=1)
    real = [int((s[0] != 0).sum()) for s in slices]  # devices in order: (tp, gtp)
    assert real == [64, 32, 64, 32]


@pytest.mark.parametrize("cut", [COLUMN, ROW, WHOLE, TABLE], ids=["column", "row", "whole", "table"])
@pytest.mark.parametrize("shape", [dict(gtp=8), dict(gtp=4, tp=2), dict(dp=2, gtp=2, tp=2), dict(gtp=1, tp=8)])
def test_device_holds_the_slice_that_the_layout_says(cut, shape):
    mesh = gtp.make_mesh(**shape)
    sizes = dict(mesh.shape)
    dim, tp_dim = cut
    with jax.set_mesh(mesh):
        mine = Layout.on_mesh((1000, 56) if dim == 0 else (56, 1000), dim=dim, tp_dim=tp_dim)
    assert (mine.gtp, mine.tp) == (sizes["gtp"], sizes["tp"])
    logical = jnp.arange(2.0 * 56 * 1000).reshape(2, *mine.shape) + 1
    physical = mine.physical(logical)
    placed = jax.device_put(physical, NamedSharding(mesh, stacked_spec(mine.spec, 3)))
    assert {s.data.shape for s in placed.addressable_shards} == {(2, *mine.slice_shape)}
    by_device = {s.device: np.asarray(s.data) for s in placed.addressable_shards}
    # tp outer, gtp inner: all gtp ranks of one tp rank hold that rank's logical part, then zeros
    rank = mesh.devices[0]
    for t in range(sizes["tp"]):
        part = np.concatenate([by_device[rank[g, t]] for g in range(sizes["gtp"])], axis=1 + dim)
        wanted = np.asarray(logical)
        if tp_dim is not None:
            wanted = np.split(wanted, sizes["tp"], axis=1 + tp_dim)[t]
        real, rest = np.split(part, [mine.rows], axis=1 + dim)
        np.testing.assert_array_equal(real, wanted)
        assert not rest.any()


def test_tp_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"dimension 1 of a weight of shape \(12, 57\) is cut over tp, but 2 does not"):
        layout(57, COLUMN, gtp=2, tp=2)
    assert layout(57, WHOLE, gtp=2, tp=2).padded_rows == 64


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
