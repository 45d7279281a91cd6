"""`gtp-jax train` from text to report."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shlex

import pytest
from matplotlib import image
from messages import naming

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.generation import _programs
from gtp_jax.models import PRESETS
from gtp_jax.runner._exit_codes import DIVERGED
from gtp_jax.runner.cli import main
from gtp_jax.runner.data import load_corpus, read_text
from gtp_jax.runner.trainer._events import read_lines
from gtp_jax.runner.trainer._text_block import block

from .runs import finish, losses, processes, small

TINY = dataclasses.replace(PRESETS["tiny"], num_layers=1)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    printed = io.StringIO()
    before = _programs.prefill._cache_size(), _programs.decode._cache_size()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        flags = dict(num_layers=1, steps=30, eval_every=10, save_every=10, keep=2, sample_tokens=20)
        assert main(["train", *small(text, out, **flags)]) == 0
    assert (_programs.prefill._cache_size(), _programs.decode._cache_size()) == tuple(n + 1 for n in before)
    return out, printed.getvalue()


def test_something_is_learned_and_shown_beside_the_unigram_entropy(run):
    out, printed = run
    unigram = float(re.search(r"to beat (\d\.\d+) nats per token: the unigram entropy", printed)[1])
    held_out = list(losses(out, "held_out").values())
    assert len(held_out) == 4 and held_out[0] > unigram > held_out[-1]
    assert f"held-out loss {held_out[-1]:.3f} nats per token" in printed
    assert re.search(rf"\d\.\d+ below the unigram entropy, {unigram:.3f}", printed)


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
def test_diverged_run_says_so_and_saves_nothing_more(text, tmp_path, capsys):
    out = tmp_path / "run"
    flags = small(text, out, num_layers=1, lr=1e30, warmup=0, save_every=100, gtp=2, tp=1, dp=4)
    assert main(["train", *flags]) == DIVERGED
    printed = capsys.readouterr().err
    assert re.search(r"(loss|gradient norm) of step \d is (nan|inf)", printed) and re.search(naming("--lr"), printed)
    assert Checkpoints(out / "checkpoints", read_only=True).latest() is None


def test_each_evaluation_shows_a_text_of_the_models_and_the_report_the_last(run, text, capsys):
    out, printed = run
    commands = [shlex.split(line) for line in re.findall(r"^    gtp-jax (.*)$", printed, re.MULTILINE)]
    assert [command[0] for command in commands] == ["generate", "train", "convert", "inspect"]
    generate = commands[0]
    shown = re.findall(r"step +\d+   held-out loss.*\n((?:  \| .*\n)+)", printed)
    assert len(shown) == 4 and len(set(shown)) == 4  # steps 0, 10, 20 and 30
    assert f"what the model writes\n\n{shown[-1]}" in (out / "report.txt").read_text()
    assert generate == ["generate", str(out), "--prompt", "The "]
    # what the checkpoint's model says on another mesh
    prompt = bytes(load_corpus(read_text((str(text),))).held_out[0].tokens[:24].tolist()).decode()
    assert main([*generate[:-1], prompt, "--max-new-tokens=20", "--dtype=float32"]) == 0
    assert shown[-1] == block(capsys.readouterr().out)


def test_what_a_terminal_would_obey_is_not_printed():
    assert block("a\x1b[2J\n\n\tc\x00") == "  | a\N{REPLACEMENT CHARACTER}[2J\n  | \n  |     c\N{REPLACEMENT CHARACTER}"


@pytest.mark.slow
def test_processes_write_one_text_together(text, tmp_path):
    flags = small(text, tmp_path / "run", steps=1, gtp=4, tp=2, sample_tokens=4)
    with processes(2, flags, tmp_path / "of") as runs:
        for run in runs:
            finish(run)
            assert run.returncode == 0
    first, second = ((tmp_path / "of" / f"process{i}.txt").read_text() for i in range(2))
    assert first.count("  | ") >= 2 and "  | " not in second  # of steps 0 and 1, among lines of the progress bar
