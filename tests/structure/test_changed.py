"""A change's slow tests are those of the rooms it touches and of the rooms above them; parts cover all of them once."""

import argparse
import os
import random
import re
import subprocess
import sys
from collections import Counter

import parts
import pytest
from messages import naming
from selection import pairwise

from ..changed import TESTED, TESTS, changed_files, folders_of, importers, part_for, room_of, rooms_of, with_those_above


def test_rooms_are_packages_wherever_they_lie():
    files = [
        "gtp_jax/nn/_dense.py",
        "gtp_jax/runner/cli/_a.py",
        "benchmarks/_b.py",
        "ffi/c.cu",
        "gtp_jax/_d.py",
        "docs/e.md",
    ]
    assert rooms_of(files, {}) == {"nn", "cli", "benchmarks", "native"}
    assert rooms_of(["gtp_jax/hook/gone.py", "gtp_jax/runner/elastic/page.html"], {}) == {"hook", "elastic"}
    assert rooms_of(["gtp_jax/_d.py"], {"gtp_jax._d": {"nn", "hook"}}) == {"nn", "hook"}
    assert room_of("gtp_jax.runner.data._loader") == "data"


def test_rooms_above_are_those_that_import():
    above = importers()
    assert {"chain", "train"} <= above["collectives"] and "nn" not in above["train"]
    assert {"nn", "checkpoint"} <= above["gtp_jax._random_keys"] and "hook" not in above["gtp_jax._random_keys"]
    assert with_those_above({"generation"}, {"generation": {"cli"}, "cli": {"benchmarks"}}, 1) == ["generation", "cli"]
    assert with_those_above({"generation"}, above, 0) == ["generation"]


def test_folders_are_those_of_touched_tests_then_of_rooms_and_every_room_has_one():
    assert folders_of(["nn"], ["tests/data/test_x.py"]) == ["data", "meaning", "nn", "parity"]
    folders = {path.name for path in TESTS.iterdir() if list(path.glob("test_*.py"))}
    tested = set().union(*(TESTED.get(folder, {folder}) for folder in folders))
    assert {room for room in importers() if "." not in room} - {"gtp_jax"} <= tested
    assert set(TESTED) <= folders


def test_folders_of_a_helper_are_those_whose_tests_import_it():
    assert folders_of([], ["tests/parity/plain_llama.py"]) == ["bench", "parity", "recipes", "train"]
    assert folders_of([], ["tests/trainer/conftest.py"]) == ["trainer"]
    assert {"hook", "ops", "structure"} < set(folders_of([], ["tests/messages.py"]))
    assert folders_of([], ["tests/conftest.py"]) == sorted({path.parent.name for path in TESTS.glob("*/test_*.py")})
    assert folders_of([], ["tests/data/gone.bin", "docs/a.md"]) == ["data"]


def test_a_change_has_files_that_are_new_gone_or_moved_under_both_names(tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a", "-C", str(tmp_path)]
    for name in ("stays", "changes", "goes", "moves"):
        (tmp_path / f"{name}.py").write_text(name)
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"], ["mv", "moves.py", "moved there.py"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "goes.py").unlink()
    (tmp_path / "changes.py").write_text("changed")
    (tmp_path / "comes.py").touch()
    assert changed_files("HEAD", tmp_path) == ["changes.py", "comes.py", "goes.py", "moved there.py", "moves.py"]


def test_parts_have_every_file_once_and_about_as_many_cases():
    draw = random.Random(0)
    cases = Counter({f"f{i}": draw.randrange(1, 40) for i in range(60)})
    taken = [parts.files_of_part(cases, k, 7) for k in range(1, 8)]
    assert sorted(file for part in taken for file in part) == sorted(cases)
    sizes = [sum(cases[file] for file in part) for part in taken]
    assert max(sizes) - min(sizes) < 20
    assert parts.part("3/8") == (3, 8)
    for text in ("0/2", "3/2", "x", "1/0"):
        with pytest.raises(argparse.ArgumentTypeError, match=naming(f"{text!r} K/N")):
            parts.part(text)


def test_tests_that_would_start_late_are_skipped_and_named(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import parts\npytest_addoption = parts.add_option\npytest_runtest_setup = parts.pytest_runtest_setup\n"
    )
    (tmp_path / "test_it.py").write_text("import time\ndef test_a(): time.sleep(1.1)\ndef test_b(): assert False\n")
    ran = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(tmp_path), "--within", "1"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    out = subprocess.run(ran, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (out.returncode, "1 passed, 1 skipped" in out.stdout) == (0, True), out.stdout + out.stderr
    assert "was not started within 1 s" in out.stdout


def test_a_part_is_chosen_by_the_commit_if_there_are_more_tests_than_may_run():
    assert part_for(200, 200, "ffffffff0") is None
    assert {part_for(401, 200, f"{i:08x}") for i in range(9)} == {"1/3", "2/3", "3/3"}


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2, 4), (2, 2, 2, 2, 2)], ids=str)
def test_combinations_contain_every_pair_and_the_usual_ones_every_value(sizes):
    lists = [[f"{name}{i}" for i in range(size)] for name, size in zip("abcde", sizes, strict=False)]
    rows = pairwise(*lists)
    usual = [row.values for row in rows if not row.marks]
    assert all({row[i] for row in usual} == set(values) for i, values in enumerate(lists))
    for i, first in enumerate(lists):
        for j in range(i + 1, len(lists)):
            assert {(row.values[i], row.values[j]) for row in rows} == {(a, b) for a in first for b in lists[j]}
    second, largest = sorted(sizes)[-2:]
    assert len(rows) <= 2 * second * largest
    assert [row.values for row in pairwise(*lists, usual=1) if not row.marks] == [rows[0].values]


def test_a_message_is_tested_by_its_parts_in_any_order_and_never_by_none():
    text = "`num_heads` is 4;\nit must divide `size` (2, 14), or pass `head_dim=`"
    assert re.search(naming("`size` (2, 14)", "`num_heads` 4 `head_dim=`"), text)
    for absent in ("14", "1", "heads", "`num_heads` 5", "(2, 15)"):
        assert (absent == "14") == bool(re.search(naming(absent), text))
    with pytest.raises(ValueError, match=naming("names nothing")):
        naming(" ")


@pytest.mark.parametrize(
    ("part", "longer"),
    [
        ("4", "0.4 4.5 14 4,096 -4 4x"),
        ("-4", "2-4 -4.5 -40"),
        ("--out", "--out-dir --outer"),
        ("layers.0", "layers.0.1 layers.01 sublayers.0"),
        ("tp=2", "tp=2.5 gtp=2 tp=20"),
    ],
)
def test_a_part_of_a_message_is_not_found_in_a_longer_word_number_or_flag(part, longer):
    assert not re.search(naming(part), longer)
    assert all(re.search(naming(part), text) for text in (part, f"({part})", f"is {part}, x", f"{part}.", f"`{part}`;"))
