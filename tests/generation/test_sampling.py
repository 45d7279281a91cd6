"""Random numbers depend only on the seed, the row and the position; tokens come with the model's probabilities."""

import dataclasses

import jax
import numpy as np
import pytest

import gtp_jax as gtp
from gtp_jax.generation._sampling import choose, sampling_of

from .models import DENSE, model_of, scope_of

PROMPTS = [[5, 3, 8, 1, 90], [7, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
CONFIG = dataclasses.replace(DENSE, num_layers=1)
BOTH = dict(top_k=None, top_p=None)
DRAW = jax.jit(choose, static_argnums=1)
OPTIONS = dict(max_new_tokens=12, temperature=0.8, top_k=40, top_p=0.95)


def sampled(degrees, prompts=PROMPTS, **options):
    with scope_of(degrees):
        return gtp.generation.generate(model_of(CONFIG), prompts, **{**OPTIONS, **options}).tokens


@pytest.mark.full
def test_neither_the_mesh_nor_other_rows_change_what_is_sampled(x64):
    plain = sampled(None, seed=5)
    np.testing.assert_array_equal(plain, sampled(dict(gtp=2, tp=2), seed=5))
    others = sampled(None, [PROMPTS[0], PROMPTS[0], PROMPTS[2]], seed=5)
    np.testing.assert_array_equal(plain[[0, 2]], others[[0, 2]])
    assert (others[0] != others[1]).any()  # equal prompts in different rows are sampled independently
    assert (plain != sampled(None, seed=6)).any()


@pytest.mark.full
def test_options_may_be_numbers_of_numpy(x64):
    plain = dict(seed=5, vocab_size=90, temperature=0.5, top_p=0.75, top_k=40, max_new_tokens=12)
    kinds = (np.int64, np.int32, np.float32, np.float64, np.int64, np.int64)
    numbers = {name: kind(value) for (name, value), kind in zip(plain.items(), kinds, strict=True)}
    np.testing.assert_array_equal(sampled(None, **plain), sampled(None, **numbers))


@pytest.mark.parametrize(
    "top_k, top_p, kept", [(None, None, 6), (3, None, 3), (None, 0.5, 2), (None, 0.1, 1), (4, 0.99, 4), (100, 1.0, 6)]
)
def test_tokens_come_with_the_probabilities_of_those_that_are_left(top_k, top_p, kept):
    probs = np.array([0.1, 0.3, 0.05, 0.25, 0.2, 0.1])
    logits = np.broadcast_to(np.float32(np.log(probs) * 1.5), (20_000, 6))  # a temperature of 1.5 undoes the factor
    choice, sampling = sampling_of(temperature=1.5, top_k=top_k, top_p=top_p, seed=1)
    drawn = DRAW(logits, choice, sampling, np.arange(20_000), np.full(20_000, 7))
    left = np.argsort(-probs, kind="stable")[:kept]
    wanted = np.zeros(6)
    wanted[left] = probs[left] / probs[left].sum()
    found = np.bincount(drawn, minlength=6) / 20_000
    assert (found[wanted == 0] == 0).all()
    np.testing.assert_allclose(found, wanted, atol=0.015)


@pytest.mark.parametrize(
    "temperature, options",
    [(5e-324, {}), (1e-40, {"top_k": 3}), (1e38, {"top_p": 1.0}), (1e39, {"top_k": 3}), (1e308, {})],
    ids=str,
)
def test_extreme_temperatures_take_the_likeliest_token_or_all_alike(temperature, options):
    logits = np.random.default_rng(0).normal(size=9).astype(np.float32) * 10
    ranks = np.argsort(-logits[:6], kind="stable")  # of the tokens in the vocabulary
    choice, sampling = sampling_of(temperature=temperature, seed=1, vocab_size=6, **{**BOTH, **options})
    many = np.broadcast_to(logits, (4000, 9))
    drawn = DRAW(many, choice, sampling, np.arange(4000), np.full(4000, 7))
    kept = 1 if temperature < 1 else options.get("top_k", 6)
    found = np.bincount(drawn, minlength=9)
    assert (found[ranks[:kept]] > 0).all() and found[ranks[:kept]].sum() == 4000
    np.testing.assert_allclose(found[ranks[:kept]], 4000 / kept, rtol=0.15)


@pytest.mark.parametrize(
    "temperature, options",
    [(0, {"top_k": 3, "top_p": 0.5}), (1e-40, {"top_p": 1e-50}), (0.7, {"top_k": 1}), (1e38, {"top_p": 5e-324})],
    ids=str,
)
def test_the_least_choice_is_the_likeliest_token(temperature, options):
    logits = np.random.default_rng(0).normal(size=(50, 9)).astype(np.float32)
    choice, sampling = sampling_of(temperature=temperature, seed=1, **{**BOTH, **options})
    drawn = DRAW(logits, choice, sampling, np.arange(50), np.arange(50))
    np.testing.assert_array_equal(drawn, np.argmax(logits, axis=-1))
