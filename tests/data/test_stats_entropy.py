"""The entropy that a model must beat."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gtp_jax.runner.data import bits_per_byte, unigram_entropy


def test_uniform_tokens_have_the_entropy_of_their_number():
    tokens = np.arange(1 << 16, dtype=np.uint32) % 64
    assert unigram_entropy([tokens], [tokens[:320], tokens[320:640]], 64) == pytest.approx(math.log(64))


def test_entropy_is_that_of_held_out_tokens_under_the_train_counts():
    train = np.asarray([0] * 3 + [1] * 1, np.uint8)  # counted once more each: 4 and 2 of 6
    assert unigram_entropy([train], [np.asarray([0, 0, 1], np.uint8)], 2) == pytest.approx(
        (2 * math.log(6 / 4) + math.log(6 / 2)) / 3
    )


def test_token_that_never_occurred_costs_a_finite_amount():
    assert unigram_entropy([np.zeros(98, np.uint8)], [np.ones(5, np.uint8)], 2) == pytest.approx(math.log(100))


def test_counts_add_up_over_pieces():
    tokens = np.random.default_rng(0).integers(0, 9, (1 << 20) + 77).astype(np.uint8)
    p = np.bincount(tokens) / len(tokens)
    assert unigram_entropy([tokens], [tokens], 9) == pytest.approx(-(p * np.log(p)).sum(), rel=1e-6)


def test_bits_per_byte_of_a_uniform_byte_is_8():
    assert bits_per_byte(math.log(256)) == pytest.approx(8)
    assert bits_per_byte(math.log(256), bytes_per_token=4) == pytest.approx(2)
