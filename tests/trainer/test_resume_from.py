"""A run goes on from the latest whole step or the one asked for; `--force` and `--step` say what they cannot do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from messages import naming

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner.cli import main
from gtp_jax.runner.flags import settings_of
from gtp_jax.runner.trainer import RunDirectory, TrainConfig, read_log
from gtp_jax.runner.trainer._corpus import read_corpus

from .runs import small, write_text


def damage(step: Path) -> None:
    path = step / "arrays" / "manifest.ocdbt"  # which every restore reads
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.slow
def test_a_run_falls_back_from_a_damaged_step_and_goes_back_to_the_one_asked_for(tmp_path, capsys):
    text, out = write_text(tmp_path / "text"), tmp_path / "run"
    flags = small(text, out, steps=6, save_every=2, eval_every=6)
    steps = lambda: Checkpoints(out / "checkpoints", read_only=True).steps()  # noqa: E731
    assert main(["train", *flags]) == 0
    assert steps() == [2, 4, 6] and not (out / "lock").exists()
    never_stopped = [record for record in read_log(out / "log.jsonl") if "loss" in record]

    damage(out / "checkpoints" / "6")
    capsys.readouterr()
    assert main(["train", f"--out={out}", "--resume"]) == 0
    said = capsys.readouterr()
    assert re.search(naming("step 6 damaged"), said.err)
    assert re.search(naming("continuing step 4"), said.err) and "6.damaged" in said.err
    assert "resumed at step 4" in said.out and steps() == [2, 4, 6]
    again = [record for record in read_log(out / "log.jsonl") if "loss" in record]
    assert [record["loss"] for record in again] == [record["loss"] for record in never_stopped]

    assert main(["train", f"--out={out}", "--resume", "--step=2"]) == 0
    said = capsys.readouterr()
    assert re.search(naming("continuing step 2"), said.err) and "4.abandoned" in said.err
    assert "resumed at step 2" in said.out and steps() == [2, 4, 6]
    assert main(["train", f"--out={out}", "--resume", "--step=3"]) == 2
    assert re.search(naming("no step 3"), capsys.readouterr().err)
    damage(out / "checkpoints" / "2")
    assert main(["train", f"--out={out}", "--resume", "--step=2"]) == 2
    assert re.search(naming("2 damaged"), capsys.readouterr().err) and steps() == [2, 4, 6]


@pytest.mark.parametrize("out", ["gtp-run", "deep/run"])
def test_the_text_of_a_run_inside_it_is_the_same_before_and_after(tmp_path, monkeypatch, out):
    monkeypatch.chdir(write_text(tmp_path))
    (tmp_path / out).mkdir(parents=True)
    (tmp_path / out / "notes.txt").write_text("mine")
    config = TrainConfig(data=(".",), out=out)
    with pytest.warns(UserWarning, match=naming(f"1 directories runs `data` {out}")):
        before = read_corpus(config).fingerprint
    RunDirectory.of(config.out).prepare(settings_of(config), keep=False)
    RunDirectory.of(config.out).report.write_text("a report")
    for reader in (config, TrainConfig(data=(".",), out="another")):
        with pytest.warns(UserWarning, match=naming("1 directories runs")):
            assert read_corpus(reader).fingerprint == before


def test_a_step_without_resume_and_a_link_to_nothing_are_refused(tmp_path, capsys):
    assert main(["train", f"--out={tmp_path / 'run'}", "--step=2"]) == 2
    assert re.search(naming("`--step` --resume --step"), capsys.readouterr().err)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "nowhere")
    assert main(["train", f"--out={tmp_path / 'run'}"]) == 2
    assert re.search(naming("nowhere not a directory link"), capsys.readouterr().err)


def test_force_refuses_a_linked_directory_and_otherwise_deletes_the_steps_first(tmp_path):
    config, directory = TrainConfig(), RunDirectory(tmp_path / "run")
    directory.prepare(settings_of(config), keep=False)
    (tmp_path / "disk" / "2").mkdir(parents=True)
    directory.checkpoints.symlink_to(tmp_path / "disk")
    with pytest.raises(ValueError, match=naming("link --force --out")):
        directory.check(resume=False, force=True)
    directory.check(resume=True, force=False)
    directory.checkpoints.unlink()
    (tmp_path / "disk").rename(directory.checkpoints)
    directory.check(resume=False, force=True)
    directory.prepare(settings_of(config), keep=False)
    assert sorted(path.name for path in directory.root.iterdir()) == ["config.json"]
