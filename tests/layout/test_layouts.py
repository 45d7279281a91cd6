"""Layouts: storage is even, a gather gives each rank what the weight says, a scatter is its transpose."""

import warnings

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import every

import gtp_jax as gtp
from gtp_jax.layout import BLOCK, Division, Layout, layouts_of_kernels
from gtp_jax.layout._storage import Padding
from gtp_jax.mesh import axes_of
from gtp_jax.weights._fused import as_shards, gather_weight, reduce_gradient

COLUMN, ROW, WHOLE = 1, 0, None  # which dimension of (in, out) tp divides


def mesh_of(gtp_degree: int, tp: int):
    return gtp.make_mesh(gtp=gtp_degree, tp=tp, devices=jax.devices()[: gtp_degree * tp])


def quietly(*args, **kwargs):
    with warnings.catch_warnings(), gtp.layout.even_shares():
        warnings.simplefilter("ignore")
        return layouts_of_kernels(*args, **kwargs)


CASES = {
    # name: (degrees, shapes of the kernels, dimension of tp, units, what shards storage)
    "whole blocks": ((4, 2), [(64, 512), (64, 256)], COLUMN, None, P(None, ("tp", "gtp"))),
    "half a block": ((4, 2), [(64, 256), (64, 128)], COLUMN, None, P(None, ("tp", "gtp"))),
    "fewer rows than a block": ((4, 2), [(64, 64), (64, 16)], COLUMN, None, P(None, ("tp", "gtp"))),
    "columns in whole blocks": ((4, 2), [(128, 50)], COLUMN, None, P("gtp", "tp")),
    "row": ((4, 2), [(100, 128)], ROW, None, P("tp", "gtp")),
    "row, sharded twice": ((4, 2), [(128, 50)], ROW, None, P(("tp", "gtp"), None)),
    "whole on tp": ((4, 2), [(64, 128)], WHOLE, None, P(None, "gtp")),
    "a vocabulary of 97": ((4, 2), [(64, 97)], COLUMN, None, P(("tp", "gtp"), None)),
    "heads that tp does not divide": ((4, 2), [(64, 96), (64, 48)], COLUMN, [32, 16], P(None, ("tp", "gtp"))),
    "100 features over three": ((2, 3), [(24, 100), (24, 100)], COLUMN, None, P(("tp", "gtp"), None)),
    "100 features into a row": ((2, 3), [(100, 24)], ROW, None, P(None, ("tp", "gtp"))),
    "an uneven tp, padded": ((2, 3), [(50, 100)], COLUMN, None, P(None, ("tp", "gtp"))),
    "an uneven tp, padded columns": ((2, 3), [(100, 50)], COLUMN, None, P(("tp", "gtp"), None)),
    "two kernels of an uneven tp, padded": ((2, 3), [(50, 100), (50, 40)], COLUMN, None, P(None, ("tp", "gtp"))),
    "nothing divides": ((7, 1), [(25, 100)], COLUMN, None, P(None, ("tp", "gtp"))),
    "rows padded to whole blocks": ((3, 1), [(50, 1000)], WHOLE, None, P(None, "gtp")),
    "padded columns": ((3, 2), [(50, 100)], COLUMN, None, P("gtp", "tp")),
    "padded rows next to tp": ((3, 2), [(100, 50)], ROW, None, P("tp", "gtp")),
    "three padded kernels": ((3, 1), [(50, 20), (50, 10), (50, 4)], WHOLE, None, P("gtp", None)),
    "three kernels, padded rows": ((7, 1), [(18, 20), (18, 13), (18, 6)], WHOLE, None, P(None, "gtp")),
    "fewer rows than ranks": ((7, 1), [(3, 5)], WHOLE, None, P(None, "gtp")),
    "seven": ((1, 7), [(24, 100)], COLUMN, None, P(None, ("tp", "gtp"))),
    "more ranks than units": ((2, 4), [(64, 3)], COLUMN, None, P(("tp", "gtp"), None)),
}


@pytest.mark.parametrize("name", every(3, CASES))
def test_gathered_weights_and_scattered_gradients_are_those_of_numpy(name, x64):
    (gtp_degree, tp), shapes, split_dim, units, spec = CASES[name]
    rng = np.random.default_rng(len(name))
    kernels = [rng.normal(size=shape) for shape in shapes]
    mesh = mesh_of(gtp_degree, tp)
    with jax.set_mesh(mesh):
        layouts = quietly(shapes, rows=1, split_dim=split_dim, units=units)
        assert {layout.spec for layout in layouts} == {spec}
        stored = [
            jax.device_put(_padded(w, layout), NamedSharding(mesh, spec))
            for w, layout in zip(kernels, layouts, strict=True)
        ]
        assert all(
            a.addressable_shards[0].data.shape == layout.shard_shape for a, layout in zip(stored, layouts, strict=True)
        )
        width = sum(layout.use_shape[1] for layout in layouts), layouts[0].use_shape[0]
        gradients = rng.normal(size=(gtp_degree, tp, *width))

        def local(shards, gradient):
            weight = gather_weight(tuple(shards), layouts, "float64")
            part = reduce_gradient(gradient[0, 0], layouts, "float64")
            back = as_shards(part, layouts, ["float64"] * len(layouts))
            missing = [
                axis for axis in ("gtp", "tp") if axis not in axes_of(spec)
            ]  # summed over replicas, as a step does
            return weight[None, None], [jax.lax.psum(g, missing) if missing else g for g in back]

        into = ([layout.spec for layout in layouts], P("gtp", "tp"))
        mapped = jax.shard_map(local, in_specs=into, out_specs=(P("gtp", "tp"), into[0]), check_vma=False)
        fused, back = jax.jit(mapped)(stored, gradients)
        fused, back = np.asarray(fused), [np.asarray(g) for g in back]
    expected = [np.zeros_like(w) for w in kernels]
    for g in range(gtp_degree):
        for t in range(tp):
            rows = _rows_of(layouts, kernels, t)
            order = _order(layouts)
            np.testing.assert_array_equal(fused[g, t][order], np.concatenate([w for w, _ in rows]))
            put = np.split(gradients[g, t][order], np.cumsum([len(w) for w, _ in rows])[:-1])
            for total, (_, index), piece in zip(expected, rows, put, strict=True):
                out, into_ = index
                piece = piece[: len(out), : len(into_)]
                total[np.ix_(into_, out)] += piece.T
    for a, b, layout in zip(back, expected, layouts, strict=True):
        np.testing.assert_allclose(a, _padded(b, layout), rtol=0, atol=1e-12)


def _padded(array, layout):
    return np.pad(array, [(0, more - size) for more, size in zip(layout.array_shape, array.shape, strict=True)])


def _rows_of(layouts, kernels, rank):
    """Each kernel's rows on a tensor rank, padded with zeros; and the logical indices of outputs and inputs in them."""
    found = []
    for layout, w in zip(layouts, kernels, strict=True):
        index = [np.arange(w.shape[1]), np.arange(w.shape[0])]  # outputs, inputs
        if layout.split is not None:
            start, count = layout.split.starts[rank], layout.split.counts[rank]
            index[0 if layout.split_dim == 1 else 1] = np.arange(start, start + count)
        padded = np.zeros((layout.use_shape[1], layout.use_shape[0]))
        part = w[np.ix_(index[1], index[0])].T
        padded[: part.shape[0], : part.shape[1]] = part
        found.append((padded, index))
    return found


def _order(layouts):
    """Rows of the fused weight in the order kernel after kernel."""
    first = layouts[0]
    aligned = all(layout.shard_shape[1] % BLOCK == 0 for layout in layouts)
    sizes = [layout.use_shape[1] for layout in layouts]
    if first.takes_part or not first.by_rows or len(layouts) == 1 or not aligned:
        return np.arange(sum(sizes))
    by_rank = np.arange(sum(sizes)).reshape(first.ranks, -1)
    return np.concatenate([p.ravel() for p in np.split(by_rank, np.cumsum([s // first.ranks for s in sizes])[:-1], 1)])


@settings(deadline=None, max_examples=300)
@given(
    sizes=st.lists(st.integers(1, 400), min_size=1, max_size=3),
    into=st.integers(1, 400),
    degrees=st.sampled_from([(1, 1), (8, 1), (4, 2), (2, 3), (1, 5), (7, 1), (2, 4)]),
    split_dim=st.sampled_from([0, 1, None]),
)
def test_storage_is_even_whatever_the_sizes(sizes, into, degrees, split_dim):
    with jax.set_mesh(mesh_of(*degrees)):
        layouts = quietly([(into, size) for size in sizes], rows=1, split_dim=split_dim)
        for layout, size in zip(layouts, sizes, strict=True):
            for dim, entry in enumerate(layout.spec):
                ways = np.prod([{"gtp": degrees[0], "tp": degrees[1]}[a] for a in np.ravel(entry or [])])
                assert layout.shard_shape[dim] * ways == layout.array_shape[dim]
                assert layout.shape[dim] == (into, size)[dim]
        gathered = {(layout.axes, layout.by_rows, layout.takes_part) for layout in layouts}
        assert len(gathered) == 1, "kernels of one gather travel alike"
        split_evenly = split_dim is None or all(layout.tensor.dim is not None for layout in layouts)
        if split_evenly and max(into, min(sizes)) > 1 and (degrees[1] == 1 or split_dim is None):
            assert layouts[0].ranks >= degrees[0], "a dimension can be divided or padded, so nothing stays whole"


PADDED = {
    # (gtp, tp), the shape, dimension of tp, the stored shape, and what shards it
    "along the dimension that costs less": ((7, 1), (25, 100), WHOLE, (25, 105), P(None, "gtp")),
    "112 rows to a block on every rank": ((7, 1), (4096, 4096), WHOLE, (4096, 4144), P(None, "gtp")),
    "where blocks of 1024 rows would add 9 %": ((7, 1), (4096, 1024), WHOLE, (4102, 1024), P("gtp", None)),
    "224 columns": ((7, 1), (9001, 1024), WHOLE, (9184, 1024), P("gtp", None)),
    "over tp and gtp together": ((2, 3), (50, 100), COLUMN, (50, 102), P(None, ("tp", "gtp"))),
}


@pytest.mark.parametrize("name", PADDED)
def test_a_weight_that_nothing_divides_is_padded_where_that_costs_least(name):
    degrees, shape, split_dim, stored, spec = PADDED[name]
    with jax.set_mesh(mesh_of(*degrees)), gtp.layout.even_shares():
        (layout,) = layouts_of_kernels([shape], rows=1, split_dim=split_dim)
    assert (layout.shape, layout.array_shape, layout.spec) == (shape, stored, spec)


@pytest.mark.parametrize(
    ("degrees", "shape", "pad", "message"),
    [
        ((7, 1), (25, 100), False, "(25, 100) whole gtp 7 gtp_jax.layout.even_shares(False)"),
        ((3, 2), (1, 1), True, "(1, 1) whole gtp 3 sizes"),
    ],
)
def test_a_weight_that_stays_whole_is_told_with_the_remedy(degrees, shape, pad, message):
    with jax.set_mesh(mesh_of(*degrees)), gtp.layout.even_shares(pad), pytest.warns(UserWarning, match=naming(message)):
        (layout,) = layouts_of_kernels([shape], rows=1)
    assert layout.spec == P(None, None) and layout.ranks == 1 and layout.array_shape == shape


OVER_DP = {
    # what is padded: (gtp, tp, dp), the shape, dimension of tp, the stored shape, and the shape of a shard
    "rows next to columns of gtp, to blocks": ((2, 1, 3), (64, 1616), WHOLE, (64, 1632), (32, 1616)),
    "columns next to rows of gtp, to blocks": ((2, 1, 3), (3200, 64), WHOLE, (3264, 64), (3200, 32)),
    "columns next to rows of gtp, by one": ((2, 1, 3), (1000, 64), WHOLE, (1002, 64), (1000, 32)),
    "rows of gtp, where others add more": ((2, 1, 3), (16, 160), WHOLE, (16, 162), (16, 81)),
    "columns of gtp next to rows of tp": ((2, 2, 2), (50, 50), COLUMN, (52, 50), (26, 25)),
    "padded rows of gtp": ((3, 1, 2), (49, 49), WHOLE, (49, 54), (49, 18)),
    "rows of dp alone": ((1, 1, 3), (50, 50), WHOLE, (50, 51), (50, 50)),
}


@pytest.mark.parametrize("name", OVER_DP)
def test_storage_is_padded_so_that_dp_divides_it_and_shards_stay_as_they_are_where_that_costs_little(name):
    (gtp_degree, tp, dp), shape, split_dim, stored, shard = OVER_DP[name]
    devices = jax.devices()[: gtp_degree * tp * dp]
    with jax.set_mesh(gtp.make_mesh(gtp=gtp_degree, tp=tp, dp=dp, devices=devices)), gtp.layout.even_shares():
        (layout,) = layouts_of_kernels([shape], rows=1, split_dim=split_dim)
    assert (layout.array_shape, layout.shard_shape, layout.copies) == (stored, shard, dp)
    assert np.prod(layout.stored_shape) * gtp_degree * tp * dp == np.prod(stored)
    assert layout.of_shards.copies == 1 and layout.of_shards.shard_shape == shard


def test_uneven_storage_is_refused():
    storage = {"tensor": Division(0, ("tp",), (2,)), "gather": Division(0, ("gtp",), (3,))}
    with pytest.raises(ValueError, match=naming("0 (10, 8) padded")):
        Layout((10, 8), **storage, padding=Padding(0, 2), rows=1)
    with jax.set_mesh(mesh_of(1, 3)):
        split = layouts_of_kernels([(8, 10)], rows=1, split_dim=1)[0].split
    with pytest.raises(ValueError, match=naming("1 (8, 10) `tensor`")):
        Layout((8, 10), tensor=Division(1, ("tp",), (3,)), rows=1, split_dim=1, split=split)
    with pytest.raises(ValueError, match=naming("1 (8, 10) 3")):
        Layout((8, 10), gather=Division(1, ("gtp",), (3,)), rows=1)
