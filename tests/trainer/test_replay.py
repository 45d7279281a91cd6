"""What a replay concludes from two runs on each of two placements."""

from __future__ import annotations

import dataclasses

import pytest

from gtp_jax.runner.trainer._replay import Replayed, conclude, replay

ONE = Replayed((0, 1), (3.0, 2.5), (1.0, 1.1), "a")
OTHER = dataclasses.replace(ONE, placement=(1, 0))
NAN = dict(losses=(3.0, float("nan")), norms=(1.0, float("nan")))
FAULTY = dict(losses=(3.0, 2.9), digest="b")


def changed(run, **changes):
    return dataclasses.replace(run, **changes)


@pytest.mark.parametrize(
    ("runs", "logged", "conclusion", "reason"),
    [
        ((ONE, ONE, OTHER, OTHER), 2.5, "reproducible", "the same bits twice, and the step is finite"),
        ((ONE, ONE, OTHER, OTHER), None, "reproducible", "and the step is finite"),
        (
            (changed(ONE, **NAN), changed(ONE, **NAN), changed(OTHER, **NAN), changed(OTHER, **NAN)),
            None,
            "reproducible",
            "and the step is not finite",
        ),
        ((ONE, changed(ONE, **FAULTY), OTHER, OTHER), 2.5, "device suspected", "the placement [0, 1] does not give"),
        ((ONE, ONE, OTHER, changed(OTHER, **NAN)), 2.5, "device suspected", "the placement [1, 0] does not give"),
        ((ONE, ONE, changed(OTHER, **FAULTY), changed(OTHER, **FAULTY)), 2.5, "device suspected", "is 2.5 on one"),
        ((ONE, ONE, changed(OTHER, digest="b"), changed(OTHER, digest="b")), 2.5, "inconclusive", "by rounding"),
        ((ONE, ONE, OTHER, OTHER), 2.9, "device suspected", "the run has logged the loss 2.9, and every replay gives"),
        ((ONE, changed(ONE, digest="b"), OTHER, changed(OTHER, digest="c")), 2.5, "inconclusive", "not deterministic"),
        ((ONE, ONE), 2.5, "inconclusive", "there is none to compare it with"),
    ],
)
def test_conclusion(runs, logged, conclusion, reason):
    found = conclude(runs, logged)
    assert found[0] == conclusion and reason in found[1]


@pytest.mark.parametrize("step", ["2", 2.0, True])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path, step):
    with pytest.raises(TypeError, match="`step` is .*; it must be a whole number"):
        replay(tmp_path, step)
