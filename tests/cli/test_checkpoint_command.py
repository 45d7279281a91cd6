"""`gtp-jax checkpoint` lists, shows, verifies and compares what a run has saved."""

import json
import re
import shutil

import pytest

from gtp_jax.checkpoint import Checkpoints
from gtp_jax.runner.cli import main


def printed(capsys, *args) -> tuple[int, str]:
    code = main(["checkpoint", *map(str, args)])
    out, err = capsys.readouterr()
    return code, out + err


def test_list_and_show_say_what_is_there(run, capsys):
    code, text = printed(capsys, "list", run)
    assert code == 0 and [line.split()[0] for line in text.splitlines()[2:]] == ["2", "4"]
    code, text = printed(capsys, "show", run, "--step", 2)
    assert code == 0 and "step 2, written by gtp_jax" in text and "params/embed/table" in text
    code, text = printed(capsys, "show", run / "checkpoints", "--json")
    assert json.loads(text)["leaves"]["params/embed/table"]["shape"] == [256, 128]


def test_diff_names_the_arrays_that_differ(run, capsys):
    code, text = printed(capsys, "diff", f"{run}@2", f"{run}@4")
    assert code == 1 and "params/embed/table" in text and " differ\n" in text
    code, text = printed(capsys, "diff", f"{run}@4", run)
    assert code == 0 and "arrays are equal, 0 differ\n" in text


@pytest.mark.parametrize("step", ["²", "latest", ""])
def test_a_step_to_compare_that_is_no_number_is_named(run, capsys, step):
    code, text = printed(capsys, "diff", f"{run}@{step}", run)
    assert code == 2 and f"the step of '{run}@{step}' is {step!r}; it must be a whole number. `gtp-jax ch" in text


def test_diff_says_that_it_compares_what_was_saved_and_reads_no_array(run, tmp_path, capsys):
    copy = shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(copy / "checkpoints/4/arrays")
    code, text = printed(capsys, "diff", f"{run}@4", f"{copy}@4")
    assert code == 0 and " 0 differ\nCompared the digests in the manifests without reading arrays: see" in text
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


def test_what_is_not_there_is_named(run, tmp_path, capsys):
    code, text = printed(capsys, "list", tmp_path / "missing")
    assert code == 2 and f"no directory {tmp_path / 'missing'}" in text
    code, text = printed(capsys, "show", run, "--step", 3)
    assert code == 2 and "no step 3 in" in text
    code, text = printed(capsys, "verify", tmp_path)
    assert code == 2 and f"no complete step in {tmp_path}" in text


@pytest.mark.parametrize("verb", ["list", "show", "verify", "diff"])
def test_a_step_given_for_a_run_is_answered_with_what_to_give(run, verb, capsys):
    step = run / "checkpoints/2"
    code, text = printed(capsys, verb, step, *([run] if verb == "diff" else []))
    assert code == 2 and f"{step} is one step of a run. Give the directory that holds the steps, {step.parent}." in text
    assert "--step 2" in text
