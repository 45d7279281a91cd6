"""Models whose weights are stored padded generate what they generate without a mesh."""

import math

import jax
import pytest
from flax import nnx
from selection import pairwise

import gtp_jax as gtp
from gtp_jax.nn import split_model

from .models import DENSE, greedy, model_of

PROMPTS = [[5, 3, 8, 1, 90], [7, 7]]


@pytest.mark.full
@pytest.mark.parametrize("gather", ["once", "each_token"])
def test_tokens_of_padded_codes_are_those_of_one_device(gather, x64):
    found = []
    for degrees in (dict(gtp=1), dict(gtp=7)):
        devices = jax.devices()[: math.prod(degrees.values())]
        with jax.set_mesh(gtp.make_mesh(**degrees, devices=devices)), gtp.even_shares():
            model = gtp.freeze(model_of(DENSE), gtp.NVFP4(), trained=lambda path, _: "scale" in path[-1])
            stored = model.blocks.layers.mlp.down.kernel.get_raw_value().codes.shape
            found.append(gtp.generate(model, PROMPTS, max_new_tokens=6, gather=gather).tokens.tolist())
    assert stored == (2, 32, 56), "2 layers of 48 columns, padded to a block of 16 per rank"
    assert found[1] == found[0]


MESHES = [dict(gtp=7), dict(gtp=1, dp=7), dict(gtp=2, tp=3)]


@pytest.mark.parametrize(("degrees", "gather"), pairwise(MESHES, ["once", "each_token"], usual=1), ids=str)
def test_tokens_of_padded_models_are_those_without_a_mesh(degrees, gather, x64):
    wanted = greedy(model_of(DENSE), PROMPTS, 6)
    devices = jax.devices()[: math.prod(degrees.values())]
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=devices)), gtp.even_shares():
        model = model_of(DENSE)
        assert split_model(model).model_def.padded
        before = nnx.state(model)
        found = gtp.generate(model, PROMPTS, max_new_tokens=6, gather=gather)
        assert found.tokens.tolist() == wanted
        after = nnx.state(model)
        assert jax.tree.structure(before) == jax.tree.structure(after)
        assert all(a is b for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
