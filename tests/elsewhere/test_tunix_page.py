"""The programs of docs/models-from-elsewhere.md run."""

import sys

import pytest

pytest.importorskip(
    "tunix", reason="google-tunix is not installed; tests/elsewhere/environment.sh makes an environment that has it"
)

from docs.pages import ROOT, blocks  # noqa: E402

from .families import FAMILIES, write  # noqa: E402


def test_the_pages_programs_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setattr(sys, "argv", ["program", str(write(FAMILIES["Llama 3"], tmp_path))])
    programs = blocks(ROOT / "docs" / "models-from-elsewhere.md", "python")
    assert len(programs) == 1 + len(FAMILIES)
    names = {"__name__": "page"}
    for program in programs:
        exec(compile("\n" * (program.line - 1) + program.code, str(program.page), "exec"), names)
        print("after", program.place)
    print(capsys.readouterr().out)
