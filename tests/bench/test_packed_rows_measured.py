"""`gtp-jax bench attention`: rows of more and more documents."""

import json
import re

import numpy as np
import pytest
from messages import naming

from benchmarks import _attention
from gtp_jax.runner.cli import main


@pytest.mark.parametrize("count, seq", [(1, 1024), (2, 1030), (5, 1024), (16, 1030), (64, 1024)])
def test_rows_have_as_many_documents_as_they_say(count, seq):
    for name, ids in _attention._rows(seq, count):
        starts = np.flatnonzero(np.diff(ids, prepend=-1))
        lengths = np.diff([*starts, seq])
        assert len(starts) == count
        assert len(np.unique(ids)) == count - (name == "id comes back")
        if name == "uneven":
            last = seq % 8 or 8
            assert lengths[-1] == last and set(lengths[1:-1]) <= {8} and lengths[0] == seq - 8 * (count - 2) - last
        else:
            assert lengths.max() - lengths.min() <= 1


@pytest.mark.full
def test_the_command_prints_and_writes_what_it_measured(capsys, tmp_path):
    path = tmp_path / "a.json"
    assert main(["bench", "attention", "--documents", "2", "4", "--json", str(path)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(path.read_text())["rows"]
    kinds = [(r["documents"], r["lengths"]) for r in rows]
    assert kinds == [(0, ""), (2, "even"), (2, "uneven"), (4, "even"), (4, "uneven"), (4, "id comes back")]
    assert all(r["seconds"] > 0 and f"{1e3 * r['seconds']:.3f}" in printed for r in rows)
    even = {r["documents"]: r["work"] for r in rows if r["lengths"] == "even"}
    # of 128 tokens, in documents of 64 and of 32
    assert even == {2: pytest.approx(2 * 64 * 65 / (128 * 129)), 4: pytest.approx(4 * 32 * 33 / (128 * 129))}


def test_more_documents_than_a_row_has_room_for_are_refused(capsys):
    assert main(["bench", "attention", "--documents", "128", "129"]) == 2
    assert re.search(naming("`documents` 129 128 tokens"), capsys.readouterr().err)
