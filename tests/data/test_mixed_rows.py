"""Rows of several texts: all of them once, or each with its share."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from gtp_jax.mesh import make_mesh
from gtp_jax.runner.data import Joined, Loader, Mixture, Windows, weighted

SEQ = 4


def windows(first: int, count: int, **kwargs) -> Windows:
    return Windows(first + np.arange(count * SEQ + 1, dtype=np.uint32), SEQ, **kwargs)


def mixture(weights, counts=(50, 20, 7)) -> Mixture:
    parts = [windows(1000 * i, count, seed=9) for i, count in enumerate(counts[: len(weights)])]
    return Mixture(parts, weights, SEQ)


def test_joined_rows_are_those_of_all_texts_once_an_epoch():
    joined = Joined([windows(0, 5), windows(1000, 3)], SEQ, seed=2)
    assert len(joined) == 8
    firsts = [joined.rows(np.arange(8) + 8 * epoch)["tokens"][:, 0].tolist() for epoch in (0, 1)]
    assert firsts[0] != firsts[1] and sorted(firsts[0]) == sorted(firsts[1]) == [0, 4, 8, 12, 16, 1000, 1004, 1008]


@pytest.mark.parametrize("weights", [(0.7, 0.3), (3, 1), (5, 2, 1), (1e-3, 1, 1)])
def test_of_any_first_rows_each_text_has_its_share(weights):
    which, _ = mixture(weights).sources(np.arange(4000))
    for text, weight in enumerate(weights):
        counts = np.cumsum(which == text)
        assert np.abs(counts - np.arange(1, 4001) * weight / sum(weights)).max() <= len(weights)


def test_each_text_is_read_in_its_own_order_without_a_gap():
    mixed = mixture((5, 2, 1))
    which, inner = mixed.sources(np.arange(2000))
    rows = mixed.rows(np.arange(2000))
    for text, part in enumerate(mixed.parts):
        here = which == text
        assert inner[here].tolist() == list(range(here.sum()))
        np.testing.assert_array_equal(rows["tokens"][here], part.rows(np.arange(here.sum()))["tokens"])


def test_rows_do_not_depend_on_how_they_are_asked_for_nor_on_the_mesh():
    mixed = mixture((0.7, 0.3))
    whole = mixed.rows(np.arange(64))
    np.testing.assert_array_equal(whole["targets"][40:], mixed.rows(np.arange(40, 64))["targets"])
    for mesh in (make_mesh(gtp=8), make_mesh(dp=2, gtp=2, tp=2), make_mesh(gtp=1, devices=jax.devices()[:1])):
        np.testing.assert_array_equal(Loader(mixed, 16, mesh).at(3)["tokens"], whole["tokens"][48:])


def test_large_row_numbers_do_not_overflow():
    which, inner = mixture((0.7, 0.3)).sources(np.asarray([(1 << 39) - 1]))
    assert which[0] in (0, 1) and 0 <= inner[0] < 1 << 39


def test_a_weight_is_what_follows_the_last_colon_unless_the_whole_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:3").touch()
    assert weighted(["a:3", "b:x", "c"]) == [("a:3", None), ("b:x", None), ("c", None)]
    assert weighted(["a:3:0.5", "b.jsonl:1e-3"]) == [("a:3", 0.5), ("b.jsonl", 0.001)]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["a:0"], r"`data` a:0 has the weight 0; it must be a number above 0"),
        (["a:1", "b:nan"], r"`data` b:nan has the weight nan"),
        (
            ["a:1", "b"],
            r"`data` gives weights to some paths, but none to b\. Give all a weight, such as b:0\.5, or none",
        ),
        (["a:1", "b:1", "a:2"], r"`data` a is given twice, with weights\. Give it once"),
    ],
)
def test_weights_that_mean_nothing_are_refused(paths, message):
    with pytest.raises(ValueError, match=message):
        weighted(paths)
