"""Checkpoints that earlier versions wrote still load.

`written_before/padded_storage.tar.gz` was written on gtp 2 x tp 2 by the last version whose weights were padded in
memory (jax 0.11.2, orbax-checkpoint 0.12.4), after one AdamW step of the model below.
"""

import contextlib
import tarfile
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

CONFIG = LlamaConfig(
    vocab_size=30,
    hidden_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    head_dim=6,
    intermediate_size=20,
    dtype="float32",
)
# What that version printed: the loss after the step, and sums of magnitudes.
LOSS = 3.131493330001831
SUMS = {"query": 59.30337905883789, "down": 84.76166534423828, "table": 6.455008029937744, "head": 85.75787353515625}


@pytest.mark.parametrize(
    "degrees",
    [pytest.param(None, marks=pytest.mark.slow), dict(gtp=2, tp=2), pytest.param(dict(gtp=3), marks=pytest.mark.slow)],
    ids=str,
)
def test_a_checkpoint_of_padded_storage_loads_on_any_mesh(tmp_path, degrees):
    with tarfile.open(Path(__file__).with_name("written_before") / "padded_storage.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    count = int(np.prod(list(degrees.values()))) if degrees else 0
    mesh = jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[:count])) if degrees else None
    with mesh or contextlib.nullcontext():
        model = gtp.init(lambda rngs: Llama(CONFIG, rngs=rngs), nnx.Rngs(1))
        checkpoints = Checkpoints(tmp_path, read_only=True)
        assert checkpoints.verify() == []
        state, extra = checkpoints.restore(gtp.TrainState.create(model, optax.adamw(1e-2)))
        tokens = np.resize(np.arange(20, dtype=np.int32) % 30, (12, 5))  # the batch of then, three times
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        loss = float(gtp.eval_step(next_token_loss)(state, batch)["loss"])
    assert extra == {"note": "written before storage was logical"} and int(state.step) == 1
    np.testing.assert_allclose(loss, LOSS, rtol=1e-6)
    layers = state.params["blocks"]["layers"]
    arrays = {
        "query": layers["attention"]["qkv"]["kernel"]["query"],
        "down": layers["mlp"]["down"]["kernel"],
        "table": state.params["embed"]["table"],
        "head": state.params["head"]["kernel"],
    }
    for name, expected in SUMS.items():
        np.testing.assert_allclose(np.abs(np.asarray(arrays[name])).sum(), expected, rtol=1e-5)
    assert int(state.opt_state[0].count) == 1 and np.asarray(state.opt_state[0].mu["head"]["kernel"]).any()
