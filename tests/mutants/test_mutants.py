"""Every mutant still has its place in the package, and the tests that it names are there.

`python -m tests.mutants` runs those tests.
"""

import dataclasses

import pytest

from .mutant import CHECKOUT, PACKAGE, Mutant, judge
from .table import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_a_mutant_stands_once_in_the_package(mutant):
    places = [path.relative_to(PACKAGE).as_posix() for path in mutant.places()]
    assert len(places) == 1, places
    assert mutant.old != mutant.new


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_of_a_mutant_are_there(mutant):
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (CHECKOUT / file).read_text()
        assert f"def {name.partition('[')[0]}" in text


def test_names_are_different():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.slow
def test_a_mutant_is_killed_and_what_changes_nothing_survives_and_tests_that_fail_without_it_are_a_mistake():
    facts = "tests/formats/test_spec_facts.py::test_bytes_per_element"
    mutant = Mutant("another block", '("NVFP4", 0, (16, 16))', '("NVFP4", 0, (16, 32))', (facts,))
    assert judge(mutant).kind == "killed"
    assert judge(dataclasses.replace(mutant, new=f"{mutant.old}  ")).kind == "survived"
    assert judge(dataclasses.replace(mutant, tests=(f"{facts}_of_none",))).kind == "mistake"
