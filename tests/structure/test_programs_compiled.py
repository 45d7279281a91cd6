"""The budget of XLA programs holds, and whoever exceeds it learns by which files."""

import subprocess
import sys
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from .programs_compiled import CONTRIBUTING, ProgramCount, budget, by_folder, recorded, verdict

CHECKOUT = CONTRIBUTING.parent


def test_above_the_budget_the_five_files_that_grew_most_are_named():
    before = Counter({f"tests/a/test_{i}.py": 10 for i in range(8)})
    after = before + Counter({f"tests/a/test_{i}.py": i for i in range(8)})
    assert verdict(after, before, after.total()) == ""
    text = verdict(after, before, after.total() - 1)
    assert f"{after.total()} XLA programs" in text and f"{after.total() - 1} " in text
    assert [line.split()[0] for line in text.splitlines() if "->" in line] == [
        f"tests/a/test_{i}.py:" for i in (7, 6, 5, 4, 3)
    ]


def test_the_record_is_within_the_budget_and_of_files_that_are_there():
    assert 0.8 * budget() < recorded().total() <= budget()
    assert not [file for file in recorded() if not (CHECKOUT / file).exists()]
    assert by_folder(Counter({"tests/a/x.py": 1, "tests/a/y.py": 2, "tests/b/z.py": 4})) == {"tests/a": 3, "tests/b": 4}


def test_a_program_counts_for_the_file_that_compiles_it_once(request):
    count = ProgramCount(request.config)
    count.pytest_runtest_setup(request.node)
    square = jax.jit(lambda x: x * x)
    values = jnp.asarray([1.0, 2.0])
    compiled = count.counts.total()
    square(values), square(values)
    assert count.counts.total() == compiled + 1
    assert set(count.counts) == {request.node.nodeid.partition("::")[0]}


@pytest.mark.full
def test_the_command_prints_the_programs_of_a_folder():
    command = [sys.executable, "-m", "tests.structure.programs_compiled", "-n", "0", "tests/structure/test_sizes.py"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0 and "in all; the budget is" in done.stdout, done.stdout + done.stderr
