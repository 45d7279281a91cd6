"""A run shows what its model writes, and how to go on from there."""

import contextlib
import io
import re
import shlex

import pytest

from gtp_jax.generation import _programs
from gtp_jax.runner.cli import main
from gtp_jax.runner.data import load_corpus, read_text
from gtp_jax.runner.trainer._samples import block

from .runs import finish, processes, small


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """The directory of a run, what it printed, and the commands among that."""
    out, printed = tmp_path_factory.mktemp("run") / "run", io.StringIO()
    before = _programs.prefill._cache_size(), _programs.decode._cache_size()
    with contextlib.redirect_stdout(printed):
        assert main(["train", *small(text, out, num_layers=1, sample_tokens=20)]) == 0
    assert (_programs.prefill._cache_size(), _programs.decode._cache_size()) == tuple(n + 1 for n in before)
    commands = [shlex.split(line) for line in re.findall(r"^    gtp-jax (.*)$", printed.getvalue(), re.MULTILINE)]
    assert [command[0] for command in commands] == ["generate", "train", "convert", "inspect"]
    return out, printed.getvalue(), commands


def test_each_evaluation_shows_a_text_of_the_models_and_the_report_the_last(run, text, capsys):
    out, printed, (generate, *_) = run
    shown = re.findall(r"step +\d+   held-out loss.*\n((?:  \| .*\n)+)", printed)
    assert len(shown) == 3 and len(set(shown)) == 3  # steps 0, 4 and 8
    assert f"what the model writes\n\n{shown[-1]}" in (out / "report.txt").read_text()
    assert generate == ["generate", str(out), "--prompt", "The "]
    # what the checkpoint's model says on another mesh
    prompt = bytes(load_corpus(read_text((str(text),))).held_out[0].tokens[:24].tolist()).decode()
    assert main([*generate[:-1], prompt, "--max-new-tokens=20", "--dtype=float32"]) == 0
    assert shown[-1] == block(capsys.readouterr().out)


@pytest.mark.full
def test_the_commands_shown_go_on_from_the_run(run, capsys):
    out, _, (_, again, export, inspect) = run
    assert again == ["train", "--resume", "--out", str(out), "--steps", "16"]
    assert main(export) == 0
    capsys.readouterr()
    assert main(inspect) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ +\d+ +all-gather +forward +gtp +\w+ +u16 +\[\d+,\d+\]", printed, re.MULTILINE)
    assert re.search(r"^ +\d+ +reduce-scatter +backward +gtp", printed, re.MULTILINE)


def test_what_a_terminal_would_obey_is_not_printed():
    assert block("a\x1b[2J\n\n\tc\x00") == "  | a\N{REPLACEMENT CHARACTER}[2J\n  | \n  |     c\N{REPLACEMENT CHARACTER}"


@pytest.mark.slow
def test_processes_write_one_text_together(text, tmp_path):
    flags = small(text, tmp_path / "run", steps=1, gtp=4, tp=2, sample_tokens=4)
    with processes(2, flags, tmp_path / "of") as runs:
        for run in runs:
            finish(run)
            assert run.returncode == 0
    first, second = ((tmp_path / "of" / f"process{i}.txt").read_text() for i in range(2))
    assert first.count("  | ") >= 2 and "  | " not in second  # of steps 0 and 1, among lines of the progress bar
