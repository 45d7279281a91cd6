"""`gtp_jax.nn` has names of higher rooms, and needs none of them."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import gtp_jax
from gtp_jax import _public

PACKAGES = ("gtp_jax", "gtp_jax.nn")

# Imports `nn` as `gtp_jax` does, but without what `gtp_jax` imports besides.
ALONE = """
import sys, types
package = types.ModuleType("gtp_jax")
package.__path__ = [sys.argv[1]]
sys.modules["gtp_jax"] = package
import gtp_jax.nn
above = [name for name in gtp_jax.nn.ABOVE if name in sys.modules]
assert not above, above
assert gtp_jax.nn.MoE is sys.modules["gtp_jax.experts"].MoE
"""


def test_nn_imports_nothing_above_it_until_a_name_of_it_is_read():
    where = str(Path(gtp_jax.__file__).parent)
    subprocess.run([sys.executable, "-c", ALONE, where], check=True)


@pytest.mark.parametrize("name", PACKAGES)
def test_names_above_are_those_of_the_rooms_that_have_them(name):
    package = importlib.import_module(name)
    for room, names in package.ABOVE.items():
        for one in names:
            assert getattr(package, one) is getattr(importlib.import_module(room), one)


@pytest.mark.parametrize("name", PACKAGES)
def test_type_checkers_read_the_same_names_above(name):
    package = importlib.import_module(name)
    assert package.__file__ is not None
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    parts = name.split(".")
    read: dict[str, list[str | None]] = {}
    for node in stub.body:
        if isinstance(node, ast.ImportFrom) and node.module != "_public":
            room = ".".join([*parts[: len(parts) + 1 - node.level], node.module or ""])
            read.setdefault(room, []).extend(alias.asname for alias in node.names)  # those without `as` are private
    assert {room: tuple(names) for room, names in read.items()} == package.ABOVE


@pytest.mark.parametrize("name", PACKAGES)
def test_a_name_that_no_room_has_is_refused(name):
    package = importlib.import_module(name)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'mixture'"):
        _ = package.mixture


def modules_after(code: str) -> list[str]:
    """Returns the modules that a process has imported after this code."""
    code = f"import sys; {code}; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def test_using_the_library_loads_no_report():
    """They are for whoever asks: of a step's programs, and of models of any family."""
    found = modules_after("import gtp_jax; gtp_jax.Stack")
    assert "gtp_jax.train" in found
    loaded = {f"gtp_jax.{room}" for room in ("inspect", "hlo", "models", "convert", "runner")} & set(found)
    assert not loaded


@pytest.mark.parametrize("room", ["ops", "weights", "nn", "runner.data"])
def test_a_package_can_be_imported_before_any_other(room):
    """While it is being imported, no name of `gtp_jax` may bring in a package above it."""
    assert f"gtp_jax.{room}" in modules_after(f"import gtp_jax.{room}")


def test_the_library_names_all_that_it_has_before_anything_is_used():
    found = modules_after("import gtp_jax; assert {'Stack', 'explain', 'formats', '__version__'} <= {*dir(gtp_jax)}")
    assert "gtp_jax._public" in found
    everything = {}
    exec("from gtp_jax import *", everything)
    assert everything["Stack"] is gtp_jax.Stack and everything["explain"] is gtp_jax.explain


def test_type_checkers_know_the_packages_from_which_the_library_takes_its_names():
    tree = ast.parse(Path(_public.__file__).read_text())
    read = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    packages = {alias.asname for node in read if node.module is None for alias in node.names}
    assert packages == {node.module for node in read if node.module is not None}


def test_a_name_that_a_test_has_replaced_stays_when_all_names_are_looked_up(monkeypatch):
    monkeypatch.setattr(gtp_jax, "generate", "another")
    assert not hasattr(gtp_jax, "mixture") and "generate" in dir(gtp_jax)
    assert gtp_jax.generate == "another"


def test_an_attribute_that_an_import_lacks_is_not_taken_for_a_missing_name():
    """`from gtp_jax import Dense` would otherwise say only that there is no `Dense`."""
    lacking = 'import jax.tree_util; del jax.tree_util.register_dataclass; import gtp_jax; hasattr(gtp_jax, "Dense")'
    ran = subprocess.run([sys.executable, "-c", lacking], capture_output=True, text=True)
    assert "cannot be imported: module 'jax.tree_util' has no attribute 'register_dataclass'" in ran.stderr


def test_only_names_for_users_have_no_underscore():
    """A tool that completes names shows them."""
    own = {name for name in vars(gtp_jax) if not name.startswith("_")}
    rooms = {path.parent.name for path in Path(gtp_jax.__file__).parent.glob("*/__init__.py")}
    assert own <= {*gtp_jax.__all__, *rooms, "ABOVE"}  # pyright: ignore


def test_nn_has_no_name_that_type_checkers_do_not_know():
    """They read its stub, which has the names of `_public` and those of packages above."""
    own = {name for name in vars(gtp_jax.nn) if not name.startswith("_")}
    assert own <= {*vars(gtp_jax.nn._public), *sum(gtp_jax.nn.ABOVE.values(), ()), "ABOVE", "look_up"}  # pyright: ignore
