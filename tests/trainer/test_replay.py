"""What a replay concludes from two runs on each of two placements."""

from __future__ import annotations

import dataclasses
import re

import pytest
from messages import naming

from gtp_jax.runner.trainer._replay import Replayed, conclude

ONE = Replayed((0, 1), (3.0, 2.5), (1.0, 1.1), "a")
OTHER = dataclasses.replace(ONE, placement=(1, 0))
NAN = dict(losses=(3.0, float("nan")), norms=(1.0, float("nan")))
FAULTY = dict(losses=(3.0, 2.9), digest="b")


def changed(run, **changes):
    return dataclasses.replace(run, **changes)


@pytest.mark.parametrize(
    ("runs", "logged", "conclusion", "reason"),
    [
        ((ONE, ONE, OTHER, OTHER), 2.5, "reproducible", "same bits twice finite"),
        ((ONE, ONE, OTHER, OTHER), None, "reproducible", "step finite"),
        ((*[changed(ONE, **NAN)] * 2, *[changed(OTHER, **NAN)] * 2), None, "reproducible", "step not finite"),
        ((ONE, changed(ONE, **FAULTY), OTHER, OTHER), 2.5, "device suspected", "[0, 1]"),
        ((ONE, ONE, OTHER, changed(OTHER, **NAN)), 2.5, "device suspected", "[1, 0]"),
        ((ONE, ONE, changed(OTHER, **FAULTY), changed(OTHER, **FAULTY)), 2.5, "device suspected", "2.5 on one"),
        ((ONE, ONE, changed(OTHER, digest="b"), changed(OTHER, digest="b")), 2.5, "inconclusive", "rounding"),
        ((ONE, ONE, OTHER, OTHER), 2.9, "device suspected", "2.9"),
        ((ONE, changed(ONE, digest="b"), OTHER, changed(OTHER, digest="c")), 2.5, "inconclusive", "deterministic"),
        ((ONE, ONE), 2.5, "inconclusive", "none compare"),
    ],
)
def test_conclusion(runs, logged, conclusion, reason):
    found = conclude(runs, logged)
    assert found[0] == conclusion and re.search(naming(reason), found[1])
