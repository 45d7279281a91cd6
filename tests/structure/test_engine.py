"""Imports go downward, and what a call enters is counted once."""

import json
from pathlib import Path

import grimp

import gtp_jax as gtp

from .engine import circles, entered, imports


def test_no_modules_import_each_other():
    assert circles(imports()) == []


def test_a_circle_has_the_modules_that_need_each_other_and_no_others():
    graph = grimp.ImportGraph()
    for importer, imported in ("ab", "bc", "cb", "ce", "de", "fg", "gh", "hf"):
        graph.add_import(importer=importer, imported=imported)
    assert sorted(map(sorted, circles(graph))) == [["b", "c"], ["f", "g", "h"]]


def test_functions_of_the_package_that_a_call_enters_are_counted_once():
    gtp.mesh.Roles()  # imports what it needs
    found = entered(lambda: [[gtp.mesh.Roles(), json.dumps("text")] for _ in range(2)])
    assert {(Path(file).name, name.split(".<locals>")[0]) for file, name in found} == {
        ("_roles.py", "Roles.__post_init__")
    }
