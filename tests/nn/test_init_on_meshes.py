"""`gtp.init` on a mesh: the arrays that are drawn without one, at the places of an abstract model."""

import jax
import numpy as np
import pytest
from flax import nnx
from placed import placed
from selection import every

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=48, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=40
)


def llama(rngs):
    return Llama(CONFIG, rngs=rngs)


@pytest.mark.parametrize("degrees", every(2, [dict(dp=2, gtp=2, tp=2), dict(gtp=8)]))
def test_arrays_are_those_drawn_without_a_mesh_and_places_those_of_an_abstract_model(degrees):
    with jax.set_mesh(gtp.make_mesh(**degrees)):
        found, wanted = gtp.init(llama, nnx.Rngs(3)), placed(llama, 3)
        places = dict(nnx.to_flat_state(nnx.state(gtp.nn.abstract_model(llama))))
    assert nnx.graphdef(found) == nnx.graphdef(wanted)
    arrays = dict(nnx.to_flat_state(nnx.state(wanted)))
    for path, variable in nnx.to_flat_state(nnx.state(found)):
        own, drawn = variable.get_raw_value(), arrays[path].get_raw_value()
        assert own.dtype == drawn.dtype
        assert own.sharding.is_equivalent_to(places[path].get_raw_value().sharding, own.ndim), path
        np.testing.assert_allclose(own, drawn, rtol=1e-5, atol=1e-6, err_msg=str(path))
