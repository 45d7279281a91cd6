"""A checkpoint of another model than the run's is refused with the flags that belong to it, if there are any."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import pytest

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import PRESETS, saved
from gtp_jax.runner.flags import ExpertOptions
from gtp_jax.runner.trainer import TrainConfig
from gtp_jax.runner.trainer._start import check_start

TINY, MOE = PRESETS["tiny"], PRESETS["tiny-moe"]


def refusal(tmp_path, model, ours) -> str:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": jnp.ones(2)}, extra=saved(model))
    with pytest.raises(ValueError, match="is of another model than this run's") as refused:
        check_start(tmp_path, ours)
    return str(refused.value)


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        (dataclasses.replace(TINY, vocab_size=384), "Choose the --tokenizer that .* with 257 to 384 tokens"),
        (PRESETS["1b"], "Choose --preset 1b, and .* with 1 to 256 tokens"),
        (dataclasses.replace(MOE, top_k=1), "Choose --preset tiny-moe --top-k=1, and the --tokenizer"),
        (dataclasses.replace(TINY, vocab_size=300), "no --tokenizer gives it 300 tokens: .* takes 256, or a larger"),
        (dataclasses.replace(TINY, vocab_size=128), "no --tokenizer gives it 128 tokens"),
        (dataclasses.replace(TINY, qk_norm=True), "No --preset has the sizes of the checkpoint's, and"),
        (dataclasses.replace(TINY, num_layers=3), "No --preset has .* Train it in a program of your own"),
    ],
)
def test_the_advice_leads_to_a_run_or_says_that_none_can_be(tmp_path, model, advice):
    text = refusal(tmp_path, model, TrainConfig().model(256, dtype="float32"))
    assert re.search(advice, text)
    if found := re.search(r"Choose (?:--preset ([\w-]+))?.* to (\d+) tokens", text):
        chosen = TrainConfig(preset=found[1] or "tiny").model(int(found[2]), dtype="float32").architecture()
        assert {**chosen, "top_k": 0} == {**model.architecture(), "top_k": 0}


@pytest.mark.parametrize(
    ("experts", "asked", "advice"),
    [
        (dict(top_k=3), {}, "Choose --top-k=3."),
        ({}, dict(top_k=3), "Choose --top-k=2."),
        (dict(shared_hidden=64), dict(top_k=3), "Choose --top-k=2 --shared-hidden=64."),
        ({}, dict(shared_hidden=64), "Choose --shared-hidden=0."),
        (
            dict(router_score="sigmoid", router_normalize=False),
            dict(router_scale=2.0),
            "Choose --router-score=sigmoid --no-router-normalize --router-scale=1.0.",
        ),
        (dict(router_bias_rate=0.1), {}, "Choose --router-bias-rate=0.0."),
        ({}, dict(router_bias_rate=0.1), "Leave out --router-bias-rate."),
    ],
)
def test_where_experts_alone_differ_their_flags_are_named_and_no_others(tmp_path, experts, asked, advice):
    theirs = ExpertOptions(**experts).of(MOE, "tiny-moe")
    ours = TrainConfig(preset="tiny-moe", experts=ExpertOptions(**asked)).model(256, dtype="float32")
    assert refusal(tmp_path, theirs, ours).splitlines()[-1] == advice


def test_a_router_that_no_flags_describe_needs_a_program(tmp_path):
    theirs = saved(MOE)
    for routing in ({"future": 1}, {"score": "magic"}, {"score": 3}, 5):
        with Checkpoints(tmp_path / str(routing)) as checkpoints:
            checkpoints.save(1, {"w": jnp.ones(2)}, extra={**theirs, "model": {**theirs["model"], "routing": routing}})
        with pytest.raises(ValueError, match="tiny-moe has its sizes, but no flags choose experts as its router does"):
            check_start(tmp_path / str(routing), MOE)
