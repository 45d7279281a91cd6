"""`gtp-jax checkpoint` lists, shows, verifies and compares what a run has saved; `gtp-jax convert` names mistakes."""

import json
import re
import shutil

import pytest
from messages import naming
from trainer.runs import refused

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner.cli import main


def printed(capsys, *args) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out + err


@pytest.mark.full
def test_list_and_show_say_what_is_there(run, capsys):
    code, text = printed(capsys, "list", run)
    assert code == 0 and [line.split()[0] for line in text.splitlines()[2:]] == ["2", "4"]
    code, text = printed(capsys, "show", run, "--step", 2)
    assert code == 0 and "step 2, written by gtp_jax" in text and "params/embed/table" in text
    code, text = printed(capsys, "show", run / "checkpoints", "--json")
    assert json.loads(text)["leaves"]["params/embed/table"]["shape"] == [256, 128]


def test_diff_names_the_arrays_that_differ_and_reads_none(run, tmp_path, capsys):
    code, text = printed(capsys, "diff", f"{run}@2", f"{run}@4")
    assert code == 1 and "params/embed/table" in text and " differ\n" in text
    code, text = printed(capsys, "diff", f"{run}@4", run)
    assert code == 0 and "arrays are equal, 0 differ\n" in text
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints/4/arrays")
    code, text = printed(capsys, "diff", f"{run}@4", f"{copy}@4")
    assert code == 0 and re.search(naming("0 differ digests without reading"), text)
    assert printed(capsys, "verify", copy, "--step", 4)[0] == 1


def test_verify_names_the_step_and_the_file(run, capsys):
    code, text = printed(capsys, "verify", run)
    assert code == 0 and text.startswith("step 2: whole\nstep 4: whole\n")
    path = max((run / "checkpoints/2/arrays").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    before = path.read_bytes()
    path.write_bytes(before[:-1])
    code, text = printed(capsys, "verify", run)
    path.write_bytes(before)
    assert code == 1 and "step 2: 1 file(s) damaged" in text and str(path) in text and "step 4: whole" in text


def test_verify_finds_a_changed_byte_in_every_file_but_those_that_it_says_it_cannot(run, capsys):
    _, text = printed(capsys, "verify", run, "--step", 2)
    without_sum = set(re.search(r"without a checksum \((.*?)\)", text)[1].split(", "))
    checkpoints, step = Checkpoints(run / "checkpoints", read_only=True), run / "checkpoints/2"
    unnoticed = set()
    for path in sorted(step.rglob("*")):
        if path.is_file() and (before := path.read_bytes()):
            path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
            if not checkpoints.verify(2):
                unnoticed.add(str(path.relative_to(step)))
            path.write_bytes(before)
    assert unnoticed <= without_sum and len(without_sum) == 4


def test_what_is_not_there_and_a_step_in_place_of_a_run_are_named(run, tmp_path, capsys):
    step = run / "checkpoints/2"
    of_a_run = f"{step} one step {step.parent} --step 2"
    for words, named in (
        (["list", tmp_path / "missing"], f"no directory {tmp_path / 'missing'}"),
        (["show", run, "--step", 3], "no step 3"),
        (["verify", tmp_path], f"no complete step {tmp_path}"),
        (["diff", f"{run}@latest", run], f"'{run}@latest' 'latest' whole number"),
        (["diff", step, run], of_a_run),
    ):
        refused(capsys, named, "checkpoint", *words)


def test_mistakes_of_convert_are_named_with_status_2(run, tmp_path, capsys):
    long = tmp_path / ("x" * 250)  # allowed, but not with the ending that it has until it is complete
    out = tmp_path / "out"
    for words, message in (
        (("export", tmp_path / "missing", out), f"no directory {tmp_path / 'missing'}"),
        (("export", run, out, "--step", 7), "no step 7"),
        (("export", run, run), "directory not empty"),
        (("export", run, long), f"{long} `out` (File name too long)"),
        (("import", run, out), "config.json model_type None"),
    ):
        refused(capsys, message, "convert", *words)
        assert not out.exists()
    for arguments in (("--dtype", "int4"), ("--shard-gb", "0"), ("--shard-gb", "much")):
        with pytest.raises(SystemExit) as caught:
            main(["convert", "export", str(run), str(tmp_path / "out"), *arguments])
        assert caught.value.code == 2
