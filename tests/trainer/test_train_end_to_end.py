"""`gtp-jax train` from text to report."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re

import jax
import pytest
from matplotlib import image

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import PRESETS
from gtp_jax.runner._exit_codes import DIVERGED
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import TrainConfig
from gtp_jax.runner.trainer._events import read_lines
from gtp_jax.runner.trainer._report import _documents

from .runs import read_records, small, write_text

TINY = dataclasses.replace(PRESETS["tiny"], num_layers=2)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    jax.devices()  # started here with its 8 devices, which no run below may change
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        assert main(["train", *small(text, out, steps=30, eval_every=10, save_every=10, keep=2)]) == 0
    return out, printed.getvalue()


def test_something_is_learned_and_shown_beside_the_unigram_entropy(run):
    out, printed = run
    unigram = float(re.search(r"to beat (\d\.\d+) nats per token: the unigram entropy", printed)[1])
    held_out = [record["held_out"] for record in read_records(out) if "held_out" in record]
    assert len(held_out) == 4
    assert held_out[0] > unigram > held_out[-1]
    assert f"held-out loss {held_out[-1]:.3f} nats per token" in printed
    assert re.search(rf"\d\.\d+ below the unigram entropy, {unigram:.3f}", printed)


def test_a_mesh_of_gtp_and_tp_on_8_virtual_devices_is_the_default(run):
    assert "mesh    dp 1 x gtp 4 x tp 2, 8 virtual CPU devices" in run[1]


def test_progress_shows_step_loss_speed_and_time_left(run):
    bar = [part for part in re.split(r"[\r\n]", run[1]) if "30/30" in part][-1]
    assert re.search(r"30/30 \[\d\d:\d\d<00:00,.*unigram=\d.*loss=\d.*tokens/s=\d", bar)


def test_progress_in_a_file_is_a_few_whole_lines(run):
    printed = run[1]
    assert "\r" not in printed
    shown = [line for line in printed.splitlines() if "step/s" in line or "s/step" in line]
    assert all(re.fullmatch(r" *\d+%\|.*\| \d+/30 \[.*\]", line) for line in shown)
    assert 2 <= len(shown) <= 8  # the first, the last, and one every 30 seconds, of 30 steps


def test_report_has_bytes_a_device_and_ends_with_the_loss(run):
    out, printed = run
    report = (out / "report.txt").read_text()
    assert report in printed + "\n"
    assert "30 of 30" in report and f"{TINY.param_count():,} on dp 1 x gtp 4 x tp 2" in report
    for part in ("weights", "optimizer", "gradients", "activations"):
        assert re.search(rf"^{part} +[\d.]+ [kM]?B", report, re.MULTILINE)
    assert re.search(r"speed +[\d,]+ tokens/s", report)
    headings = [report.index(heading) for heading in ("time, all attempts", "memory ", "result", "held-out loss")]
    assert headings == sorted(headings)
    assert "all-gather" not in printed  # `gtp-jax inspect` lists what is communicated


def test_report_of_a_fresh_run_counts_seconds_of_initialization_and_none_of_restoring(run):
    out, _ = run
    table = (out / "report.txt").read_text().partition("time, all attempts")[2].partition("goodput")[0]
    assert re.search(r"^initialize +[\d.]+ ", table, re.MULTILINE) and "restore" not in table


def test_the_record_of_a_fresh_run_has_one_event_of_each_activity_before_the_first_step(run):
    events = [event["event"] for event in read_lines(run[0] / "events.jsonl")]
    assert events[: events.index("evaluate")] == ["start", "initialize", "ready", "compile"]


def test_one_document_is_no_plural():
    assert [_documents(count) for count in (0, 1, 2)] == ["0 documents", "1 document", "2 documents"]


def test_log_has_a_line_a_step_and_an_evaluation(run):
    records = [json.loads(line) for line in (run[0] / "log.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 31))
    assert all({"grad_norm", "learning_rate", "tokens_per_s"} <= record.keys() for record in steps)
    assert [record["step"] for record in records if "held_out" in record] == [0, 10, 20, 30]


def test_learning_rate_warms_up_and_decays_to_a_tenth(run):
    rates = [record["learning_rate"] for record in read_records(run[0]) if "loss" in record]
    assert max(rates) == pytest.approx(0.003) == rates[3]  # after a tenth of the steps
    assert rates[:4] == sorted(rates[:4]) and rates[3:] == sorted(rates[3:], reverse=True)
    assert rates[-1] == pytest.approx(0.0003, rel=0.05)


def test_curve_is_a_picture(run):
    pixels = image.imread(run[0] / "loss.png")
    assert pixels.shape[0] >= 400 and pixels.shape[1] >= 800
    assert len({tuple(p) for p in pixels.reshape(-1, pixels.shape[2])[::7]}) > 20


def test_latest_checkpoints_are_kept(run):
    assert Checkpoints(run[0] / "checkpoints", read_only=True).steps() == [20, 30]


def test_no_text_is_shown_where_none_is_wanted(run):
    printed = run[1]
    assert not re.search(r"^  \| ", printed, re.MULTILINE) and "what the model writes" not in printed
    assert "\nnext:\n" in printed
    assert re.search(r"^  what a step communicates, in bfloat16:\n    gtp-jax inspect --", printed, re.MULTILINE)


def test_finished_run_can_be_extended_and_says_what_changed(run, capsys):
    out, _ = run
    assert main(["train", f"--out={out}", "--resume", "--steps=32"]) == 0
    printed = capsys.readouterr().out
    assert "changed steps from 30 to 32: the run goes on, but not as if never stopped" in printed
    assert "resumed at step 30" in printed and "32 of 32" in printed
    assert TrainConfig.load(out / "config.json").steps == 32
    assert [r["step"] for r in read_records(out) if "loss" in r] == list(range(1, 33))


@pytest.mark.slow
def test_tokenizer_file_sets_the_vocabulary(text, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    tokenizer.train_from_iterator((path.read_text() for path in text.iterdir()), trainer)
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    size = tokenizer.get_vocab_size() + 1  # a separator, as this one has none
    assert 256 < size <= 384  # of which the model has a multiple of 128
    out = tmp_path / "run"
    assert main(["train", *small(text, out, steps=1, tokenizer=file)]) == 0
    assert f"{TINY.param_count() + 2 * 128 * 128:,} parameters" in capsys.readouterr().out


@pytest.mark.slow
def test_force_replaces_a_run_with_one_of_another_schedule_and_the_same_losses(text, tmp_path):
    out = tmp_path / "run"
    found = []
    for flags in ([], ["--no-prefetch", "--microbatches=2", "--unroll=1", "--force"]):
        assert main(["train", *small(text, out, steps=2), *flags]) == 0
        losses = [r["loss"] for r in read_records(out) if "loss" in r]
        found.append((losses, (out / "report.txt").read_text().split("collectives")[1]))
        (out / "notes.txt").write_text("mine")
    (plain, collectives), (other, other_collectives) = found
    assert len(plain) == 2 and other == pytest.approx(plain, rel=1e-4)
    assert other_collectives != collectives
    assert (out / "notes.txt").read_text() == "mine"


def test_diverged_run_says_so_and_saves_nothing_more(text, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", *small(text, out, num_layers=1, lr=1e30, warmup=0, save_every=100)]) == DIVERGED
    printed = capsys.readouterr().err
    assert re.search(
        r"gtp-jax train: stopped: the (loss|gradient norm) of step \d is (nan|inf)\. Use a lower --lr", printed
    )
    assert Checkpoints(out / "checkpoints", read_only=True).latest() is None
