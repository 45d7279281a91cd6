"""Resuming equals never stopping, bit for bit, wherever a run was stopped; and a seed decides everything."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from gtp_jax import TrainState, make_mesh
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import Llama
from gtp_jax.nn import abstract_model
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import TrainConfig
from gtp_jax.runner.trainer._optimizer import optimizer_of

from .runs import finish, logged, read_records, small, start, train, wait_until

SMALL = dict(num_layers=1, eval_every=0)


@pytest.fixture(scope="module")
def never_stopped(text, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("never") / "run"
    assert main(["train", *small(text, out, **SMALL)]) == 0
    return out


def last_state(out: Path):
    config = TrainConfig.load(out / "config.json")
    with jax.set_mesh(make_mesh(gtp=4, tp=2)):
        model = abstract_model(lambda rngs: Llama(config.model(256, dtype="float32"), rngs=rngs))
        wanted = TrainState.create(model, optimizer_of(config, model))
        state, extra = Checkpoints(out / "checkpoints", read_only=True).restore(wanted)
    return jax.tree.map(np.asarray, (state.params, state.opt_state, state.step)), extra


def assert_same_run(one: Path, other: Path) -> None:
    assert read_records(one) == read_records(other)
    (state, extra), (expected, expected_extra) = last_state(one), last_state(other)
    assert extra == expected_extra
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert found.tobytes() == wanted.tobytes()


# before the first checkpoint, and between two
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.full)])
def test_killed_and_resumed_equals_never_stopped(step, text, never_stopped, tmp_path):
    out = tmp_path / "run"
    run = start(small(text, out, **SMALL))
    wait_until(lambda: logged(out, step), run)
    run.kill()
    finish(run)
    assert Checkpoints(out / "checkpoints", read_only=True).latest() != 8
    assert main(["train", f"--out={out}", "--resume"]) == 0
    assert_same_run(out, never_stopped)


@pytest.mark.slow
def test_one_seed_gives_one_run_and_another_seed_another(text, never_stopped, tmp_path):
    train(small(text, tmp_path / "same", **SMALL))
    assert_same_run(tmp_path / "same", never_stopped)
    train(small(text, tmp_path / "other", seed=1, **SMALL))
    assert read_records(tmp_path / "other")[1]["loss"] != read_records(never_stopped)[1]["loss"]
