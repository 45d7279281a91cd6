"""Every call of a module rounds stochastically by a key of its own, also where a chain calls it several times."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from gtp_jax.nn._stages import _layer_keys
from gtp_jax.weights import CallKeys, key_for


def test_no_key_of_a_call_is_that_of_a_chains_link_or_of_a_call_in_one():
    words = key_for(jnp.array([3, 5], jnp.uint32), ("mlp", "down"))
    outside, chain = CallKeys(words), CallKeys(words)
    links = [CallKeys(chain.next(link=True)) for _ in range(3)]
    found = [outside.next() for _ in range(3)] + [link.next() for link in links for _ in range(3)]
    assert len({tuple(np.asarray(key).tolist()) for key in found}) == len(found)


def test_stacks_within_stacks_with_swapped_names_round_by_keys_of_their_own():
    key = jnp.array([3, 5], jnp.uint32)
    one, other = (key_for(key_for(key, first), second) for first, second in ((("a",), ("b",)), (("b",), ("a",))))
    assert not np.array_equal(one, other)


def test_a_program_traced_again_rounds_alike():
    words = jnp.array([3, 5], jnp.uint32)

    def two_calls(words):
        keys = CallKeys(words)
        return keys.next(), keys.next()

    for a, b in zip(jax.jit(two_calls)(words), two_calls(words), strict=True):
        np.testing.assert_array_equal(a, b)


def test_layers_of_a_stack_round_by_keys_of_their_own():
    owner = types.SimpleNamespace(keys=CallKeys(jnp.array([3, 5], jnp.uint32)))
    (keys,) = _layer_keys({"dense": owner}, 4).values()
    assert len({tuple(np.asarray(key).tolist()) for key in keys}) == 4
