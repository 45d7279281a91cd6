"""Every mutant still has its place in the package, and the tests that it names are in the default tier.

`python -m tests.mutants` runs those tests.
"""

import dataclasses
import sys
from collections import Counter

import pytest
from parts import part

from .__main__ import chosen, main, of_part
from .judge import failures_without_mutants, verdicts
from .mutant import Mutant
from .table import MUTANTS


def test_the_text_of_each_mutant_stands_once_in_the_package():
    assert {mutant.name: mutant.places() for mutant in MUTANTS if len(mutant.places()) != 1} == {}


def test_each_mutant_changes_something_and_has_a_name_of_its_own():
    assert [mutant.name for mutant in MUTANTS if mutant.old == mutant.new] == []
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []


def test_the_tests_of_each_mutant_are_in_the_default_tier():
    assert failures_without_mutants([test for mutant in MUTANTS for test in mutant.tests], collected=True) == {}


def test_a_commit_chooses_a_part_of_the_mutants_and_says_how_to_run_the_others(monkeypatch, capsys):
    numbers = [3, 5, 8, 9, 12, 17, 20]
    assert chosen(numbers, 7, "ffffffff") == (numbers, "7 mutants")
    taken, said = zip(*(chosen(numbers, 3, f"{i:08x}") for i in range(3)), strict=True)
    assert taken == ([3, 9, 20], [5, 12], [8, 17])
    assert said[1] == "7 mutants, of which the 2 of part 2/3 run; the others: --part K/N instead of --most"
    assert [of_part(numbers, part(f"{k}/3")) for k in (1, 2, 3)] == [*taken]
    monkeypatch.setattr(sys, "argv", ["tests.mutants", "--most", "0"])
    with pytest.raises(SystemExit):
        main()
    assert "--most is 0; it must be at least 1" in capsys.readouterr().err


@pytest.mark.full
def test_a_mutant_is_killed_and_what_changes_nothing_survives_and_tests_that_cannot_judge_are_a_mistake():
    file = "tests/formats/test_spec_facts.py"
    mutant = Mutant(
        "another block", '("NVFP4", 0, (16, 16))', '("NVFP4", 0, (16, 32))', (f"{file}::test_bytes_per_element",)
    )
    mutants = [
        mutant,
        dataclasses.replace(mutant, new=f"{mutant.old}  "),
        dataclasses.replace(mutant, tests=(f"{file}::test_of_nothing",)),
        dataclasses.replace(mutant, old="no such text"),
        dataclasses.replace(mutant, new="("),
    ]
    kinds = [verdict.kind for verdict in verdicts(mutants, jobs=2)]
    assert kinds == ["killed", "survived", "mistake", "mistake", "mistake"]
