"""What a run does about steps that are not finite: every policy, and that a run stopped anywhere goes on the same."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from messages import naming

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import family_of, next_token_loss
from gtp_jax.runner._exit_codes import DIVERGED, MISTAKE
from gtp_jax.runner.cli import main
from gtp_jax.runner.data import Windows, _corpus
from gtp_jax.runner.trainer import TrainConfig, _family, _loop, read_lines, read_log
from gtp_jax.runner.trainer._divergence import Divergence, is_spike
from gtp_jax.runner.trainer._optimizer import optimizer_of

from .runs import small, write_text

BAD = ord("~")  # a byte that no other text has


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Words, and in a few places a byte of which the loss below is NaN."""
    jax.devices()
    folder = write_text(tmp_path_factory.mktemp("text"))
    for number in (3, 17):
        file = folder / f"{number:02d}.txt"
        content = file.read_text()
        file.write_text(content[:1000] + "~" + content[1001:])
    return folder


@pytest.fixture(autouse=True)
def loss_of_bad_text(monkeypatch):
    """A loss that is NaN where the text holds the bad byte, as a model's may be of some text."""

    def loss(model, batch):
        total, tokens = next_token_loss(model, batch)
        return jnp.where((batch["tokens"] == BAD).any(), jnp.nan, 1.0) * total, tokens

    def with_loss(model):
        return dataclasses.replace(family_of(model), loss=loss)

    monkeypatch.setattr(_family, "family_of", with_loss)


def run(text, out, *flags, steps=24, **changes) -> int:
    changes = dict(steps=steps, batch=32, eval_every=12, save_every=4, keep=9) | changes
    return main(["train", *small(text, out, **changes), *flags])


def events(out, *names):
    return [e for e in read_lines(out / "events.jsonl") if e["event"] in names]


def log(out):
    return [{k: v for k, v in r.items() if k != "tokens_per_s"} for r in read_log(out / "log.jsonl")]


def digests(out: Path, step: int):
    content = Checkpoints(out / "checkpoints", read_only=True).manifest(step)
    return {name: leaf["digest"] for name, leaf in content["leaves"].items()}, content["extra"]


def killed_after(monkeypatch, text, out, step, *flags, after_rollback=False, **changes) -> None:
    """A run that ends, without saving, once it has logged a step; the first time or after it has gone back."""
    rewound = [not after_rollback]
    log_step, rewind = _loop.Progress.step, _loop.Progress.rewind

    def step_and_die(self, number, metrics):
        log_step(self, number, metrics)
        if number == step and rewound[0]:
            raise SystemExit("killed")

    def note(self, number):
        rewound[0] = True
        rewind(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(_loop.Progress, "step", step_and_die)
        patch.setattr(_loop.Progress, "rewind", note)
        with pytest.raises(SystemExit, match="killed"):
            run(text, out, *flags, **changes)


def assert_same(one: Path, other: Path, step: int) -> None:
    assert log(one) == log(other)
    assert digests(one, step) == digests(other, step)


@pytest.mark.slow
def test_a_skipped_batch_changes_nothing_else_wherever_the_run_is_killed(text, tmp_path, monkeypatch):
    never, killed, ahead = tmp_path / "never", tmp_path / "killed", tmp_path / "ahead"
    assert run(text, never, "--nonfinite=skip") == 0
    (flagged,) = events(never, "nonfinite")
    assert flagged["step"] == flagged["batch"] > 12 and flagged["loss"] == "nan"
    assert [r["step"] for r in log(never) if "loss" in r] == list(range(1, 25))  # updates, not batches
    assert digests(never, 24)[1]["place"]["position"] == 25
    killed_after(monkeypatch, text, killed, flagged["step"] + 1, "--nonfinite=skip", save_every=12)
    assert main(["train", f"--out={killed}", "--resume", "--save-every=4"]) == 0
    assert len(events(killed, "nonfinite")) == 2 and len(events(killed, "start", "resume")) == 2  # nothing is deleted
    assert_same(never, killed, 24)
    monkeypatch.setitem(_loop._AHEAD, "cpu", 1)  # as on GPUs: a step is in flight when one is flagged
    assert run(text, ahead, "--nonfinite=skip") == 0
    assert_same(never, ahead, 24)


@pytest.mark.slow
def test_a_run_that_went_back_skips_the_data_since_wherever_it_is_killed(text, tmp_path, monkeypatch, capsys):
    flags = ("--nonfinite=rollback", "--nonfinite-in-a-row=1")
    never, killed = tmp_path / "never", tmp_path / "killed"
    assert run(text, never, *flags) == 0
    (back,) = events(never, "rollback")
    assert (back["step"], back["position"]) == (12, back["from_step"] + 1)
    assert re.search(naming(f"back step 12 number {back['from_step']} skipped"), capsys.readouterr().out)
    place = digests(never, 24)[1]["place"]
    assert (place["rollbacks"], place["position"]) == (1, 24 + back["position"] - 12)
    killed_after(monkeypatch, text, killed, 14, *flags, after_rollback=True)
    assert main(["train", f"--out={killed}", "--resume"]) == 0
    assert_same(never, killed, 24)
    assert run(text, never, *flags, "--force", save_every=100) == DIVERGED  # nothing to go back to
    assert re.search(naming("no checkpoint --lr"), capsys.readouterr().err)


@pytest.mark.slow
def test_a_run_that_stops_names_its_reason_and_saves_nothing_more(text, tmp_path, capsys):
    assert run(text, tmp_path / "run") == DIVERGED
    said = capsys.readouterr().err
    assert re.search(naming("step 16 nan --lr --warmup Batch 15"), said)
    assert re.search(naming("rank dp 0 gtp output gradient loss"), said)
    assert Checkpoints(tmp_path / "run/checkpoints", read_only=True).latest() == 12
    assert [e["status"] for e in events(tmp_path / "run", "end")] == ["failed"]
    assert main(["replay", f"--out={tmp_path / 'run'}", "--step=16"]) == 0  # from step 12, on two placements
    said = capsys.readouterr().out
    assert re.search(naming("step 12 reproducible"), said)
    assert said.count("nan") == 8 and said.count("\n0 1 2 3 4 5 6 7") == said.count("\n7 0 1 2 3 4 5 6") == 2
    assert main(["replay", f"--out={tmp_path / 'run'}", "--step=3"]) == 2
    assert re.search(naming(f"no checkpoint {tmp_path / 'run'}/checkpoints step 3"), capsys.readouterr().err)


@pytest.mark.slow
def test_ids_outside_the_vocabulary_end_a_run_whatever_its_policy(text, tmp_path, monkeypatch, capsys):
    def windows(tokens, *options, **more):
        return Windows(np.where(tokens == BAD, 300, tokens.astype(np.uint16)), *options, **more)

    monkeypatch.setattr(_corpus, "Windows", windows)
    assert run(text, tmp_path / "run", "--nonfinite=skip") == MISTAKE
    said = "error: `(tokens|targets)` has the id 300 at position .*: outside the vocabulary of 256. Ids are 0 to 255"
    assert re.search(said, capsys.readouterr().err)
    assert events(tmp_path / "run", "nonfinite", "rollback") == []
    assert Checkpoints(tmp_path / "run/checkpoints", read_only=True).latest() == 12


@pytest.mark.slow
def test_a_state_that_is_ruined_though_its_losses_are_finite_is_not_saved(text, tmp_path, monkeypatch, capsys):
    def ruined_by_the_sixth_update(config, model):
        count = lambda updates, made, params=None: (updates, jnp.where(made < 5, made + 1, jnp.nan))  # noqa: E731
        return optax.chain(
            optimizer_of(config, model), optax.GradientTransformation(lambda params: jnp.zeros(()), count)
        )

    monkeypatch.setattr(_family, "optimizer_of", ruined_by_the_sixth_update)
    assert run(text, tmp_path / "run") == DIVERGED
    assert re.search(naming("state step 8 not finite --lr"), capsys.readouterr().err)
    assert Checkpoints(tmp_path / "run/checkpoints", read_only=True).latest() == 4


@pytest.mark.slow
def test_a_spike_is_gone_back_from_and_its_data_skipped(text, tmp_path, monkeypatch):
    def loss(model, batch):
        total, tokens = next_token_loss(model, batch)
        return jnp.where((batch["tokens"] == BAD).any(), 500.0, 1.0) * total, tokens

    monkeypatch.setattr(_family, "family_of", lambda model: dataclasses.replace(family_of(model), loss=loss))
    assert run(text, tmp_path / "run", "--nonfinite=rollback", "--spike=12", batch=16, steps=36) == 0
    (spike,) = events(tmp_path / "run", "spike")
    (back,) = events(tmp_path / "run", "rollback")
    assert (back["step"], back["position"]) == (28, spike["batch"] + 1)
    assert max(r["loss"] for r in log(tmp_path / "run") if "loss" in r) < 20


def test_a_spike_is_judged_by_the_median_deviation():
    flat = tuple(2.0 + 0.01 * (i % 5) for i in range(40))
    assert not is_spike(2.1, flat, 8) and is_spike(2.3, flat, 8)
    assert is_spike(2.3, (*flat[:-3], 90.0, 90.0, 90.0), 8)  # which a mean and a variance would let pass
    assert not is_spike(1.0, flat, 8) and not is_spike(9.0, flat[:15], 8) and not is_spike(float("inf"), flat, 8)


def test_a_spike_cannot_be_skipped():
    with pytest.raises(ValueError, match=naming("`spike` `nonfinite` 'skip'")):
        TrainConfig(divergence=Divergence(spike=8.0, nonfinite="skip"))
    with pytest.raises(ValueError, match=naming("`nonfinite` 'ignore'")):
        Divergence(nonfinite="ignore")  # pyright: ignore[reportArgumentType]
