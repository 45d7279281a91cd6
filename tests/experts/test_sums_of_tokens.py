"""Partial sums of tokens come back, and are added in float32 in order of rank, bit for bit."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gtp_jax as gtp
from gtp_jax.collectives import no_turn
from gtp_jax.experts import combine, dispatch, gather_choices, plan_journey

from .test_expert_ranks import ragged_as_documented

RANKS, TOKENS, FEATURES, EXPERTS, TOP_K = 4, 24, 16, 2, 4


def choices_and_partial_sums():
    """Experts of each rank's tokens, of which some use all ranks and some only one or two, and what each rank adds to
    each token: large numbers that cancel, and small ones that a float32 sum loses beside them."""
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((RANKS, TOKENS, RANKS * EXPERTS)), axis=-1)[..., :TOP_K].astype(np.int32)
    chosen[:, : TOKENS // 2] = np.arange(RANKS) * EXPERTS + rng.integers(0, EXPERTS, (RANKS, TOKENS // 2, RANKS))
    goes = (chosen[..., None] // EXPERTS == np.arange(RANKS)).any(axis=2)  # (from, tokens, to)
    assert set(goes.sum(axis=-1).ravel()) == {2, 3, 4}
    # of every two ranks some numbers cancel, whichever of the others comes first, last or in between
    pairs = np.array(list(itertools.permutations(range(RANKS), 2)))[rng.integers(0, 12, (RANKS, TOKENS, FEATURES))]
    large = rng.normal(size=(RANKS, TOKENS, FEATURES, 1)) * 2.0**22
    sums = rng.normal(size=(RANKS, TOKENS, FEATURES, RANKS))
    np.put_along_axis(sums, pairs[..., :1], large, axis=-1)
    np.put_along_axis(sums, pairs[..., 1:], -large, axis=-1)
    return chosen, goes, np.moveaxis(sums, -1, 0).astype(ml_dtypes.bfloat16)  # (by, from, tokens, features)


def added(goes, partial_sums, order, dtype: Any = np.float32):
    """The sum over ranks in an order, one after another, rounded to bfloat16 at the end."""
    parts = [np.where(goes[..., rank, None], partial_sums[rank].astype(dtype), dtype(0)) for rank in range(RANKS)]
    total = parts[order[0]]
    for rank in order[1:]:
        total = total + parts[rank]
    return total.astype(ml_dtypes.bfloat16).view(np.uint16)


def found(chosen, partial_sums, transport, call):
    """What each rank's tokens get: of `combine`, or in backward of `dispatch`."""

    def local(chosen, mine):
        chosen, mine = chosen[0], jnp.reshape(mine[0], (RANKS * TOKENS, FEATURES))
        journey = plan_journey(gather_choices(chosen, "ep"), "ep", EXPERTS, transport, min(RANKS, chosen.shape[1]))
        # rows say themselves whose they are
        number = jax.lax.axis_index("ep") * TOKENS + jnp.arange(TOKENS)
        numbers, _ = dispatch(number[:, None].astype(jnp.float32), no_turn(), journey)
        of_rows = mine[numbers[:, 0].astype(jnp.int32)]
        rows = jnp.where(journey.real[:, None], of_rows, 0)
        if call == "combine":
            return combine(rows, no_turn(), journey)[0]
        _, back = jax.vjp(lambda x: dispatch(x, no_turn(), journey)[0], jnp.zeros((TOKENS, FEATURES), rows.dtype))
        return back(rows)[0]

    with jax.set_mesh(gtp.make_mesh(ep=RANKS, devices=jax.devices()[:RANKS])):
        mapped = jax.shard_map(local, in_specs=(P("ep"), P("ep")), out_specs=P("ep"), check_vma=False)
        y = jax.jit(mapped)(jnp.asarray(chosen), jnp.asarray(partial_sums))
    assert y.dtype == jnp.bfloat16
    return np.asarray(y).reshape(RANKS, TOKENS, FEATURES).view(np.uint16)


@pytest.mark.parametrize("call", ["combine", "gradient of dispatch"])
@pytest.mark.parametrize("transport", ["gather", "padded", "ragged"])
def test_partial_sums_are_added_in_float32_in_order_of_rank(transport, call, monkeypatch):
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_as_documented)  # XLA does not support it on CPUs
    chosen, goes, partial_sums = choices_and_partial_sums()
    np.testing.assert_array_equal(
        found(chosen, partial_sums, transport, call), added(goes, partial_sums, list(range(RANKS)))
    )


def test_no_other_order_and_no_other_precision_gives_these_bits():
    """So the test above can tell. Of the first two it does not matter which comes first."""
    _, goes, partial_sums = choices_and_partial_sums()
    wanted = added(goes, partial_sums, [0, 1, 2, 3])
    for order in itertools.permutations(range(RANKS)):
        same = np.array_equal(wanted, added(goes, partial_sums, order))
        assert same is (order[2:] == (2, 3)), order
    for dtype in (ml_dtypes.bfloat16, np.float64):
        assert not np.array_equal(wanted, added(goes, partial_sums, [0, 1, 2, 3], dtype)), dtype
