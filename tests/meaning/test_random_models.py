"""Random draws of models, losses, meshes and recipes equal an oracle in plain JAX, or are refused as they may be.

`python -m tests.meaning.draws` computes more of them, in parts. `GTP_TEST_FIRST_DRAW` moves the seeds of all.
"""

import os

import pytest

from .draws import run

# from 70 on, forty draws have every cause of a silent error for which the grammar was written
FIRST, PART, USUAL, FULL, ALL = int(os.environ.get("GTP_TEST_FIRST_DRAW", "70")), 10, 20, 40, 400


def marks_of(place: int) -> list[pytest.MarkDecorator]:
    return [] if place < USUAL else [pytest.mark.full] if place < FULL else [pytest.mark.slow]


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, id=f"{PART} from {n}", marks=marks_of(n - FIRST)) for n in range(FIRST, FIRST + ALL, PART)],
)
def test_a_draw_equals_the_oracle_or_is_refused_as_it_may_be(first):
    found = run(range(first, first + PART))
    failed = {seed: one.why for seed, one in found.items() if one.kind == "failed"}
    assert not failed, "; ".join(f"seed {seed}: {why}" for seed, why in failed.items())
