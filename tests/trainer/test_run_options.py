"""Runs with experts, and with degrees that divide no dimension."""

import jax
import pytest

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.mesh import DeviceMemory
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import _held

from .runs import losses, read_records, refused, small, train

jax.devices()  # fixes the number of devices to what the suite runs with

UNEVEN = dict(num_layers=1, hidden_size=36, num_heads=3, num_kv_heads=3, head_dim=12, intermediate_size=100)


@pytest.mark.full
def test_a_run_with_padded_weights_goes_on_where_nothing_is_padded_with_the_same_losses(text, tmp_path, capsys):
    flags = lambda name, **changes: small(text, tmp_path / name, **UNEVEN, eval_every=3, **changes)  # noqa: E731
    assert main(["train", *flags("even", gtp=4, dp=2, tp=1, steps=3)]) == 0
    assert main(["train", *flags("moved", gtp=8, tp=1, steps=3)]) == 0
    assert (
        "state   54.4 kB of weights and optimizer on each device; an even share is 51.8 kB" in capsys.readouterr().out
    )
    assert main(["train", f"--out={tmp_path / 'moved'}", "--resume", "--step=2", "--gtp=4", "--dp=2"]) == 0
    assert losses(tmp_path / "moved", "loss") == pytest.approx(losses(tmp_path / "even", "loss"), rel=1e-4)
    manifests = [Checkpoints(tmp_path / name / "checkpoints", read_only=True).manifest(2) for name in ("moved", "even")]
    shapes = [{name: leaf["shape"] for name, leaf in one["leaves"].items()} for one in manifests]
    assert shapes[0] == shapes[1], "a checkpoint does not depend on the mesh"


def test_a_state_that_exceeds_the_memory_of_a_device_is_refused_before_anything_is_compiled(
    text, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(_held, "device_memory", lambda: DeviceMemory(limit=53_000, free=0))
    named = "gtp 8 54.4 kB 51.8 kB 53 kB --gtp `gtp-jax inspect`"
    refused(capsys, named, "train", *small(text, tmp_path / "run", **UNEVEN, gtp=8, tp=1))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_load_of_experts_is_logged_each_step_and_their_options_are_the_models(text, tmp_path, capsys):
    run = dict(gtp=2, ep=2, tp=2, eval_every=4, save_every=4, preset="tiny-moe")
    model = dict(router_bias_rate=0.001, shared_hidden=32, transport="padded")
    train(small(text, tmp_path / "run", steps=4, **run, **model))
    steps = [record for record in read_records(tmp_path / "run") if "loss" in record]
    assert len(steps) == 4 and all(1 <= record["expert_load"] <= 8 / 2 for record in steps)
    saved = Checkpoints(tmp_path / "run/checkpoints", read_only=True).manifest()["extra"]["model"]
    assert saved["routing"] == {"bias_rate": 0.0} and saved["shared_hidden"] == 32
    # without a bias there is no load to report; and the parameters are another model's
    plain = small(text, tmp_path / "plain", steps=1, **run)
    refused(capsys, "router_bias_rate None 0.0 shared_hidden 0 32", "train", *plain, f"--from={tmp_path / 'run'}")
