"""Models whose weights are stored padded generate what they generate without a mesh."""

import jax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.nn import split_model

from .models import DENSE, greedy, model_of

PROMPTS = [[5, 3, 8, 1, 90], [7, 7]]


@pytest.mark.parametrize("gather", ["once", "each_token"])
def test_tokens_at_gtp_7_are_those_without_a_mesh(gather, x64):
    wanted = greedy(model_of(DENSE), PROMPTS, 6)
    with jax.set_mesh(gtp.make_mesh(gtp=7, devices=jax.devices()[:7])), gtp.even_shares():
        model = model_of(DENSE)
        assert split_model(model).model_def.padded
        before = nnx.state(model)
        found = gtp.generate(model, PROMPTS, max_new_tokens=6, gather=gather)
        assert found.tokens.tolist() == wanted
        after = nnx.state(model)
        assert jax.tree.structure(before) == jax.tree.structure(after)
        assert all(a is b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
