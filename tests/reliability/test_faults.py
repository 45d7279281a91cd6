"""A sample of what goes wrong with two processes is found, and said in words; `faults.py` as a program tries all."""

import pytest
from reliability.faults import FAULTS, SAMPLE
from reliability.fleets import suffer


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in SAMPLE], ids=lambda f: f.name)
def test_a_fault_of_one_process_is_found_and_said(fault, tmp_path):
    outcome = suffer(fault, tmp_path / "run")
    assert outcome.good, f"{outcome.verdict} {outcome.codes}\n{outcome.printed[-8000:]}"  # a text is shown whole
