"""What lies where a run writes is the run's own file, or the run is refused before it starts: nothing waits for a FIFO,
and nothing outside the directory changes."""

from __future__ import annotations

import errno
import functools
import os
from pathlib import Path

import pytest
from messages import naming

from gtp_jax.runner.cli._errors import explanation
from gtp_jax.runner.trainer import EventLog, Lock, RunDirectory, TrainConfig, read_lines
from gtp_jax.runner.trainer._curve import draw_curve
from gtp_jax.runner.trainer._events import write_line
from gtp_jax.runner.trainer._log import Log
from gtp_jax.runner.trainer._own_file import replacing

from .runs import refused, small

FILES = ("config.json", "config.json.new", "lock", "log.jsonl", "events.jsonl", "report.txt", "loss.png")
FOLDERS = ("checkpoints", "checkpoints.deleted", "elastic", "tensorboard", "wandb")


@pytest.fixture
def begun(text, tmp_path):
    """The directory of a run that was killed before its first step."""
    out = tmp_path / "run"
    out.mkdir()
    TrainConfig(out=str(out), data=(str(text),), seq=32, batch=8).save(out / "config.json")
    return out


def link_outside(path):
    path.with_name("..").joinpath("outside").write_text("mine\n")
    path.symlink_to("../outside")


KINDS = {"a FIFO": os.mkfifo, "a link": link_outside, "a link to nowhere": lambda path: path.symlink_to("nowhere")}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_of_a_run_is_refused_by_its_name(kind, begun, text, capsys):
    config = (begun / "config.json").read_bytes()
    for name in (*FILES, *(FOLDERS if kind != "a link to nowhere" else FOLDERS[:2])):
        (begun / name).unlink(missing_ok=True)
        if name != "config.json":
            (begun / "config.json").write_bytes(config)
        KINDS[kind](begun / name)
        for flags in (["--resume"], ["--force"], ["--resume", "--elastic"]):
            refused(capsys, str(begun / name), "train", *small(text, begun), *flags)
        (begun / name).unlink()
    if kind == "a link":
        assert (begun.parent / "outside").read_text() == "mine\n"


def test_what_takes_the_name_of_a_step_and_is_no_directory_is_refused_before_that_step_is_due(begun, text, capsys):
    (begun.parent / "moved").mkdir()
    (begun / "checkpoints").mkdir()
    (begun / "checkpoints" / "4").symlink_to("../../moved")  # a step on another disk
    (begun / "checkpoints" / "notes").touch()
    RunDirectory(begun).check(resume=True, force=False)
    for kind in (*KINDS.values(), lambda path: path.touch()):
        kind(begun / "checkpoints" / "50")
        refused(capsys, f"{begun}/checkpoints/50 step", "train", *small(text, begun), "--resume")
        (begun / "checkpoints" / "50").unlink()


def test_a_link_to_a_folder_of_checkpoints_is_a_place_for_them(begun):
    (begun.parent / "disk").mkdir()
    for name in ("checkpoints", "tensorboard", "elastic"):
        (begun / name).symlink_to("../disk")
    RunDirectory(begun).check(resume=True, force=False)


def test_what_takes_the_place_of_a_file_meanwhile_is_not_opened_either(tmp_path):
    """Lines are added for as long as a run lasts."""
    outside = tmp_path / "outside"
    for kind in (os.mkfifo, lambda path: path.symlink_to(outside)):
        path = tmp_path / "file"
        kind(path)
        for write in (
            functools.partial(Log, path, 0),
            functools.partial(Log, path, 2),
            functools.partial(EventLog(path).write, "save"),
            Lock(path, stale_s=0).attempt,
        ):
            with pytest.raises((ValueError, OSError), match=str(path)):
                write()
        path.unlink()
    assert not outside.exists()
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match=naming("events.jsonl FIFO")):
        read_lines(tmp_path / "events.jsonl")


def test_a_picture_and_a_report_replace_a_name_and_not_what_else_has_the_file(tmp_path):
    backup, outside = tmp_path / "backup", tmp_path / "outside"
    for path in (backup, outside):
        path.write_text("mine")
    os.link(backup, tmp_path / "loss.png")  # as `cp -al` makes a backup
    (tmp_path / "report.txt").symlink_to(outside)
    draw_curve([{"step": 1, "loss": 2.0}], None, "", "a run", tmp_path / "loss.png")
    with replacing(tmp_path / "report.txt") as file:
        file.write(b"a report\n")
    assert backup.read_text() == outside.read_text() == "mine"
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG" and not (tmp_path / "report.txt").is_symlink()


def test_a_write_that_the_system_refuses_names_the_file(tmp_path):
    full = Path("/dev/full")
    with full.open("wb", buffering=0) as file, pytest.raises(OSError) as caught:
        write_line(file.fileno(), full, b"{}\n")
    assert explanation(caught.value) == f"/dev/full: {os.strerror(errno.ENOSPC)}"
    gone = tmp_path / "gone" / "loss.png"
    with pytest.raises(OSError) as caught:
        draw_curve([{"step": 1, "loss": 2.0}], None, "", "a run", gone)
    assert explanation(caught.value) == f"{gone}: {os.strerror(errno.ENOENT)}"
