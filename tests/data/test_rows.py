"""Rows of a text, of several texts, and of whole documents: each once an epoch, in an order that only the seed, lengths
and the place decide."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from messages import naming

from gtp_jax.mesh import make_mesh
from gtp_jax.runner.data import Documents, Joined, Loader, Mixture, Packed, Windows, weighted
from gtp_jax.runner.data._packed import best_fit

SEQ = 4
LENGTHS = np.random.default_rng(0).integers(0, 40, 300)


def windows(count: int, first: int = 0, **kwargs) -> Windows:
    return Windows(first + np.arange(count * SEQ + 1, dtype=np.uint32), SEQ, **kwargs)


def mixture(weights, counts=(50, 20, 7)) -> Mixture:
    parts = [windows(count, 1000 * i, seed=9) for i, count in enumerate(counts[: len(weights)])]
    return Mixture(parts, weights, SEQ)


def documents(lengths, answers=None) -> Documents:
    """Documents whose tokens are all different."""
    tokens = np.arange(sum(lengths), dtype=np.uint32)
    return Documents.of(np.split(tokens, np.cumsum(lengths)[:-1]), np.dtype(np.uint32), answers)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 16, 17, 100, 1025])
def test_an_epoch_visits_every_window_exactly_once(count):
    of = windows(count, seed=3)
    for epoch in range(3):
        order = of.order(np.arange(epoch * count, (epoch + 1) * count))
        assert sorted(order.tolist()) == list(range(count))


def test_every_token_of_a_text_but_the_first_is_a_target_once_and_that_of_the_token_before():
    of = windows(23)
    batch = of.rows(np.arange(len(of)))
    assert sorted(batch["targets"].ravel().tolist()) == list(range(1, 23 * SEQ + 1))
    np.testing.assert_array_equal(batch["targets"], batch["tokens"] + 1)
    assert batch["tokens"].dtype == batch["targets"].dtype == np.int32
    assert len(Windows(np.zeros(4 * 3, np.uint8), 4)) == 2  # leftover tokens make no window


def test_the_order_looks_random_and_differs_between_epochs_and_seeds_and_from_the_file():
    orders = [windows(1000, seed=seed).order(np.arange(1000) + 1000 * epoch) for seed in (0, 1) for epoch in (0, 1)]
    orders.append(np.arange(1000))
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert (one == other).mean() < 0.02  # a random order agrees in one place on average
    order = windows(5000).order(np.arange(5000)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06  # four standard deviations
    assert abs(np.corrcoef(order, np.arange(5000))[0, 1]) < 0.06


def test_rows_do_not_depend_on_how_they_are_asked_for_nor_on_the_mesh():
    for of in (windows(37, seed=5), mixture((0.7, 0.3))):
        whole = of.rows(np.arange(100))
        parts = [of.rows(np.arange(start, start + 5)) for start in range(0, 100, 5)]
        for name in whole:
            np.testing.assert_array_equal(whole[name], np.concatenate([part[name] for part in parts]))
        for mesh in (make_mesh(dp=2, gtp=2, tp=2), make_mesh(gtp=1, devices=jax.devices()[:1])):
            np.testing.assert_array_equal(Loader(of, 16, mesh).at(3)["tokens"], whole["tokens"][48:64])


def test_orders_and_digests_are_the_same_on_every_machine_and_version():
    # A change here breaks the resumption of every run there is.
    assert windows(1000, seed=7).order(np.arange(8)).tolist() == [729, 687, 563, 293, 673, 110, 949, 439]
    assert Packed(documents([5, 9, 3, 3, 40, 2]), 16).digest == "42975c0237354c2abc0fba10d3f966b6"
    one = Packed(documents(LENGTHS), 16).digest  # of lengths and `seq` alone
    assert one == Packed(documents(LENGTHS), 16, seed=5).digest
    assert one not in (Packed(documents(LENGTHS), 17).digest, Packed(documents(LENGTHS[::-1]), 16).digest)


def test_without_repeat_rows_past_the_epoch_weigh_nothing():
    packed = Packed(documents(LENGTHS), 16, repeat=False)
    assert set(packed.kinds) == {"tokens", "targets", "segment_ids", "weights"}
    for of, count, seq in ((windows(6, repeat=False), 6, SEQ), (packed, len(packed), 16)):
        batch = of.rows(np.arange(count + 2))
        assert batch["weights"].shape == (count + 2, seq)
        assert batch["weights"][:, 0].tolist() == [1] * count + [0] * 2


def test_joined_rows_are_those_of_all_texts_once_an_epoch():
    joined = Joined([windows(5), windows(3, 1000)], SEQ, seed=2)
    assert len(joined) == 8
    firsts = [joined.rows(np.arange(8) + 8 * epoch)["tokens"][:, 0].tolist() for epoch in (0, 1)]
    assert firsts[0] != firsts[1] and sorted(firsts[0]) == sorted(firsts[1]) == [0, 4, 8, 12, 16, 1000, 1004, 1008]


@pytest.mark.parametrize("weights", [(0.7, 0.3), (3, 1), (5, 2, 1), (1e-3, 1, 1)])
def test_of_any_first_rows_each_text_has_its_share(weights):
    which, _ = mixture(weights).sources(np.arange(4000))
    for text, weight in enumerate(weights):
        counts = np.cumsum(which == text)
        assert np.abs(counts - np.arange(1, 4001) * weight / sum(weights)).max() <= len(weights)


def test_each_text_of_a_mixture_is_read_in_its_own_order_without_a_gap():
    mixed = mixture((5, 2, 1))
    which, inner = mixed.sources(np.arange(2000))
    rows = mixed.rows(np.arange(2000))
    for text, part in enumerate(mixed.parts):
        here = which == text
        assert inner[here].tolist() == list(range(here.sum()))
        np.testing.assert_array_equal(rows["tokens"][here], part.rows(np.arange(here.sum()))["tokens"])
    which, inner = mixture((0.7, 0.3)).sources(np.asarray([(1 << 39) - 1]))  # which does not overflow
    assert which[0] in (0, 1) and 0 <= inner[0] < 1 << 39


def test_a_weight_is_what_follows_the_last_colon_unless_the_whole_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:3").touch()
    assert weighted(["a:3", "b:x", "c"]) == [("a:3", None), ("b:x", None), ("c", None)]
    assert weighted(["a:3:0.5", "b.jsonl:1e-3"]) == [("a:3", 0.5), ("b.jsonl", 0.001)]


@pytest.mark.parametrize("seq", [1, 7, 16, 64])
def test_every_token_of_documents_is_a_target_once_an_epoch_but_their_first(seq):
    of = documents(LENGTHS)
    batch = Packed(of, seq, seed=3).rows(np.arange(len(Packed(of, seq)), 2 * len(Packed(of, seq))))
    found = batch["targets"][batch["targets"] >= 0]
    expected = set(range(len(of.tokens))) - set(of.offsets[:-1].tolist())
    assert len(found) == len(expected) and set(found.tolist()) == expected


@pytest.mark.parametrize("seq", [7, 64])
def test_a_segment_is_a_piece_of_one_document_and_its_targets_are_one_later(seq):
    of = documents(LENGTHS)
    packed = Packed(of, seq)
    batch = packed.rows(np.arange(len(packed)))
    document = np.repeat(np.arange(len(of)), np.diff(of.offsets))
    for tokens, targets, segments in zip(*(batch[n] for n in ("tokens", "targets", "segment_ids")), strict=True):
        counts = targets >= 0
        np.testing.assert_array_equal(targets[counts], tokens[counts] + 1)
        assert (np.diff(segments) >= 0).all()
        for segment in np.unique(segments[counts]):
            inside = segments == segment
            assert counts[inside].all() and len(np.unique(document[tokens[inside]])) == 1
            assert (np.diff(tokens[inside]) == 1).all()
        assert not (set(segments[counts]) & set(segments[~counts]))  # padding has an id of its own


def test_answers_decide_which_targets_count():
    answers = [np.asarray([0, 0, 1, 1], np.uint8), np.asarray([0, 1], np.uint8)]
    of = documents([4, 2], answers)
    targets = Packed(of, 8).rows(np.arange(1))["targets"]
    assert sorted(targets[targets >= 0].tolist()) == [2, 3, 5]
    rows = Windows(of.tokens, 5, answers=of.answers).rows(np.arange(1))
    assert rows["targets"].tolist() == [[-1, 2, 3, -1, 5]]


@pytest.mark.parametrize("room", [5, 32, 100])
def test_no_row_is_overfull_and_few_have_room(room):
    sizes = np.random.default_rng(1).integers(1, room + 1, 1000)
    filled = np.bincount(best_fit(sizes, room), weights=sizes)
    assert filled.max() <= room and filled.min() > 0
    assert len(filled) <= 1.02 * np.ceil(sizes.sum() / room)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Windows(np.zeros(4, np.uint8), 4), "4 `seq` 4 needs 5"),
        (lambda: weighted(["a:0"]), "`data` a:0 weight 0"),
        (lambda: weighted(["a:1", "b"]), "`data` none b b:0.5"),
        (lambda: weighted(["a:1", "b:1", "a:2"]), "`data` a twice"),
        (lambda: Packed(documents([1, 0, 1]), 8), "too few tokens 3 documents"),
        (lambda: Documents(np.zeros(4, np.uint8), np.asarray([0, 4]), np.ones(4)), "`answers` float64 (4,) uint8"),
    ],
)
def test_sizes_weights_and_documents_that_make_no_rows_are_named(make, message):
    with pytest.raises(ValueError, match=naming(message)):
        make()
