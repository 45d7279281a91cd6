"""Whole documents in rows: each token predicted once, from its own document, in rows that lengths alone decide."""

from __future__ import annotations

import numpy as np
import pytest

from gtp_jax.runner.data import Documents, Packed, Windows
from gtp_jax.runner.data._packed import best_fit


def documents(lengths, answers=None) -> Documents:
    """Documents whose tokens are all different."""
    tokens = np.arange(sum(lengths), dtype=np.uint32)
    return Documents.of(np.split(tokens, np.cumsum(lengths)[:-1]), np.dtype(np.uint32), answers)


LENGTHS = np.random.default_rng(0).integers(0, 40, 300)


@pytest.mark.parametrize("seq", [1, 7, 16, 64])
def test_every_token_is_a_target_once_an_epoch_but_the_first_of_a_document(seq):
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


def test_a_document_longer_than_a_row_fills_rows_and_leaves_a_rest():
    packed = Packed(documents([20]), 8)
    assert len(packed) == 3
    batch = packed.rows(np.arange(3))
    assert sorted(batch["tokens"][:, 0].tolist()) == [0, 8, 16]


def test_answers_decide_which_targets_count():
    answers = [np.asarray([0, 0, 1, 1], np.uint8), np.asarray([0, 1], np.uint8)]
    of = documents([4, 2], answers)
    targets = Packed(of, 8).rows(np.arange(1))["targets"]
    assert sorted(targets[targets >= 0].tolist()) == [2, 3, 5]
    windows = Windows(of.tokens, 5, answers=of.answers).rows(np.arange(1))
    assert windows["targets"].tolist() == [[-1, 2, 3, -1, 5]]


@pytest.mark.parametrize("room", [5, 32, 100])
def test_no_row_is_overfull_and_few_have_room(room):
    sizes = np.random.default_rng(1).integers(1, room + 1, 1000)
    rows = best_fit(sizes, room)
    filled = np.bincount(rows, weights=sizes)
    assert filled.max() <= room and filled.min() > 0
    assert len(filled) <= 1.02 * np.ceil(sizes.sum() / room)


def test_pieces_are_put_where_an_ordinary_best_fit_puts_them():
    sizes, room = np.random.default_rng(2).integers(1, 20, 200), 23
    left: list[int] = []
    for size in sorted(sizes.tolist(), reverse=True):
        fits = [row for row, space in enumerate(left) if space >= size]
        row = min(fits, key=lambda row: left[row], default=len(left))
        left[row:] = [*left[row:], room][: len(left) - row] or [room]
        left[row] -= size
    assert sorted(np.bincount(best_fit(sizes, room), weights=sizes).tolist()) == sorted(room - space for space in left)


def test_the_digest_is_of_lengths_and_seq_and_the_same_on_every_machine_and_version():
    one = Packed(documents(LENGTHS), 16)
    assert one.digest == Packed(documents(LENGTHS), 16, seed=5).digest
    assert one.digest != Packed(documents(LENGTHS), 17).digest
    assert one.digest != Packed(documents(LENGTHS[::-1]), 16).digest
    # A change here breaks the resumption of every run there is.
    assert Packed(documents([5, 9, 3, 3, 40, 2]), 16).digest == "42975c0237354c2abc0fba10d3f966b6"


def test_rows_past_an_epoch_weigh_nothing_without_repeat():
    packed = Packed(documents(LENGTHS), 16, repeat=False)
    batch = packed.rows(np.arange(len(packed) + 2))
    assert set(batch) == set(packed.kinds) == {"tokens", "targets", "segment_ids", "weights"}
    assert batch["weights"][:, 0].tolist() == [1] * len(packed) + [0] * 2


def test_bad_documents_are_named():
    with pytest.raises(ValueError, match=r"too few tokens: none of the 3 documents has two"):
        Packed(documents([1, 0, 1]), 8)
    with pytest.raises(ValueError, match=r"`seq` is 0"):
        Packed(documents([4]), 0)
    with pytest.raises(ValueError, match=r"`offsets` \[0 3\] do not cover 4 tokens; they must increase from 0"):
        Documents(np.zeros(4, np.uint8), np.asarray([0, 3]))
    with pytest.raises(ValueError, match=r"`answers` are float64 of shape \(4,\); they must be uint8, one for"):
        Documents(np.zeros(4, np.uint8), np.asarray([0, 4]), np.ones(4))
