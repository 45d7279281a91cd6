"""`gtp-jax bench checkpoint`: what it measures, prints, writes and refuses."""

import json
import os
import re
import sys
import time

import pytest
from messages import naming

import benchmarks
from benchmarks import CheckpointTimes
from benchmarks._process import run
from gtp_jax.models import PRESETS
from gtp_jax.runner.cli import main

TINY = ["--preset", "tiny", "--num-layers", "1", "--devices", "4", "--rounds", "1"]


@pytest.mark.slow
def test_the_command_measures_and_leaves_nothing_behind(tmp_path, capsys):
    record, picture = tmp_path / "times.json", tmp_path / "times.png"
    flags = [*TINY, "--contenders", "gtp_jax", "--dir", str(tmp_path)]
    assert main(["bench", "checkpoint", *flags, "--json", str(record), "--png", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "on 4 x cpu" in printed and "moved / restored" in printed and "did not complete" not in printed, printed
    assert "waiting for checksums: " in printed and "restoring on another mesh: " in printed
    assert sorted(os.listdir(tmp_path)) == ["times.json", "times.png"]
    (times,) = (CheckpointTimes(**times) for times in json.loads(record.read_text())["times"])
    assert times.who == "gtp_jax" and times.state_bytes > 2**20 and not times.failure
    assert len(times.saved) == len(times.restored) == len(times.moved) == 2
    assert 0 < times.median("blocked") < times.median("saved")
    assert 0 < times.ratio("save_checksums", "saved") < 1 and 0 < times.ratio("restore_checksums", "restored") < 1


@pytest.mark.slow
def test_plain_orbax_and_gtp_jax_run_side_by_side_and_what_fails_is_named(tmp_path, capsys):
    assert main(["bench", "checkpoint", *TINY, "--dir", str(tmp_path), "--torch-python", sys.executable]) == 0
    printed = capsys.readouterr().out
    assert "times plain orbax's, which computes no checksums" in printed, printed
    assert "torch" in printed.split("did not complete all rounds:")[1] or "torch " in printed, printed


def test_what_a_contender_did_before_its_time_was_over_counts(tmp_path, monkeypatch):
    script = "import json, sys, time; print('RESULT ' + json.dumps({'saved': 2.0, 'blocked': 0.5}), flush=True)\n"
    monkeypatch.setattr(
        benchmarks.SavingContender, "command", lambda *given: [sys.executable, "-c", script + "time.sleep(60)"]
    )
    heard = []
    (times,) = benchmarks.measure_checkpoints(
        benchmarks.chosen_saving_contenders(["orbax"]),
        PRESETS["tiny"],
        tmp_path,
        rounds=3,
        devices=1,
        platform="cpu",
        environment=dict(os.environ),
        timeout_s=1,
        report=lambda times, text: heard.append(text),
    )
    assert times.failure == "timed out after 1 of 4 saves in 1 s"
    assert times.median("saved") == 2.0 and times.median("restored") is None
    assert heard == ["saved 2 s, blocked 0.5 s", "ended"]


def test_a_program_is_ended_with_all_that_it_started():
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    begin = time.monotonic()
    code, output = run([sys.executable, "-c", parent], dict(os.environ), 1)
    assert code is None and time.monotonic() - begin < 30, "its output was waited for"  # the child holds the pipe


def test_the_first_round_counts_only_if_there_is_no_other():
    times = CheckpointTimes("gtp_jax", saved=[9.0, 1.0, 2.0, 3.0], restored=[5.0])
    assert times.median("saved") == 2.0 and times.median("restored") == 5.0 and times.median("moved") is None
    assert times.ratio("moved", "saved") is None
    assert times.ratio("saved", "restored") == 1.8, "a first round is compared with a first round"
    times.restored += [0.5, 1.0]
    assert times.ratio("saved", "restored") == 2.0, "of rounds that have both"


def test_bad_arguments_are_refused_before_anything_runs(tmp_path, capsys):
    for arguments, message in (
        (["--dir", str(tmp_path / "none")], f"`--dir` {tmp_path / 'none'} directory"),
        (["--json", str(tmp_path / "none" / "x.json")], "directory create"),
        (["--contenders", "tar"], "tar gtp_jax orbax torch-DCP async"),
        (["--preset", "405b", "--dir", str(tmp_path)], "--preset --num-layers --dir"),
    ):
        assert main(["bench", "checkpoint", *arguments]) == 2
        assert re.search(naming(message), capsys.readouterr().err), message


@pytest.mark.gpu
@pytest.mark.slow
def test_torch_joins_in_on_gpus(tmp_path, capsys):
    pytest.importorskip("torch")
    assert main(["bench", "checkpoint", "--preset", "100m", "--rounds", "1", "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "torch-DCP async" in printed and "did not complete" not in printed, printed
