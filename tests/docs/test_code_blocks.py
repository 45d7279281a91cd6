"""Python blocks of README and docs run, each page's in order as one program; shell blocks name what exists."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from gtp_jax.runner.cli import parser

from .pages import DOCUMENTS, PAGES, ROOT, blocks, inline_code, name

# Blocks marked `<!-- not run: REASON -->`: raise it with a reason, so that none is left out by habit.
# Six of models-from-elsewhere.md, two of from-fsdp.md and one of data.md: tests in environments of their own run them.
# Five of experiments.md need GPUs, and one compiles for them.
NOT_RUN = 15

# Pages whose programs take seconds at most; the others are full.
BY_DEFAULT = {
    "README.md",
    "docs/conversion.md",
    "docs/how-it-works.md",
    "gtp_jax/formats/README.md",
}

_ENDS = {"&", "&&", "|", ";"}


def _runs(page: Path):
    return pytest.param(page, id=name(page), marks=[] if name(page) in BY_DEFAULT else [pytest.mark.full])


@pytest.mark.parametrize("page", [_runs(page) for page in PAGES if blocks(page, "python")])
def test_the_python_of_a_page_runs(page):
    scope = {"__name__": "__main__"}
    for block in blocks(page, "python"):
        if not block.reason:
            # the page's own line numbers, in tracebacks
            exec(compile("\n" * (block.line - 1) + block.code, name(page), "exec"), scope)


def test_blocks_that_do_not_run_are_counted():
    left_out = [block for page in PAGES for block in blocks(page, "python") if block.reason]
    assert len(left_out) == NOT_RUN, [f"{block.place}: {block.reason}" for block in left_out]


@pytest.mark.parametrize("page", DOCUMENTS, ids=name)
def test_the_commands_of_a_page_parse(page, capsys):
    lines = [line for block in blocks(page, "sh") for line in block.code.replace("\\\n", " ").splitlines()]
    for line in [*lines, *inline_code(page)]:
        words = _words(line)
        if "gtp-jax" in words[:2]:  # perhaps behind a launcher
            _check_command(words[words.index("gtp-jax") + 1 :], f"{name(page)}: {line}")
        if words and words[0].split("=")[0] in {"pytest", "python", "torchrun", "GTP_TEST_PLATFORM"}:
            missing = [word for word in words if word.endswith(".py") or word.startswith("tests/")]
            missing = [word for word in missing if not (ROOT / word).exists()]
            assert not missing, f"{name(page)} names what is not there: {missing}"
    capsys.readouterr()


def _words(line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # prose with an apostrophe
        return []
    end = next((i for i, word in enumerate(words) if word in _ENDS), len(words))
    return words[:end]


def _check_command(words: list[str], place: str) -> None:
    # a command in running text may leave out what it needs: then its name alone is checked
    named = words if any(word.startswith("-") for word in words) else [*words, "--help"]
    try:
        parser().parse_args(named)
    except SystemExit as end:
        assert end.code == 0, place
