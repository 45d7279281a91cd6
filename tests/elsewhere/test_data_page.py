"""The program of docs/data.md runs, and its batches depend on the step alone."""

import numpy as np
import pytest

for package in ("grain", "datasets"):
    pytest.importorskip(package, reason=f'{package} is not installed: pip install "gtp_jax[data]"')

from docs.pages import ROOT, blocks  # noqa: E402


def test_the_pages_program_learns_and_its_rows_need_no_state():
    (program,) = blocks(ROOT / "docs" / "data.md", "python")
    names = {"__name__": "page"}
    exec(compile("\n" * (program.line - 1) + program.code, str(program.page), "exec"), names)
    losses, source = names["losses"], names["source"]
    assert losses[-1] < losses[0] - 0.5
    late, again = source[40], source[40]  # of the second epoch, with none before it
    np.testing.assert_array_equal(late["tokens"], again["tokens"])
    assert (late["tokens"] != source[15]["tokens"]).any() and late["tokens"].shape == (8, 64)
