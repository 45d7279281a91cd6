"""What a user is told: bad options, a second supervisor, what happened and what it cost."""

from __future__ import annotations

import json
import re

import pytest
from messages import naming

from gtp_jax.runner.cli import main
from gtp_jax.runner.elastic import ElasticOptions, read_events, table
from gtp_jax.runner.elastic._devices import find_devices
from gtp_jax.runner.elastic._failure import how_it_ended
from gtp_jax.runner.elastic._requests import take_rejoins
from gtp_jax.runner.trainer import TrainConfig

# A failure of device 1 of two at 20 s, as a supervisor writes it.
EVENTS = [
    {"time": 0.0, "event": "start", "devices": ["GPU 0", "GPU 1"], "text": "2 processes"},
    {"time": 1.0, "event": "fleet", "devices": [0, 1], "text": "a fleet of 2"},
    {"time": 10.0, "event": "training", "step": 1},
    {"time": 15.0, "event": "snapshot", "step": 50, "fleet_step": 51},
    {"time": 20.5, "event": "failure", "kind": "killed", "device": 1, "step": 90, "last_sign": 20.0, "text": "killed"},
    {"time": 23.0, "event": "lost", "device": 1, "text": "GPU 1 is no longer used"},
    {"time": 23.0, "event": "verdict"},
    {"time": 23.0, "event": "fleet ended", "step": 90, "kept_step": 50},
    {"time": 23.1, "event": "fleet", "devices": [0], "text": "a fleet of 1"},
    {"time": 32.0, "event": "training", "step": 51},
    {
        "time": 32.0,
        "event": "recovered",
        "step": 50,
        "steps_lost": 40,
        "total_s": 12.0,
        **dict(detection_s=3.0, start_s=4.0, restore_s=1.0, compile_s=3.0, step_s=1.0),
        "text": "the run goes on",
    },
    {"time": 40.0, "event": "end", "step": 200, "text": "goodput 50.0%"},
]


def refused(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


def test_options_of_a_supervisor_need_one_and_it_starts_its_processes_itself(capsys, tmp_path):
    said = refused(capsys, "train", "--snapshot-interval", "3", "--retries", "2")
    assert re.search(naming("--snapshot-interval --retries --elastic"), said)
    flags = ("--coordinator", "127.0.0.1:9000", "--num-processes", "2", "--process-id", "0")
    said = refused(capsys, "train", "--elastic", "--out", str(tmp_path / "run"), *flags)
    assert re.search(naming("`--elastic` --coordinator"), said)


@pytest.mark.parametrize("name, value", [("snapshot_interval", 0), ("retries", 0), ("probe_timeout", -1.0)])
def test_options_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=naming(f"`{name}` {value}")):
        ElasticOptions(**{name: value})


def test_a_directory_without_a_run_is_told_from_one_that_is_not_there(capsys, tmp_path):
    for verb in (["show"], ["rejoin", "--device=1"]):
        said = refused(capsys, "elastic", *verb, str(tmp_path / "none"))
        assert re.search(naming(f"no directory {tmp_path / 'none'} --out --elastic"), said)
    assert re.search(naming(f"no run {tmp_path} --out"), refused(capsys, "elastic", "show", str(tmp_path)))
    TrainConfig().save(tmp_path / "config.json")
    said = refused(capsys, "elastic", "show", str(tmp_path))
    assert re.search(naming("events.jsonl not started --elastic"), said)


def test_a_rejoin_is_asked_for_by_a_command(capsys, tmp_path):
    rejoin = ["elastic", "rejoin", str(tmp_path)]
    assert re.search(naming("no run --elastic"), refused(capsys, *rejoin, "--device=1"))
    (tmp_path / "elastic").mkdir()
    assert re.search(naming("`device` -1"), refused(capsys, *rejoin, "--device=-1"))
    assert main([*rejoin, "--device=1"]) == 0
    (tmp_path / "elastic" / "rejoin.²").touch()  # a digit, and no number
    assert take_rejoins(tmp_path / "elastic") == [1]
    assert take_rejoins(tmp_path / "elastic") == []


def test_what_happened_is_shown_and_drawn(capsys, tmp_path):
    lines = [json.dumps(event) for event in EVENTS]
    (tmp_path / "events.jsonl").write_text("\n".join([*lines, '{"time": 41.0, "ev']))  # cut off by a kill
    capsys.readouterr()
    assert main(["elastic", "show", str(tmp_path), "--picture", str(tmp_path / "timeline.png")]) == 0
    said = capsys.readouterr().out
    assert table(EVENTS) in said and "GPU 1 is no longer used" in said
    last = table(EVENTS).splitlines()[-1].split()
    assert last == ["50", "40", "3.0", "4.0", "1.0", "3.0", "1.0", "12.0"]
    assert (tmp_path / "timeline.png").stat().st_size > 5000
    assert read_events(tmp_path / "events.jsonl") == EVENTS


def test_how_a_process_ended_is_said_in_words():
    for status, words in ((-9, "SIGKILL memory"), (-11, "SIGSEGV"), (3, "status 3")):
        assert re.search(naming(words), how_it_ended(status))


def test_gpus_are_those_that_are_visible(monkeypatch):
    monkeypatch.setattr("gtp_jax.runner.elastic._devices.has_gpu", lambda: True)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-abc")
    assert [device.environment["CUDA_VISIBLE_DEVICES"] for device in find_devices(8)] == ["2", "GPU-abc"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ValueError, match=naming("`--elastic` NVIDIA GPU")):
        find_devices(8)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert [device.name for device in find_devices(2)] == ["virtual CPU device 0", "virtual CPU device 1"]
