"""TensorBoard and Weights & Biases beside a run's own log."""

from __future__ import annotations

import importlib.util
import json
import struct
import types

import pytest

from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import TrainConfig, _progress, _tracker
from gtp_jax.runner.trainer._directory import RunDirectory
from gtp_jax.runner.trainer._log import Log, read_log
from gtp_jax.runner.trainer._progress import Progress

from .runs import refused, small

SIZES = dict(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64, seq=16)
INSTALLED = [name for name, package in _tracker._PACKAGES.items() if importlib.util.find_spec(package)]


def needs(name):
    package = _tracker._PACKAGES[name]
    reason = f'{package} is not installed: pip install "gtp_jax[{name}]"'
    return pytest.mark.skipif(name not in INSTALLED, reason=reason)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A run of four steps that was resumed at the second, with all trackers that are installed."""
    directory = tmp_path_factory.mktemp("run") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_MODE", raising=False)
        patch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # where nobody listens
        patch.setenv("WANDB_API_KEY", 40 * "0")
        assert main(["train", *small(text, directory, steps=4, **SIZES), "--log-to", *INSTALLED]) == 0
        assert main(["train", "--resume", "--step=2", f"--out={directory}"]) == 0
    return directory


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


def logged(directory):
    """The numbers of a run's log, by name and step."""
    records = read_log(directory / "log.jsonl")
    return {(name, one["step"]): value for one in records for name, value in one.items() if name != "step"}


@pytest.mark.full
@needs("tensorboard")
def test_event_files_have_the_numbers_of_the_log(run):
    assert len(list((run / "tensorboard").iterdir())) == 2
    wanted = logged(run)
    assert {name for name, _ in wanted} >= {"loss", "held_out", "learning_rate", "grad_norm"}
    assert events_of(run / "tensorboard") == pytest.approx(wanted, rel=1e-6)


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
def test_weights_and_biases_is_written_offline(run):
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2  # one of each start
    content = files[-1].read_bytes()
    for name in ("loss", "held_out", "learning_rate"):
        assert name.encode() in content
    resumed = [value for (name, step), value in logged(run).items() if name == "loss" and step > 2]
    assert len(resumed) == 2 and all(json.dumps(value).encode() in content for value in resumed)


def test_a_package_that_is_not_there_is_named_with_the_command_before_anything_begins(
    text, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(_tracker.importlib.util, "find_spec", lambda name: None)
    for names, packages in ((["tensorboard"], "tensorboardX"), (["wandb", "tensorboard"], "wandb and tensorboardX")):
        named = f'`log_to` {" ".join(names)} {packages} pip install "gtp_jax[{",".join(names)}]"'
        refused(capsys, named, "train", *small(text, tmp_path / "run"), "--log-to", *names)
        assert not (tmp_path / "run").exists()


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
    job = types.SimpleNamespace(config=TrainConfig(log_to=("wandb",)))
    with Progress(job, 1.0, tmp_path / "log.jsonl", 0, lambda: None):
        pass
    assert opened == (["wandb"] if process == 0 else [])


def test_a_run_that_is_replaced_takes_what_it_tracked_along_and_nothing_else(tmp_path):
    directory = RunDirectory.of(tmp_path / "run")
    directory.prepare(TrainConfig(log_to=("tensorboard",)), keep=False)
    for name in ("tensorboard", "wandb", "notes"):
        (directory.root / name).mkdir()
        (directory.root / name / "file").write_text("x")
    directory.prepare(TrainConfig(), keep=True)
    assert (directory.root / "tensorboard" / "file").exists()
    directory.prepare(TrainConfig(log_to=("tensorboard",)), keep=True)
    directory.prepare(TrainConfig(), keep=False)
    assert sorted(path.name for path in directory.root.iterdir()) == ["config.json", "notes", "wandb"]
