"""Models go through orbax as any NNX model does; what `Checkpoints` writes, plain orbax reads (see also the meshes)."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import Llama, LlamaConfig
from gtp_jax.nn import abstract_model, split_model

from .meshes import OPTIMIZERS, SIZES, Place

pytestmark = pytest.mark.full


def test_the_state_of_a_model_is_saved_and_restored_on_its_mesh(tmp_path):
    config = LlamaConfig(**SIZES)
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)), ocp.StandardCheckpointer() as checkpointer:
        model = gtp.init(lambda rngs: Llama(config, rngs=rngs), nnx.Rngs(3))
        checkpointer.save(tmp_path / "model", nnx.state(model))
        checkpointer.wait_until_finished()
        abstract = abstract_model(lambda rngs: Llama(config, rngs=rngs))
        restored = checkpointer.restore(tmp_path / "model", nnx.state(abstract))
        nnx.update(abstract, restored)
        again, before = split_model(abstract)[1], split_model(model)[1]
    for found, wanted in zip(jax.tree.leaves(again), jax.tree.leaves(before), strict=True):
        assert found.sharding == wanted.sharding
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def test_a_tied_table_is_saved_once(tmp_path, filled, logical, assert_same_bits):
    state = filled(Place({"gtp": 4, "tp": 2}).state(OPTIMIZERS["adamw"], tie_embeddings=True))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        leaves = checkpoints.manifest()["leaves"].items()
        shapes = [leaf["shape"] for name, leaf in leaves if name.startswith("params/")]
        table = [SIZES["vocab_size"], SIZES["hidden_size"]]
        assert shapes.count(table) == 1 and table[::-1] not in shapes
        restored, _ = checkpoints.restore(Place({"gtp": 1}).state(OPTIMIZERS["adamw"], tie_embeddings=True))
    assert_same_bits(logical(restored), logical(state))
