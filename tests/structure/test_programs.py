"""The texts of programs say what is computed, and nothing else: names have no part in them, nor has the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from .normal_form import normal_form
from .programs import compare, text_of

NAMES = ("list", "penalty", "global_view")


@pytest.mark.full
def test_two_processes_write_the_same_texts_and_an_edited_one_is_shown(tmp_path, capsys):
    checkout = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.structure.programs", "--write", str(tmp_path), *NAMES]
    for seed in ("1", "5"):  # of the order of sets, which differs between the processes of a run
        subprocess.run(command, check=True, cwd=checkout, env={**os.environ, "PYTHONHASHSEED": seed})
        for name in NAMES:
            assert (tmp_path / f"{name}.mlir").read_text() == text_of(name)
    edited = tmp_path / "list.mlir"
    edited.write_text(edited.read_text().replace("stablehlo.tanh", "stablehlo.logistic", 1))
    assert compare(["list"], tmp_path) == 1
    shown = capsys.readouterr().out
    assert "-" in shown and "stablehlo.logistic" in shown and "1 of 1 programs differ: list" in shown


def lowered(inner, outer, *, result="y"):
    """The text of a program in which a jitted function of one name calls another of another."""
    called = lambda x: jnp.sin(x) + 1  # noqa: E731
    called.__name__ = inner
    body = jax.jit(called)
    outer_of = lambda x: {result: body(x) * body(2 * x)}  # noqa: E731
    outer_of.__name__ = outer
    return jax.jit(outer_of).lower(jnp.ones(3)).as_text()


def test_names_of_functions_and_results_are_left_out():
    one, other = lowered("a", "b"), lowered("c", "d", result="z")
    assert "@a(" in one and "@a(" not in other and "['z']" in other
    assert normal_form(one) == normal_form(other)


def test_functions_that_are_alike_are_one():
    def twice(share):
        one = jax.jit(lambda x: jnp.sin(x) + 1)
        other = one if share else jax.jit(lambda x: jnp.sin(x) + 1)
        return jax.jit(lambda x: one(x) * other(2 * x)).lower(jnp.ones(3)).as_text()

    assert twice(True).count("func.func") < twice(False).count("func.func")
    assert normal_form(twice(True)) == normal_form(twice(False))


def test_another_operation_within_a_function_is_another_text():
    def calls(function):
        return normal_form(jax.jit(lambda x: 2 * jax.jit(function)(x)).lower(jnp.ones(3)).as_text())

    assert calls(jnp.sin) != calls(jnp.cos)
