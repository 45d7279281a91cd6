"""`gtp-jax bench checkpoint`: what it measures, prints, writes and refuses."""

import json
import os

import jax
import pytest

from gtp_jax.bench import CheckpointTimes
from gtp_jax.cli import main


def test_the_command_measures_both_and_leaves_nothing_behind(tmp_path, capsys):
    record = tmp_path / "times.json"
    flags = ["--preset", "tiny", "--layers", "1", "--rounds", "1", "--no-torch", "--dir", str(tmp_path)]
    assert main(["bench", "checkpoint", *flags, "--json", str(record)]) == 0
    printed = capsys.readouterr().out
    assert f"on {jax.device_count()} x" in printed and "moved / restored" in printed
    assert "of a save" in printed and "another mesh: " in printed
    assert os.listdir(tmp_path) == ["times.json"]
    ours, orbax = (CheckpointTimes(**times) for times in json.loads(record.read_text())["times"])
    assert (ours.who, orbax.who) == ("gtp_jax", "orbax")
    for times in (ours, orbax):
        assert times.state_bytes > 2**20 and len(times.moved) == 1
        assert 0 < times.median("blocked") < times.median("saved")
    assert 0 < ours.ratio("save_checksums", "saved") < 1 and 0 < ours.ratio("restore_checksums", "restored") < 1
    assert orbax.ratio("save_checksums", "saved") == 0


def test_bad_arguments_are_refused_before_anything_runs(tmp_path, capsys):
    for arguments, message in (
        (["--rounds", "0"], "`rounds` is 0; it is a whole number of at least 1"),
        (["--dir", str(tmp_path / "none")], f"{tmp_path / 'none'} is no directory; create it first, or name another"),
        (["--json", str(tmp_path / "none" / "x.json")], "is no directory; create it first"),
        (["--preset", "405b", "--dir", str(tmp_path)], "Choose a smaller --preset, fewer --layers, or another --dir"),
    ):
        assert main(["bench", "checkpoint", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.slow
def test_torch_joins_in_on_gpus(tmp_path, capsys):
    pytest.importorskip("torch")
    assert main(["bench", "checkpoint", "--preset", "100m", "--rounds", "1", "--dir", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "torch DCP" in printed and "failed" not in printed, printed
