"""How tensor ranks divide a dimension: every element has one owner, and padding never comes back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax.collectives import join_split
from gtp_jax.layout import Split


def on_ranks(ranks: int, function, *args):
    """What each rank returns, stacked."""
    mesh = gtp.make_mesh(tp=ranks, devices=jax.devices()[:ranks])
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            lambda *a: function(*a)[None], in_specs=tuple(P() for _ in args), out_specs=P("tp"), check_vma=False
        )
        return np.asarray(jax.jit(mapped)(*args))


OWNERS = {
    "blocks": (3, 3, 1),
    "an empty rank": (2, 2, 1, 0),
    "shorter in the middle": (4, 1, 4),
    "empty in the middle": (2, 0, 3),
    "equal": (2, 2),
    "one rank": (5,),
}


@pytest.mark.parametrize(("owners", "unit"), pairwise(OWNERS.values(), [1, 4], usual=4))
def test_each_rank_takes_its_own_units_followed_by_zeros(owners, unit):
    split = Split(sum(owners) * unit, unit, owners, "tp")
    whole = np.random.default_rng(0).uniform(1, 2, (3, split.size)).astype(np.float32)  # never zero
    parts = on_ranks(len(owners), lambda x: split.take(x, 1), jnp.asarray(whole))
    for rank, (start, count) in enumerate(zip(split.starts, split.counts, strict=True)):
        np.testing.assert_array_equal(parts[rank, :, :count], whole[:, start : start + count])
        assert parts.shape[2] == split.width and not parts[rank, :, count:].any()


@pytest.mark.parametrize("owners", others_full(map(list, OWNERS.values()), [[2, 2, 1, 0], [2, 0, 3]]), ids=str)
def test_what_stands_in_the_padding_is_dropped_even_if_it_is_not_finite(owners):
    split = Split(sum(owners), 1, tuple(owners), "tp")

    def place(x):
        padded = split.mask(split.take(x, 0), 0, jnp.nan)
        return split.place(padded, 0)

    whole = np.arange(1.0, split.size + 1, dtype=np.float32)
    placed = on_ranks(len(owners), place, jnp.asarray(whole))
    np.testing.assert_array_equal(placed.sum(0), whole)  # each element on one rank, zero on the others


def test_placing_is_taking_transposed():
    split = Split(8, 1, (4, 1, 3), "tp")
    x, g = np.random.default_rng(1).normal(size=(2, 8)).astype(np.float32)

    def both(x, g):
        own, transpose = jax.vjp(lambda x: split.take(x, 0), x)
        return jnp.stack([transpose(split.take(g, 0))[0], split.place(split.take(g, 0), 0)])

    found = on_ranks(3, both, jnp.asarray(x), jnp.asarray(g))
    np.testing.assert_array_equal(found[:, 0], found[:, 1])


def test_joined_parts_are_the_whole_without_padding():
    split = Split(10, 2, (2, 1, 2), "tp")
    whole = np.random.default_rng(2).normal(size=(3, 10)).astype(np.float32)
    joined = on_ranks(3, lambda x: join_split(split.mask(split.take(x, 1), 1, jnp.inf), split, 1), jnp.asarray(whole))
    for rank in range(3):
        np.testing.assert_array_equal(joined[rank], whole)


@settings(deadline=None, max_examples=200)
@given(units=st.integers(1, 300), unit=st.integers(1, 9), ranks=st.integers(1, 8))
def test_blocks_give_every_unit_one_owner_and_no_rank_more_than_its_share_rounded_up(units, unit, ranks):
    with jax.set_mesh(gtp.make_mesh(tp=ranks, devices=jax.devices()[:ranks])):
        split = Split.in_blocks(units * unit, unit, "tp")
    assert sum(split.counts) == split.size and len(split.owners) == ranks
    assert split.width == -(-units // ranks) * unit
    assert split.even == (units % ranks == 0)
    # a rank's first element follows from the width, which losses over a sharded vocabulary rely on
    assert all(start == min(rank * split.width, split.size) for rank, start in enumerate(split.starts))


def test_owners_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match=naming("`owners` (2, 2) 3 10")):
        Split(10, 3, (2, 2), "tp")
