"""A checkpoint of another model than the run's is refused with the flags that belong to it, if there are any."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import pytest

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import PRESETS, saved
from gtp_jax.trainer import TrainConfig
from gtp_jax.trainer._start import check_start

TINY = PRESETS["tiny"]


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        (dataclasses.replace(TINY, vocab_size=384), "Choose --preset tiny, and .* with 257 to 384 tokens"),
        (PRESETS["1b"], "Choose --preset 1b, and .* with 1 to 256 tokens"),
        (dataclasses.replace(PRESETS["tiny-moe"], top_k=1), "Choose --preset tiny-moe, and"),
        (dataclasses.replace(TINY, vocab_size=300), "no --tokenizer gives it 300 tokens: .* takes 256, or a larger"),
        (dataclasses.replace(TINY, vocab_size=128), "no --tokenizer gives it 128 tokens"),
        (dataclasses.replace(TINY, qk_norm=True), "No --preset has the sizes of the checkpoint's, and"),
        (dataclasses.replace(TINY, num_layers=3), "No --preset has .* Train it in a program of your own"),
    ],
)
def test_the_advice_leads_to_a_run_or_says_that_none_can_be(tmp_path, model, advice):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)}, extra=saved(model))
    with pytest.raises(ValueError, match=advice) as refusal:
        check_start(tmp_path, TrainConfig().model(256, dtype="float32"))
    if found := re.search(r"Choose --preset (\S+), .* to (\d+) tokens", str(refusal.value)):
        chosen = TrainConfig(preset=found[1]).model(int(found[2]), dtype="float32").architecture()
        assert {**chosen, "top_k": 0} == {**model.architecture(), "top_k": 0}
