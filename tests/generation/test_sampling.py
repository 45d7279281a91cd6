"""Random numbers depend only on the seed, the row and the position; tokens come with the model's probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gtp_jax as gtp
from gtp_jax.generation._sampling import choose, sampling_of

from .models import DENSE, model_of, scope_of

PROMPTS = [[5, 3, 8, 1, 90], [7, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
OPTIONS = dict(max_new_tokens=12, temperature=0.8, top_k=40, top_p=0.95)


def sampled(degrees, prompts=PROMPTS, **options):
    with scope_of(degrees):
        return gtp.generate(model_of(DENSE), prompts, **{**OPTIONS, **options}).tokens


def test_neither_the_mesh_nor_other_rows_change_what_is_sampled(x64):
    plain = sampled(None, seed=5)
    np.testing.assert_array_equal(plain, sampled(dict(gtp=2, tp=2), seed=5))
    others = sampled(None, [PROMPTS[0], [40, 41, 42, 43, 44, 45], PROMPTS[2], PROMPTS[0]], seed=5)
    np.testing.assert_array_equal(plain[[0, 2]], others[[0, 2]])
    assert (others[0] != others[3]).any()  # equal prompts in different rows are sampled independently
    assert (plain != sampled(None, seed=6)).any()


@pytest.mark.parametrize(
    "top_k, top_p, kept",
    [(None, None, 6), (3, None, 3), (None, 0.5, 2), (None, 0.1, 1), (4, 0.99, 4), (100, 1.0, 6)],
)
def test_tokens_come_with_the_probabilities_of_those_that_are_left(top_k, top_p, kept):
    probs = np.array([0.1, 0.3, 0.05, 0.25, 0.2, 0.1])
    logits = jnp.broadcast_to(jnp.log(probs) * 1.5, (20_000, 6))  # a temperature of 1.5 undoes the factor
    choice, sampling = sampling_of(temperature=1.5, top_k=top_k, top_p=top_p, seed=1)
    drawn = choose(logits, choice, sampling, jnp.arange(20_000), jnp.full(20_000, 7))
    left = np.argsort(-probs, kind="stable")[:kept]
    wanted = np.zeros(6)
    wanted[left] = probs[left] / probs[left].sum()
    found = np.bincount(drawn, minlength=6) / 20_000
    assert (found[wanted == 0] == 0).all()
    np.testing.assert_allclose(found, wanted, atol=0.015)


def test_a_temperature_of_zero_takes_the_likeliest_token():
    logits = jax.random.normal(jax.random.key(0), (50, 9))
    choice, sampling = sampling_of(temperature=0, top_k=3, top_p=0.5, seed=1)
    drawn = choose(logits, choice, sampling, jnp.arange(50), jnp.arange(50))
    np.testing.assert_array_equal(drawn, np.argmax(logits, axis=-1))
