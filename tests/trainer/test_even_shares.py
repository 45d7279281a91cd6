"""A run whose gtp divides no dimension of its weights stores even shares, and goes on where gtp divides them."""

import pytest

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.mesh import DeviceMemory
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import _held, read_log

from .runs import small, write_text

SIZES = dict(num_layers=1, hidden_size=36, num_heads=3, num_kv_heads=3, head_dim=12, intermediate_size=100)


def losses(out):
    return [record["loss"] for record in read_log(out / "log.jsonl") if "loss" in record]


def test_a_run_with_padded_weights_goes_on_where_nothing_is_padded_with_the_same_losses(tmp_path, capsys):
    flags = lambda name, **changes: small(text, tmp_path / name, **SIZES, eval_every=3, **changes)  # noqa: E731
    text = write_text(tmp_path / "text", documents=4)
    assert main(["train", *flags("even", gtp=4, dp=2, tp=1, steps=3)]) == 0
    assert main(["train", *flags("moved", gtp=8, tp=1, steps=3)]) == 0
    printed = capsys.readouterr()
    assert "stays whole" not in printed.err
    assert "state   54.4 kB of weights and optimizer on each device; an even share is 51.8 kB" in printed.out
    assert main(["train", f"--out={tmp_path / 'moved'}", "--resume", "--step=2", "--gtp=4", "--dp=2"]) == 0
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "even"), rel=1e-4)
    manifests = [Checkpoints(tmp_path / name / "checkpoints", read_only=True).manifest(2) for name in ("moved", "even")]
    shapes = [{name: leaf["shape"] for name, leaf in one["leaves"].items()} for one in manifests]
    assert shapes[0] == shapes[1], "a checkpoint does not depend on the mesh"


def test_a_state_that_exceeds_the_memory_of_a_device_is_refused_before_anything_is_compiled(
    tmp_path, monkeypatch, capsys
):
    text = write_text(tmp_path / "text", documents=4)
    monkeypatch.setattr(_held, "device_memory", lambda: DeviceMemory(limit=53_000, free=0))
    flags = small(text, tmp_path / "run", **SIZES, gtp=8, tp=1)
    assert main(["train", *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert not (tmp_path / "run").exists()
    assert line == (
        "gtp-jax train: error: each device of gtp 8 would hold 54.4 kB of weights and optimizer (an even share is "
        "51.8 kB), but has 53 kB of memory for arrays. Use more devices, or a higher --gtp; if devices have failed, "
        "repair them and resume. `gtp-jax inspect` shows which weights stay whole."
    )
