"""TensorBoard and Weights & Biases beside a run's own log."""

from __future__ import annotations

import importlib.util
import struct
import types
from typing import Any

import pytest

from gtp_jax.runner.flags import settings_of
from gtp_jax.runner.trainer import TrainConfig, _progress, _tracker
from gtp_jax.runner.trainer._directory import RunDirectory
from gtp_jax.runner.trainer._log import Log
from gtp_jax.runner.trainer._progress import Progress


def needs(name):
    package = _tracker._PACKAGES[name]
    reason = f'{package} is not installed: pip install "gtp_jax[{name}]"'
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=reason)


def events_of(directory):
    """The scalars of a directory of event files as TensorBoard shows them, by tag and step."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found = {}
    for file in sorted(directory.iterdir(), key=lambda path: path.name):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 12 + length + 4
            if event.session_log.status == SessionLog.START:
                found = {key: value for key, value in found.items() if key[1] < event.step}
            for value in event.summary.value:
                key = value.tag, event.step
                assert key not in found
                found[key] = value.simple_value
    return found


@needs("tensorboard")
def test_steps_behind_a_rollback_are_written_again(tmp_path):
    tracker = _tracker.open_trackers(["tensorboard"], tmp_path, 0, {})[0]
    for step in (1, 2, 3):
        tracker.write(step, {"loss": step})
    tracker.rewind(1)
    tracker.write(2, {"loss": 20})
    tracker.close()
    assert events_of(tmp_path / "tensorboard") == {("loss", 1): 1, ("loss", 2): 20}


@pytest.mark.full
@needs("wandb")
def test_weights_and_biases_is_written_offline(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.setenv("WANDB_API_KEY", 40 * "0")
    tracker = _tracker.open_trackers(["wandb"], tmp_path, 0, {})[0]
    tracker.write(1, {"loss": 2.125})
    tracker.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = file.read_bytes()
    assert b"loss" in content and b"2.125" in content


class Noted:
    def __init__(self):
        self.heard = []

    def write(self, step, values):
        self.heard.append((step, values))

    def rewind(self, step):
        self.heard.append(f"back to {step}")

    def close(self):
        self.heard.append("closed")


def test_a_tracker_takes_what_the_log_does(tmp_path):
    tracker = Noted()
    log = Log(tmp_path / "log.jsonl", 0, trackers=[tracker])
    log.write(1, loss=2.0, rate=0.1)
    log.rewind(0)
    log.write(1, loss=1.5)
    log.close()
    assert tracker.heard == [(1, {"loss": 2.0, "rate": 0.1}), "back to 0", (1, {"loss": 1.5}), "closed"]


@pytest.mark.parametrize("process", [0, 1])
def test_only_the_first_process_tracks(process, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(_progress.jax, "process_index", lambda: process)
    monkeypatch.setattr(_progress, "open_trackers", lambda names, *_: opened.extend(names) or [])
    job: Any = types.SimpleNamespace(
        limits=TrainConfig(log_to=("wandb",)), settings={}, per_step=(1, "tokens"), shown={}
    )
    with Progress(job, tmp_path / "log.jsonl", 0, lambda: None, lambda: None):
        pass
    assert opened == (["wandb"] if process == 0 else [])


def test_a_run_that_is_replaced_takes_what_it_tracked_along_and_nothing_else(tmp_path):
    directory = RunDirectory.of(tmp_path / "run")
    directory.prepare(settings_of(TrainConfig(log_to=("tensorboard",))), keep=False)
    for name in ("tensorboard", "wandb", "notes"):
        (directory.root / name).mkdir()
        (directory.root / name / "file").write_text("x")
    directory.prepare(settings_of(TrainConfig()), keep=True)
    assert (directory.root / "tensorboard" / "file").exists()
    directory.prepare(settings_of(TrainConfig(log_to=("tensorboard",))), keep=True)
    directory.prepare(settings_of(TrainConfig()), keep=False)
    assert sorted(path.name for path in directory.root.iterdir()) == ["config.json", "notes", "wandb"]
