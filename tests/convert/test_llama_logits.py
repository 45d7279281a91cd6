"""Names and orientation are right: an imported Llama computes what transformers' does."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from selection import others_full

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.convert import import_llama
from gtp_jax.models import Llama
from gtp_jax.nn import abstract_model

from .hugging_face import CONFIG, logits, random_tensors, write_model

# of so short a sequence every kind of frequency must turn
LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
CHANGES = {
    "as it is": {},
    "tied": {"tie_word_embeddings": True},
    "linear scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "Llama 3.1's scaling": {"rope_theta": 100.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
}


@pytest.mark.parametrize("changes", others_full(CHANGES, ["tied", "Llama 3.1's scaling"]))
def test_logits_of_an_imported_llama_are_those_of_its_tensors(changes, tmp_path):
    config = {**CONFIG, **CHANGES[changes]}
    tensors = random_tensors(config)
    done = import_llama(write_model(tmp_path / "hf", tensors, config), tmp_path / "imported")
    model = dataclasses.replace(done.config, dtype="float32")
    tokens = np.random.default_rng(1).integers(0, config["vocab_size"], (4, 24), dtype=np.int32)
    mesh = gtp.make_mesh(gtp=2, tp=2, devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        like = gtp.TrainState.create(abstract_model(lambda rngs: Llama(model, rngs=rngs)), optax.sgd(1.0))
        params = Checkpoints(tmp_path / "imported", read_only=True).restore_params(like)
        placed = jax.device_put(tokens, NamedSharding(mesh, P(("dp", "gtp"))))
        found = jax.jit(lambda params, tokens: like.model_def.model(params)(tokens))(params, placed)
    wanted = logits(tensors, config, tokens)
    if "rope_scaling" in config:
        plain = logits(tensors, {**config, "rope_scaling": None}, tokens)
        assert np.abs(plain - wanted).max() > 1e-2 * np.abs(wanted).max()  # so that the scaling is seen
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
