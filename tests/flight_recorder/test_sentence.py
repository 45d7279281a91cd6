"""The sentence names who holds up whom, and where."""

import dataclasses

import pytest

from gtp_jax.flight_recorder import Report, sentence

HERE = "after backward of layers.17, before the end of the gather of layers.16 and the reduce of layers.18"
BEFORE = "after backward of layers.18, before the end of the gather of layers.17"


def report(process, place=HERE, number=100, **changes):
    recent = ((number - 1, "in backward of layers.17"), (number, place)) if place else ()
    values = dict(host="a", beat=7, step=5, running=True, over=True, recent=recent, python="load (data.py:3)")
    return Report(process=process, **{**values, **changes})


@pytest.mark.parametrize(
    ("reports", "silent", "missing", "said"),
    [
        (
            [report(0), report(1), report(2, "in backward of layers.17", 99, host="b", over=False)],
            {2: 6.2},
            [],
            "step 5 hangs: process 2 on b has given no sign of life for 6 s and is in backward of layers.17; "
            f"processes 0 and 1 on a wait for it {HERE}",
        ),
        (
            [report(0), report(1, "in the update", 80, step=4, running=False, over=False)],
            {},
            [],
            "step 5 hangs: process 1 on a has not begun step 5: its Python code is in load (data.py:3); "
            f"process 0 on a waits for it {HERE}",
        ),
        (
            [report(0), report(1), report(2, BEFORE, 98)],
            {},
            [],
            f"step 5 hangs: process 2 on a is behind, {BEFORE}; processes 0 and 1 on a wait for it {HERE}",
        ),
        (
            [report(0), report(1, "after backward of layers.16"), report(2)],
            {},
            [],
            "step 5 hangs: process 1 on a runs another program: stamp number 100 is `after backward of layers.16`, "
            f"and that of the others is `{HERE}`; processes 0 and 2 on a wait for it {HERE}",
        ),
        (
            [report(0), report(1, BEFORE)],
            {},
            [],
            f"step 5 hangs: processes run different programs: stamp number 100 is `{HERE}` in process 0 on a and "
            f"`{BEFORE}` in process 1 on a; process 0 on a waits {HERE}; process 1 on a waits {BEFORE}",
        ),
        (
            [report(0), report(1, running=False, over=False)],
            {},
            [],
            "step 5 hangs: process 1 on a has ended step 5: its Python code is in load (data.py:3); "
            f"process 0 on a waits for it {HERE}",
        ),
        (
            [report(0), report(1, step=4, running=False, over=False, closed=True)],
            {1: 4.0},
            [],
            f"step 5 hangs: process 1 on a has closed its recorder after step 4; process 0 on a waits for it {HERE}",
        ),
        (
            [report(0), report(1, "in the update", 80, compiles=True, over=False)],
            {},
            [],
            f"step 5 hangs: process 1 on a compiles a program that others have; process 0 on a waits for it {HERE}",
        ),
        (
            [report(0), report(1)],
            {},
            [],
            f"step 5 hangs: no process is behind the others; processes 0 and 1 on a wait {HERE}",
        ),
        (
            [report(0), report(1)],
            {},
            [2, 3],
            f"step 5 hangs: processes 2 and 3 have made no report; processes 0 and 1 on a wait {HERE}",
        ),
        (
            [report(0, ""), report(1, "")],
            {1: 9},
            [],
            "step 5 hangs: process 1 on a has given no sign of life for 9 s and is in its Python code, "
            "load (data.py:3); process 0 on a waits for it in its Python code, load (data.py:3)",
        ),
    ],
    ids=[
        "silent",
        "not begun",
        "behind",
        "another program",
        "two programs",
        "ended",
        "closed",
        "compiles",
        "all at one place",
        "missing",
        "no stamps",
    ],
)
def test_the_sentence_names_who_holds_up_whom(reports, silent, missing, said):
    assert sentence(reports, silent=silent, missing=missing) == said


def test_a_report_survives_json():
    own = report(3)
    assert Report.of_json({**dataclasses.asdict(own), "recent": [list(one) for one in own.recent]}) == own
