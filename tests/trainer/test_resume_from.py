"""A run goes on from the latest whole step or the one asked for; `--force` and `--step` say what they cannot do."""

from __future__ import annotations

import codecs
import dataclasses
from pathlib import Path

import jax
import pytest

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import RunDirectory, TrainConfig, read_log
from gtp_jax.runner.trainer._corpus import read_corpus
from gtp_jax.runner.trainer._resume import check_tokens

from .runs import small, write_text


def damage(step: Path) -> None:
    path = step / "arrays" / "manifest.ocdbt"  # which every restore reads
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.slow
def test_a_run_falls_back_goes_back_and_refuses_a_linked_directory(tmp_path, capsys):
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
    assert "step 6 is damaged: " in said.err
    assert "continuing from step 4; later steps are set aside: " in said.err and "6.damaged" in said.err
    assert "resumed at step 4" in said.out and steps() == [2, 4, 6]
    again = [record for record in read_log(out / "log.jsonl") if "loss" in record]
    assert [record["loss"] for record in again] == [record["loss"] for record in never_stopped]

    assert main(["train", f"--out={out}", "--resume", "--step=2"]) == 0
    said = capsys.readouterr()
    assert "continuing from step 2; later steps are set aside: " in said.err and "4.abandoned" in said.err
    assert "resumed at step 2" in said.out and steps() == [2, 4, 6]
    assert main(["train", f"--out={out}", "--resume", "--step=3"]) == 2
    assert "no step 3 in" in capsys.readouterr().err
    damage(out / "checkpoints" / "2")
    assert main(["train", f"--out={out}", "--resume", "--step=2"]) == 2
    assert "2 is damaged:" in capsys.readouterr().err and steps() == [2, 4, 6]

    (out / "checkpoints").rename(tmp_path / "large_disk")
    (out / "checkpoints").symlink_to(tmp_path / "large_disk")
    assert main(["train", *flags, "--force"]) == 2
    assert steps() == [2, 4, 6]
    assert main(["train", f"--out={out}", "--resume", "--steps=8"]) == 0  # a link does no harm to a run that goes on
    assert steps() == [4, 6, 8] and (tmp_path / "large_disk" / "8").is_dir()
    (out / "checkpoints").unlink()
    assert main(["train", *flags, "--force", "--steps=2"]) == 0
    assert steps() == [2] and (tmp_path / "large_disk" / "8").is_dir()


@pytest.mark.parametrize("out", ["gtp-run", "deep/run"])
def test_the_text_of_a_run_inside_it_is_the_same_before_and_after(tmp_path, monkeypatch, out):
    monkeypatch.chdir(write_text(tmp_path))
    (tmp_path / out).mkdir(parents=True)
    (tmp_path / out / "notes.txt").write_text("mine")
    config = TrainConfig(data=(".",), out=out)
    with pytest.warns(UserWarning, match=rf"1 directories of runs in `data` are left out, such as {out}: "):
        before = read_corpus(config).fingerprint
    RunDirectory.of(config.out).prepare(config, keep=False)
    RunDirectory.of(config.out).report.write_text("a report")
    for reader in (config, TrainConfig(data=(".",), out="another")):
        with pytest.warns(UserWarning, match="1 directories of runs"):
            assert read_corpus(reader).fingerprint == before


def test_a_run_that_an_older_version_began_is_told_what_that_read_beside_the_text(tmp_path):
    text = write_text(tmp_path / "text")
    (text / "marked.txt").write_bytes(codecs.BOM_UTF8 + b"with a mark")
    config = TrainConfig(data=(str(text),), out=str(tmp_path / "another"))
    RunDirectory(text / "old").prepare(config, keep=False)
    older = read_corpus(dataclasses.replace(config, data=tuple(map(str, sorted(text.rglob("*.txt"))))))
    (text / "old" / "report.txt").write_text("what an older version took for text")
    with pytest.warns(UserWarning, match="1 directories of runs"):
        corpus = read_corpus(config)
    assert corpus.fingerprint == older.fingerprint
    check_tokens({"text": corpus.fingerprint}, corpus, config.seq, ".")
    said = (
        r"text or of the tokenizer has changed\. Or the run was started by an older version of gtp_jax, which also "
        r"read 1 directories of runs and the byte order marks of 1 files; these are now left out\. Continue with that"
    )
    with pytest.raises(ValueError, match=said):
        check_tokens({"text": "another"}, corpus, config.seq, ".")


@pytest.mark.slow
def test_a_run_inside_its_text_is_no_part_of_it_and_goes_on(tmp_path, monkeypatch, capsys):
    jax.devices()  # started here with its 8 devices, which the runs do not change
    monkeypatch.chdir(write_text(tmp_path))
    flags = [flag for flag in small(Path("."), Path("gtp-run"), steps=1) if not flag.startswith("--out")]
    assert main(["train", *flags]) == 0
    capsys.readouterr()
    with pytest.warns(UserWarning, match="1 directories of runs in `data` are left out, such as gtp-run: "):
        assert main(["train", "--resume", "--steps=2"]) == 0
    said = capsys.readouterr().out
    assert "resumed at step 1" in said and "changed data" not in said
    assert main(["train", *small(Path("."), Path("."), steps=1)]) == 2
    assert "`data` . is also `out`, so the run would train on" in capsys.readouterr().err
    assert not Path("config.json").exists()


def test_a_step_without_resume_and_a_link_to_nothing_are_refused(tmp_path, capsys):
    assert main(["train", f"--out={tmp_path / 'run'}", "--step=2"]) == 2
    assert "`--step` selects the step to resume from. Add --resume, or remove --step." in capsys.readouterr().err
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "nowhere")
    assert main(["train", f"--out={tmp_path / 'run'}"]) == 2
    assert "nowhere, which is not a directory. Create that directory, or delete the link." in capsys.readouterr().err


def test_force_refuses_a_linked_directory_and_otherwise_deletes_the_steps_first(tmp_path):
    config, directory = TrainConfig(), RunDirectory(tmp_path / "run")
    directory.prepare(config, keep=False)
    (tmp_path / "disk" / "2").mkdir(parents=True)
    directory.checkpoints.symlink_to(tmp_path / "disk")
    message = "checkpoints is a link to .*disk, and --force deletes nothing outside --out, so the new run would take"
    with pytest.raises(ValueError, match=message):
        directory.check(resume=False, force=True)
    directory.check(resume=True, force=False)
    directory.checkpoints.unlink()
    (tmp_path / "disk").rename(directory.checkpoints)
    directory.check(resume=False, force=True)
    directory.prepare(config, keep=False)
    assert sorted(path.name for path in directory.root.iterdir()) == ["config.json"]
