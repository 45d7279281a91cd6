"""Mistakes are refused with one clear line and status 2, before anything is compiled."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import jax
import pytest
from messages import naming

from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import EventLog, Lock, RunDirectory, TrainConfig

from .runs import WORDS, small, write_text
from .test_origin_kept import tokenizer
from .test_resume_from import damage

_compiled: list[str] = []


def _note_program(event: str, duration: float, *, fun_name: str = "", **_: object) -> None:
    """Notes the programs that are compiled, except for those of digests, which a restore needs."""
    if "backend_compile" in event and "sums" not in fun_name:
        _compiled.append(fun_name)


jax.monitoring.register_event_duration_secs_listener(_note_program)


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """The directory of a run of three steps, each of which was saved."""
    out = tmp_path_factory.mktemp("run") / "run"
    _compiled.clear()
    assert main(["train", *small(text, out, steps=3, save_every=1, eval_every=0, num_layers=1)]) == 0
    assert _compiled  # so that the listener is known to listen
    return out


def contents(folder: Path) -> dict[Path, bytes]:
    """All files there, except for the record, to which a refused attempt to go on is added."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "events.jsonl"}


def refused(capsys, message: str, *flags: str, command: str = "train", compiles: bool = False) -> None:
    """Asserts that a run is refused with a message that names this, before anything is compiled."""
    _compiled.clear()
    capsys.readouterr()
    assert main([command, *flags]) == 2
    printed = capsys.readouterr()
    assert compiles or (not _compiled and printed.out == "")
    assert f"gtp-jax {command}: error: " in printed.err and "Traceback" not in printed.err
    assert re.search(naming(message), printed.err), printed.err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(preset="8B"), "`preset` '8B' 100m 1b '8b'"),
        (dict(steps=0), "`steps` 0 1"),
        (dict(lr="nan"), "`lr` nan 0 3.402823e+38"),
        (dict(warmup=8), "`warmup` 8 0 `steps`"),
        (dict(gtp=3, batch=9), "dp 1 gtp 3 8 devices"),
        (dict(tp=8), "tp 8 4 (8 query heads)"),
        (dict(gtp=4, tp=2, seq=33), "`seq` 33 tp 2"),
        (dict(batch=6), "`batch` 6 dp * gtp = 1 4"),
        (dict(data="/nowhere"), "`data` /nowhere exist"),
        (dict(seq=20_000), "8 sequences 20000 160001"),
        (dict(tokenizer="/nowhere.json"), "`tokenizer` /nowhere.json file"),
        (dict(num_processes=2), "--coordinator --process-id"),
        (dict(coordinator="h:1", num_processes=2, process_id=2), "--process-id 2 --num-processes"),
    ],
)
def test_mistake_is_named(changes, message, text, tmp_path, capsys):
    out = tmp_path / "run"
    refused(capsys, message, *small(text, out, **changes))
    assert not out.exists()


@pytest.mark.parametrize(
    ("failed", "message"),
    [
        (["4"], "`failed_devices` 4 dp 2 gtp 1 tp 2"),
        (["0", "1", "2", "3"], "no replica left"),
        (["3", "--replica-batches", "4", "4"], "8 rows `batch` 9"),
    ],
)
def test_a_plan_of_failed_devices_that_cannot_work_is_refused(failed, message, text, tmp_path, capsys):
    out = tmp_path / "run"
    refused(capsys, message, *small(text, out, dp=2, tp=2, batch=9), "--failed-devices", *failed)
    assert not out.exists()


def test_another_run_is_not_overwritten_unless_told(run, text, capsys):
    before = contents(run)
    refused(capsys, "already (--resume) (--force) --out", *small(text, run))
    refused(capsys, "/nowhere", *small("/nowhere", run), "--force")  # a mistake elsewhere must not cost the old run
    assert contents(run) == before


def test_places_that_are_no_directory_of_a_run_are_named(text, tmp_path, capsys):
    before = sorted(text.iterdir())
    refused(capsys, f"`data` {text} `out`", *small(text, text))
    assert sorted(text.iterdir()) == before
    refused(capsys, f"no run {tmp_path} resume", f"--out={tmp_path}", "--resume")
    refused(capsys, "`out` empty", *small(text, ""))
    refused(capsys, "UTF-8", *small(text, f"{tmp_path}/caf\udce9"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "config.json").write_text('{"preset": "tiny", "unknown": 1}')
    refused(capsys, "config.json configuration", f"--out={tmp_path}", "--resume")


def test_a_resumed_run_keeps_its_model_and_its_text(run, tmp_path, capsys):
    resume, before = [f"--out={run}", "--resume"], (run / "config.json").read_bytes()
    refused(capsys, "hidden_size 128 1024 --preset", *resume, "--preset=100m", compiles=True)
    assert not _compiled
    other = write_text(tmp_path / "other", documents=41)
    refused(capsys, "text tokenizer changed --data --tokenizer", *resume, f"--data={other}", compiles=True)
    assert (run / "config.json").read_bytes() == before


@pytest.mark.parametrize("ids", [30, 300], ids=["that the model has rows for", "beyond the model"])
def test_another_tokenizer_is_named_where_a_run_is_resumed_or_replayed(run, tmp_path, capsys, ids):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer([*WORDS, "?", *(f"unused{i}" for i in range(ids - len(WORDS) - 1))]))
    out = shutil.copytree(run, tmp_path / "run")
    named = "tokenizer.json differ text tokenizer changed"
    refused(capsys, f"{named} --data --tokenizer", f"--out={out}", "--resume", f"--tokenizer={path}", compiles=True)
    assert not _compiled
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**settings, "tokenizer": str(path)}))
    refused(capsys, f"{named} Restore", f"--out={out}", command="replay")


@pytest.mark.parametrize(
    "name",
    ["config.json.new", "loss.png", "checkpoints/", "checkpoints.deleted/", "lock/", "events.jsonl", "wandb/"],
)
def test_what_a_run_would_write_or_delete_is_left_alone_where_no_run_has_written_it(name, text, tmp_path, capsys):
    out = tmp_path / "run"
    file = out / name / "notes" if name.endswith("/") else out / name
    file.parent.mkdir(parents=True)
    file.write_text('{"time": 1, "event": "mine"}\n')
    for flags in ((), ("--force",), ("--resume",), ("--elastic",)):
        refused(capsys, f"{out} {name.rstrip('/')} no run written", *small(text, out), *flags)
    assert [path for path in out.rglob("*") if path.is_file()] == [file]
    assert file.read_text() == '{"time": 1, "event": "mine"}\n'


def test_what_a_start_leaves_that_was_killed_before_its_run_began_hinders_no_other(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.compiled.mkdir(parents=True)
    (directory.compiled / "program").touch()
    (directory.elastic / "rejoin.1").touch()
    EventLog(directory.events).write("start", devices=["GPU 0"], degrees={"gtp": 1})
    TrainConfig().save(tmp_path / "config.json.new")
    Lock(directory.lock).acquire()
    directory.check(resume=False, force=False)


AHEAD = ["--pregathered-layers=99"]  # refused where the step is traced
NO_CODES = "`pregathered_layers` 99 `Stack`"


def test_a_start_that_is_refused_before_its_first_step_leaves_the_directory_as_it_was(run, text, tmp_path, capsys):
    out, source = tmp_path / "run", shutil.copytree(run / "checkpoints", tmp_path / "source")
    damage(source / "3")
    for flags, message in ((AHEAD, NO_CODES), ([f"--from={source}", "--tokenizer=bytes"], "3 damaged")):
        refused(capsys, message, *small(text, out, num_layers=1), *flags, compiles=True)
        assert not list(out.iterdir())
    shutil.copytree(run, out, dirs_exist_ok=True)
    before, record = contents(out), (out / "events.jsonl").read_bytes()
    refused(capsys, NO_CODES, *small(text, out), "--force", *AHEAD, compiles=True)  # must not cost the old run
    assert contents(out) == before and (out / "events.jsonl").read_bytes() == record
