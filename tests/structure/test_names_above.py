"""`gtp_jax.nn` has names of higher rooms, and needs none of them."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import gtp_jax

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
    tree = ast.parse(Path(package.__file__).read_text())
    ahead = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    parts = name.split(".")
    read: dict[str, list[str]] = {}
    for node in ahead.body:
        assert isinstance(node, ast.ImportFrom)
        room = ".".join([*parts[: len(parts) + 1 - node.level], node.module or ""])
        read.setdefault(room, []).extend(alias.name for alias in node.names)
    assert {room: tuple(names) for room, names in read.items()} == package.ABOVE


@pytest.mark.parametrize("name", PACKAGES)
def test_a_name_that_no_room_has_is_refused(name):
    package = importlib.import_module(name)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'mixture'"):
        _ = package.mixture


def test_importing_the_library_loads_no_report():
    """They are for whoever asks: of a step's programs, and of models of any family."""
    code = "import sys, gtp_jax; print(*(m for m in sys.modules if m.split('.')[:1] == ['gtp_jax']))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "gtp_jax.train" in found
    loaded = {f"gtp_jax.{room}" for room in ("inspect", "hlo", "models", "convert", "runner")} & set(found)
    assert not loaded
