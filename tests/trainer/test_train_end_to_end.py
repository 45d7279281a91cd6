"""`gtp-jax train` from text to report."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re

import pytest
from matplotlib import image
from messages import naming

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import PRESETS
from gtp_jax.runner._exit_codes import DIVERGED
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import TrainConfig
from gtp_jax.runner.trainer._events import read_lines

from .runs import losses, read_records, small

TINY = dataclasses.replace(PRESETS["tiny"], num_layers=1)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        assert main(["train", *small(text, out, num_layers=1, steps=30, eval_every=10, save_every=10, keep=2)]) == 0
    return out, printed.getvalue()


def test_something_is_learned_and_shown_beside_the_unigram_entropy(run):
    out, printed = run
    unigram = float(re.search(r"to beat (\d\.\d+) nats per token: the unigram entropy", printed)[1])
    held_out = list(losses(out, "held_out").values())
    assert len(held_out) == 4 and held_out[0] > unigram > held_out[-1]
    assert f"held-out loss {held_out[-1]:.3f} nats per token" in printed
    assert re.search(rf"\d\.\d+ below the unigram entropy, {unigram:.3f}", printed)


def test_what_is_printed_has_the_mesh_and_a_few_whole_lines_of_progress(run):
    printed = run[1]
    assert "mesh    dp 1 x gtp 4 x tp 2, 8 virtual CPU devices" in printed  # the default
    bar = [part for part in re.split(r"[\r\n]", printed) if "30/30" in part][-1]
    assert re.search(r"30/30 \[\d\d:\d\d<00:00,.*unigram=\d.*loss=\d.*tokens/s=\d", bar)
    assert "\r" not in printed
    shown = [line for line in printed.splitlines() if "step/s" in line or "s/step" in line]
    assert all(re.fullmatch(r" *\d+%\|.*\| \d+/30 \[.*\]", line) for line in shown)
    assert 2 <= len(shown) <= 8  # the first, the last, and one every 30 seconds, of 30 steps
    assert not re.search(r"^  \| ", printed, re.MULTILINE) and "what the model writes" not in printed  # none is wanted
    assert re.search(r"\nnext:\n(.*\n)*  what a step communicates, in bfloat16:\n    gtp-jax inspect --", printed)


def test_report_has_bytes_a_device_and_seconds_by_cause_and_ends_with_the_loss(run):
    out, printed = run
    report = (out / "report.txt").read_text()
    assert report in printed + "\n"
    assert "30 of 30" in report and f"{TINY.param_count():,} on dp 1 x gtp 4 x tp 2" in report
    for part in ("weights", "optimizer", "gradients", "activations"):
        assert re.search(rf"^{part} +[\d.]+ [kM]?B", report, re.MULTILINE)
    assert re.search(r"speed +[\d,]+ tokens/s", report)
    headings = [report.index(heading) for heading in ("time, all attempts", "memory ", "result", "held-out loss")]
    assert headings == sorted(headings)
    table = report.partition("time, all attempts")[2].partition("goodput")[0]
    assert re.search(r"^initialize +[\d.]+ ", table, re.MULTILINE) and "restore" not in table
    assert "all-gather" not in printed  # `gtp-jax inspect` lists what is communicated


def test_a_run_leaves_its_log_its_events_a_picture_and_the_latest_checkpoints(run):
    out, _ = run
    events = [event["event"] for event in read_lines(out / "events.jsonl")]
    assert events[: events.index("evaluate")] == ["start", "initialize", "ready", "compile"]
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 31))
    assert all({"grad_norm", "learning_rate", "tokens_per_s"} <= record.keys() for record in steps)
    assert [record["step"] for record in records if "held_out" in record] == [0, 10, 20, 30]
    pixels = image.imread(out / "loss.png")
    assert pixels.shape[0] >= 400 and pixels.shape[1] >= 800
    assert len({tuple(p) for p in pixels.reshape(-1, pixels.shape[2])[::7]}) > 20
    assert Checkpoints(out / "checkpoints", read_only=True).steps() == [20, 30]


@pytest.mark.full
def test_finished_run_can_be_extended_and_says_what_changed(run, capsys):
    out, _ = run
    assert main(["train", f"--out={out}", "--resume", "--steps=32"]) == 0
    printed = capsys.readouterr().out
    assert "changed steps from 30 to 32: the run goes on, but not as if never stopped" in printed
    assert "resumed at step 30" in printed and "32 of 32" in printed
    assert TrainConfig.load(out / "config.json").steps == 32
    assert [r["step"] for r in read_records(out) if "loss" in r] == list(range(1, 33))


def test_diverged_run_says_so_and_saves_nothing_more(text, tmp_path, capsys):
    out = tmp_path / "run"
    flags = small(text, out, num_layers=1, lr=1e30, warmup=0, save_every=100, gtp=2, tp=1, dp=4)
    assert main(["train", *flags]) == DIVERGED
    printed = capsys.readouterr().err
    assert re.search(r"(loss|gradient norm) of step \d is (nan|inf)", printed) and re.search(naming("--lr"), printed)
    assert Checkpoints(out / "checkpoints", read_only=True).latest() is None
