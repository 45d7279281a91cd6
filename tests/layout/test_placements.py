"""A placement, the layout of its matrix and the sharding of JAX say the same; padding is cut as it is added."""

import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gtp_jax as gtp
from gtp_jax.formats import MXFP8, NVFP4
from gtp_jax.layout import (
    Padding,
    Placement,
    cut,
    cut_shape,
    is_padded,
    layout_of_array,
    layouts_in_blocks,
    layouts_of_codes,
    layouts_of_kernels,
    pad,
    padded_shape,
    place,
    seen_as_matrix,
    shards_of,
)
from gtp_jax.mesh import current_roles

from .test_shares import abstract_mesh

MESHES = [dict(gtp=7), dict(gtp=4, dp=2), dict(gtp=3, tp=2), dict(gtp=2, dp=2, tp=2), dict(gtp=64)]
SHAPES = [
    (50,),
    (16, 32),
    (26, 34),
    (33, 66),
    (8, 5, 3),
    (5, 26, 26),
    (26, 2, 14),
    (2, 14, 26),
    (448, 64),
    (4, 10, 5, 16),
]


def _placements(**degrees):
    """Placements of weights that tp divides along no dimension, or along one."""
    tp = degrees.get("tp", 1)
    for shape, dim, can_pad in itertools.product(SHAPES, (None, 0, 1, 2), (True, False)):
        if dim is None or (tp > 1 and dim < len(shape) and shape[dim] % tp == 0):
            used = P() if dim is None else P(*[None] * dim, "tp")
            found = place(shape, current_roles(), used, can_pad=can_pad)
            assert found is not None
            yield found, can_pad


def _shard_shape(shape, spec):
    return NamedSharding(jax.sharding.get_abstract_mesh(), spec).shard_shape(shape)


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_shards_are_equal_and_padded_where_no_dimension_is_divided(degrees):
    with abstract_mesh(**degrees), gtp.layout.even_shares():
        padded = 0
        for placement, can_pad in _placements(**degrees):
            shard = _shard_shape(placement.array_shape, placement.spec)
            assert shard == tuple(s // placement.parts(d) for d, s in enumerate(placement.array_shape))
            assert shards_of(placement) * math.prod(shard) == math.prod(placement.array_shape)
            used = [placement.used_axes(dim) for dim in range(placement.ndim)]
            ranks = math.prod(size for axis, size in degrees.items() if axis != "tp" or ("tp",) in used)
            if can_pad and () in used:  # a dimension may be padded
                assert shards_of(placement) == ranks, placement
            assert can_pad or not is_padded(placement)
            padded += is_padded(placement)
            assert placement.without_padding(placement.with_padding(placement.shape)) == placement.shape
        assert padded


@pytest.mark.parametrize("degrees", MESHES, ids=str)
def test_the_matrix_of_a_placement_is_stored_as_the_array_is(degrees):
    with abstract_mesh(**degrees), gtp.layout.even_shares():
        matrices = 0
        for placement, _ in _placements(**degrees):
            seen = seen_as_matrix(placement.shape, placement)
            if isinstance(seen, str):
                assert len(placement.shape) < 2 or any(placement.axes(d) for d in range(1, len(placement.shape)))
                continue
            matrices += 1
            layout = seen.layout
            assert layout.degrees == dict(placement.degrees)
            for shape, wanted in (
                (placement.array_shape, layout.array_shape),
                (_shard_shape(placement.array_shape, placement.spec), layout.stored_shape),
                (_shard_shape(placement.shape, placement.used), _shard_shape(layout.shape, seen.used)),
            ):
                assert jax.eval_shape(seen.to_matrix, jax.ShapeDtypeStruct(shape, np.float32)).shape == wanted
        assert matrices


def test_a_slice_is_stored_as_the_whole_is_without_its_first_dimension():
    with abstract_mesh(gtp=7), gtp.layout.even_shares():
        found = [one for one, _ in _placements(gtp=7) if one.ndim > 1]
        for one in found:
            slice_of = one.without_whole_first
            if one.axes(0):
                assert slice_of is one
                continue
            assert one.array_shape == (one.shape[0], *slice_of.array_shape)
            assert (slice_of.shape, tuple(slice_of.spec)) == (one.shape[1:], tuple(one.spec)[1:])
            assert is_padded(slice_of) == is_padded(one)
        assert {bool(one.axes(0)) for one in found if is_padded(one)} == {True, False}


def _padded_layouts():
    yield Placement(P(None, "gtp"), P(), (("gtp", 7),), (3, 26), Padding(1, 2))
    yield layout_of_array((4, 10, 5), tensor_dim=0)
    yield from layouts_of_kernels([(50, 100), (50, 40)], rows=1)


def test_padding_is_cut_as_it_is_added_from_arrays_and_shapes():
    rng = np.random.default_rng(0)
    with abstract_mesh(gtp=7), gtp.layout.even_shares():
        for layout, ahead in itertools.product(_padded_layouts(), [(), (2,)]):
            assert is_padded(layout)
            array = rng.normal(size=(*ahead, *layout.shape))
            stored = pad(array, layout)
            assert stored.shape == (*ahead, *layout.array_shape) and np.count_nonzero(stored) == array.size
            np.testing.assert_array_equal(cut(stored, layout), array)
            for shape in (array.shape, stored.shape):
                assert padded_shape(shape, layout) == stored.shape and cut_shape(shape, layout) == array.shape
            sharding = NamedSharding(jax.sharding.get_abstract_mesh(), P())
            for convert, before, after in ((pad, array, stored), (cut, stored, array)):
                found = convert(jax.ShapeDtypeStruct(before.shape, before.dtype, sharding=sharding), layout)
                assert found == jax.ShapeDtypeStruct(after.shape, after.dtype) and found.sharding is None


@pytest.mark.parametrize("form", [MXFP8, NVFP4], ids=lambda form: form.name)
def test_codes_are_stored_in_equal_shards_of_whole_blocks_and_used_without_padding(form):
    padded = 0
    for degrees, rows in itertools.product([dict(gtp=7), dict(gtp=3, tp=2), dict(gtp=3, dp=2)], (0, 1)):
        with abstract_mesh(**degrees), gtp.layout.even_shares():
            (layout,) = layouts_in_blocks(layouts_of_kernels([(192, 128)], rows=rows, split_dim=1 - rows), form)
            found = layouts_of_codes(layout, form)
            assert set(found) == {"codes", "scales"}
            assert {is_padded(one) for one in found.values()} == {is_padded(layout)}
            padded += is_padded(layout)
            for placement in found.values():
                shard = _shard_shape(placement.array_shape, placement.spec)
                assert math.prod(shard) * shards_of(placement) == math.prod(placement.array_shape)
                over = {axis for dim in range(2) for axis in placement.gathered_axes(dim)}
                assert over == set(layout.axes) and {axis for dim in range(2) for axis in placement.used_axes(dim)} == {
                    "tp"
                }
                cut_part = _shard_shape(placement.shape, placement.used)
                assert math.prod(cut_part) * degrees.get("tp", 1) == math.prod(placement.shape)
    assert padded >= 2
