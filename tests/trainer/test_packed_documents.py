"""A run on whole documents: the same on every mesh and after a resume, and refused with other rows."""

from __future__ import annotations

import jax
import pytest

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner.cli import main

from .runs import read_records, small, write_text

jax.devices()  # fixes the number of devices to what the suite runs with

SIZES = dict(num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=32)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def packed(text, out, **changes):
    return small(text, out, **{**SIZES, "packing": "documents", "seq": 64, "steps": 4, **changes})


def losses(out):
    return {(r["step"], name): r[name] for r in read_records(out) for name in ("loss", "held_out") if name in r}


def test_losses_are_the_same_on_every_mesh_and_after_a_resume(text, tmp_path, capsys):
    def train(name, **changes):
        # a schedule that does not depend on where a run is to end
        assert main(["train", *packed(text, tmp_path / name, schedule="constant", warmup=0, **changes)]) == 0
        return losses(tmp_path / name)

    one, other = train("one", gtp=8, tp=1), train("other", dp=2, gtp=2, tp=2)
    assert "of whole documents; " in capsys.readouterr().out
    assert one == pytest.approx(other, rel=1e-5) and len(one) == 6
    train("parts", gtp=8, tp=1, steps=2)
    assert main(["train", "--resume", f"--out={tmp_path / 'parts'}", "--steps=4", "--gtp=4", "--tp=2"]) == 0
    assert losses(tmp_path / "parts")[4, "loss"] == pytest.approx(one[4, "loss"], rel=1e-5)


def test_other_rows_are_refused_on_resume(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", *packed(text, out, steps=2)]) == 0
    assert len(Checkpoints(out / "checkpoints", read_only=True).manifest()["extra"]["packing"]) == 32
    for flag in ("--seq=32", "--packing=stream"):
        assert main(["train", "--resume", f"--out={out}", "--steps=4", flag]) == 2
        assert "because documents are packed differently. Resume with the original --seq, --packing and --data" in (
            capsys.readouterr().err
        )
