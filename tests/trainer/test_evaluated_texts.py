"""A run evaluates on texts of its own choice, each by itself, or on none."""

from __future__ import annotations

import jax
import pytest

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import TrainConfig

from .runs import WORDS, read_records, small, write_text

jax.devices()  # fixes the number of devices to what the suite runs with

SIZES = dict(num_layers=1, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=32, seq=16)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def losses(out, name: str) -> list[float]:
    return [record[name] for record in read_records(out) if name in record]


def test_each_text_has_its_own_loss_which_is_that_of_the_text(text, tmp_path, capsys):
    held_out = write_text(tmp_path / "like it", documents=3)
    other = tmp_path / "other.txt"
    other.write_text("".join(chr(200 + i % 50) for i in range(2000)))
    flags = [*small(text, tmp_path / "run", steps=8, eval_batches=9, lr=0.01, **SIZES), "--eval-data"]
    assert main(["train", *flags, str(held_out), str(other)]) == 0
    report = capsys.readouterr().out.partition("\nresult\n")[2]
    first, second = (losses(tmp_path / "run", f"loss on {path}") for path in (held_out, other))
    held = losses(tmp_path / "run", "held_out")
    assert len(first) == len(second) == len(held) == 3  # steps 0, 4 and 8
    assert abs(first[-1] - held[-1]) < 0.2 < second[-1] - held[-1]  # of the same words, and of others
    for path, loss in ((held_out, first[-1]), (other, second[-1])):
        (line,) = [line for line in report.splitlines() if line.startswith(f"loss on {path} ")]
        assert f" {loss:.3f} nats per token, " in line
    # a run that evaluates on them, or on nothing, trains as one that does not
    assert main(["train", *small(text, tmp_path / "none", steps=8, lr=0.01, **{**SIZES, "eval_every": 0})]) == 0
    assert losses(tmp_path / "none", "loss") == losses(tmp_path / "run", "loss")
    # a resumed run may leave them out
    assert main(["train", "--resume", f"--out={tmp_path / 'run'}", "--steps=9", "--eval-data"]) == 0
    assert len(losses(tmp_path / "run", f"loss on {other}")) == 3 and len(losses(tmp_path / "run", "held_out")) == 4
    assert TrainConfig.load(tmp_path / "run" / "config.json").eval_data == ()


def test_without_evaluations_there_is_no_loss_and_every_step_is_saved_as_asked(text, tmp_path, capsys):
    flags = small(text, tmp_path / "run", steps=4, eval_every=0, sample_tokens=4, **SIZES)
    assert main(["train", *flags]) == 0
    printed = capsys.readouterr().out
    assert "held-out loss" not in printed and "what the model writes" not in printed and "train loss" in printed
    assert losses(tmp_path / "run", "held_out") == [] and len(losses(tmp_path / "run", "loss")) == 4
    assert Checkpoints(tmp_path / "run" / "checkpoints", read_only=True).steps() == [2, 4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--eval-data", "nothing here"], "`eval_data` nothing here"),
        (["--eval-data", "{short}"], "short.txt of `eval_data` has 4, but one sequence of 16 needs 17. Leave it out"),
        (["--eval-data", "{short}", "--eval-every=0"], "`eval_every` is 0, so nothing is evaluated"),
        (["--eval-every=-1"], "`eval_every` is -1; it must be a whole number of at least 0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(text, tmp_path, flags, message, capsys):
    short = tmp_path / "short.txt"
    short.write_text(WORDS[0])
    flags = [flag.format(short=short) for flag in flags]
    assert main(["train", *small(text, tmp_path / "run", **SIZES), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
