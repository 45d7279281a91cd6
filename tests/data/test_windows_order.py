"""Every window once an epoch, in an order that only the seed and the place decide."""

from __future__ import annotations

import numpy as np
import pytest

from gtp_jax.runner.data import Windows


def windows(count: int, seq: int = 4, **kwargs) -> Windows:
    return Windows(np.arange(count * seq + 1, dtype=np.uint32), seq, **kwargs)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 100, 1025])
def test_epoch_visits_every_window_exactly_once(count):
    of = windows(count, seed=3)
    for epoch in range(3):
        order = of.order(np.arange(epoch * count, (epoch + 1) * count))
        assert sorted(order.tolist()) == list(range(count))


def test_every_token_but_the_first_is_a_target_exactly_once_an_epoch():
    of = windows(23)
    targets = of.rows(np.arange(len(of)))["targets"]
    assert sorted(targets.ravel().tolist()) == list(range(1, 23 * 4 + 1))


def test_targets_are_the_tokens_one_later():
    batch = windows(50).rows(np.arange(20))
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32


def test_leftover_tokens_make_no_window():
    assert len(Windows(np.zeros(4 * 3, np.uint8), 4)) == 2
    assert len(Windows(np.zeros(4 * 3 + 1, np.uint8), 4)) == 3


def test_order_differs_between_epochs_and_seeds_and_from_the_file():
    orders = [windows(1000, seed=seed).order(np.arange(1000) + 1000 * epoch) for seed in (0, 1) for epoch in (0, 1)]
    orders.append(np.arange(1000))
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).mean() < 0.02  # a random order agrees in one place on average


def test_order_looks_random():
    order = windows(5000).order(np.arange(5000)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06  # four standard deviations
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.06


def test_rows_do_not_depend_on_how_they_are_asked_for():
    of = windows(37, seed=5)
    whole = of.rows(np.arange(100))
    parts = [of.rows(np.arange(start, start + 5)) for start in range(0, 100, 5)]
    for name in whole:
        np.testing.assert_array_equal(whole[name], np.concatenate([part[name] for part in parts]))


def test_order_is_the_same_on_every_machine_and_version():
    # A change here breaks the resumption of every run there is.
    assert windows(1000, seed=7).order(np.arange(8)).tolist() == [729, 687, 563, 293, 673, 110, 949, 439]


def test_without_repeat_rows_past_the_epoch_weigh_nothing():
    batch = windows(6, repeat=False).rows(np.arange(8))
    assert batch["weights"].shape == (8, 4)
    assert batch["weights"][:, 0].tolist() == [1] * 6 + [0] * 2


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match=r"`seq` is 0"):
        Windows(np.zeros(9, np.uint8), 0)
    with pytest.raises(ValueError, match=r"too few tokens: 4, but one window of `seq` 4 needs 5"):
        Windows(np.zeros(4, np.uint8), 4)
