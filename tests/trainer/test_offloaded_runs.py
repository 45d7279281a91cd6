"""Runs whose state is partly in the memory of the host are those whose state is not, wherever they were stopped."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from trainer.any_model import Net, batches, loss
from trainer.runs import read_records, refused, small

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.mesh import DeviceMemory
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import TrainConfig, _held, _loop
from gtp_jax.runner.trainer._finite_state import state_is_finite
from gtp_jax.runner.trainer._job import evaluated_state
from gtp_jax.runner.trainer._optimizer import optimizer_of
from gtp_jax.train import _host_memory

STEPS = 6


def digests(out: Path) -> dict[int, dict[str, str]]:
    """The digest of each array of each step."""
    checkpoints = Checkpoints(out / "checkpoints", read_only=True)
    leaves = {step: checkpoints.manifest(step)["leaves"] for step in checkpoints.steps()}
    return {step: {name: leaf["digest"] for name, leaf in own.items()} for step, own in leaves.items()}


@pytest.fixture
def killed(monkeypatch):
    """Ends runs after steps 3 and 5, once each."""
    log_step, at = _loop.Progress.step, {3, 5}

    def end(self, number, metrics):
        log_step(self, number, metrics)
        if number in at:
            at.remove(number)
            raise SystemExit("killed")

    monkeypatch.setattr(_loop.Progress, "step", end)
    return at


@pytest.mark.full
def test_a_run_that_is_killed_twice_and_moves_its_state_from_the_host_to_devices_is_the_run_that_did_neither(
    text, tmp_path, killed, capsys
):
    # the rate is constant, because XLA computes a decaying one in the update's own fusions, whose rounding differs
    flags = dict(steps=STEPS, eval_every=0, schedule="constant", gtp=4, tp=2)
    out = tmp_path / "run"
    for given in (["--offload=masters"], ["--resume", "--keep=5"], ["--resume", "--offload=none"]):
        last = "none" in given[-1]
        words = [f"--out={out}", *given] if "--resume" in given else small(text, out, **flags) + given
        if last:
            assert main(["train", *words]) == 0
        else:
            with pytest.raises(SystemExit, match="killed"):
                main(["train", *words])
        said = capsys.readouterr().out
        assert ("in the memory of its host" in said) == (not last)
    assert not killed and "offload from masters to none" in said
    assert main(["train", *small(text, tmp_path / "plain", **flags)]) == 0
    assert digests(out) == digests(tmp_path / "plain")
    assert read_records(out) == read_records(tmp_path / "plain")


@pytest.mark.parametrize("optimizer", ["schedule-free", pytest.param("adamw", marks=pytest.mark.full)])
def test_evaluated_weights_are_on_devices_and_a_number_on_the_host_that_is_not_finite_is_found(optimizer, monkeypatch):
    monkeypatch.setattr(_host_memory, "_LEAST_ELEMENTS", 1 << 12)
    average = None if optimizer == "schedule-free" else 0.9
    config = TrainConfig(model_="any:Net", optimizer=optimizer, average=average)
    with jax.set_mesh(gtp.make_mesh(gtp=8)):
        model = gtp.shard(Net(nnx.Rngs(0)))
        state = gtp.TrainState.create(model, optimizer_of(config, model), offload="masters")
        found = evaluated_state(state).params
        assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(found)} == {"device"}
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state.params), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)  # no update was made
        assert state_is_finite((state.params, state.opt_state))
        broken = jax.tree.map(lambda a: a, state.params)
        whole = broken["embed"]["embedding"]
        broken["embed"]["embedding"] = jax.device_put(np.full(whole.shape, np.inf, np.float32), whole.sharding)
        assert not state_is_finite((broken, state.opt_state))


UNEVEN = dict(num_layers=1, hidden_size=36, num_heads=3, num_kv_heads=3, head_dim=12, intermediate_size=100)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(offload="weights"), "offload 'weights' none optimizer masters"),
        (dict(optimizer="muon"), "`offload` 'masters' `optimizer` muon --optimizer adamw, lion, schedule-free"),
        (dict(optimizer="adafactor"), "`offload` 'masters' `optimizer` adafactor --offload"),
        (dict(optimizer_state="float8"), "`offload` 'masters' `optimizer_state` float8 --offload"),
        (UNEVEN | dict(gtp=8, tp=1), "`offload` 'masters' padded (`even_shares`) `offload` degrees"),
    ],
)
def test_what_cannot_be_kept_on_the_host_is_refused_by_the_command(flags, message, text, tmp_path, capsys):
    words = small(text, tmp_path / "run", **{"offload": "masters", **flags})
    if flags.get("offload") == "weights":
        with pytest.raises(SystemExit, match="2"):
            main(["train", *words])
        assert re.search(naming(message), capsys.readouterr().err)
    else:
        refused(capsys, message, "train", *words)
    assert not (tmp_path / "run").exists()


def test_failed_devices_and_a_supervisor_are_refused_where_replicas_may_be_unequal(text, tmp_path, capsys):
    flags = small(text, tmp_path / "run", dp=2, gtp=1, tp=4, offload="optimizer")
    refused(capsys, "`offload` 'optimizer' unequal `--offload none`", "train", *flags, "--failed-devices=3")
    refused(capsys, "`offload` 'optimizer' `--elastic` `--offload none`", "train", *flags, "--elastic")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("optimizer", "place", "value", "message"),
    [
        (optax.lamb(1e-3), None, None, "`offload` blocks whole `optax.adamw`"),
        (optax.adamw(1e-3), "available_bytes", lambda: 1 << 16, "`offload` memory of this host 0.0 GiB available"),
        (optax.adamw(1e-3), "_KIND", "unheard_of", "`offload` 'masters' 'unheard_of' 'cpu' 'pinned_host'"),
    ],
    ids=["an update that is not elementwise", "a host without room", "a platform without pinned memory"],
)
def test_a_program_is_refused_before_anything_is_written(optimizer, place, value, message, tmp_path, monkeypatch):
    monkeypatch.setattr(_host_memory, "_LEAST_ELEMENTS", 1 << 12)
    if place is not None:
        monkeypatch.setattr(_host_memory, place, value)
    trainer = gtp.Trainer(Net, loss, optimizer, batches, out=tmp_path / "run", steps=2, offload="masters")
    with pytest.raises(ValueError, match=naming(message)):
        trainer.run()
    assert not (tmp_path / "run").exists()


def test_a_device_needs_room_for_what_it_holds_and_the_weights_that_a_step_copies_to_it(monkeypatch):
    monkeypatch.setattr(_held, "device_memory", lambda: DeviceMemory(limit=1000, free=0))
    held = _held.Held(600, 1500.0, "gtp 8", host_bytes=900, copied_bytes=300)
    _held.check_held_fits(held)
    assert (
        str(held)
        == "600 B of weights and optimizer on each device, 900 B in the memory of its host; an even share is 1.50 kB"
    )
    with pytest.raises(ValueError, match=naming("1 kB 600 B --offload")):
        _held.check_held_fits(dataclasses.replace(held, bytes=701))
