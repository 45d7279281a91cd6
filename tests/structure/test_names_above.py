"""`gtp_jax` has the names that most users need, and `gtp_jax.nn` those of higher rooms, of which it needs none."""

import ast
import importlib
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from selection import others_full

import gtp_jax
from gtp_jax._old_names import OLD_NAMES

PACKAGES = ("gtp_jax", "gtp_jax.nn")
ROOT = Path(gtp_jax.__file__).parents[1]
MOVED = {name: room for room, names in OLD_NAMES.items() for name in names}
# What `gtp_jax` has, besides its packages.
NAMES = {
    *("make_mesh", "shard", "Dense", "Embed", "Attention", "MLP", "Stack", "Param", "init", "TrainState", "train_step"),
    *(
        "eval_step",
        "cross_entropy",
        "Checkpoints",
        "FP8",
        "MXFP8",
        "NVFP4",
        "use_recipe",
        "explain",
        "distributed",
        "recorder",
        "Trainer",
    ),
}

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
    packages = []
    for node in stub.body:
        if isinstance(node, ast.ImportFrom) and node.module is None:
            packages.extend(alias.asname for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module != "_public":
            room = ".".join([*parts[: len(parts) + 1 - node.level], node.module or ""])
            read.setdefault(room, []).extend(alias.asname for alias in node.names)  # those without `as` are private
    assert {room: tuple(names) for room, names in read.items()} == package.ABOVE
    assert tuple(packages) == getattr(package, "PACKAGES", ())


@pytest.mark.parametrize("name", PACKAGES)
def test_a_name_that_no_room_has_is_refused(name):
    package = importlib.import_module(name)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'mixture'"):
        _ = package.mixture


def modules_after(code: str) -> list[str]:
    """Returns the modules that a process has imported after this code."""
    code = f"import sys; {code}; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()


def test_importing_the_library_and_listing_its_names_imports_no_jax():
    found = modules_after("import gtp_jax; dir(gtp_jax); gtp_jax.__all__")
    assert {name for name in found if name.startswith("gtp_jax")} == {
        *("gtp_jax", "gtp_jax._names_above", "gtp_jax._old_names")
    }
    assert "jax" not in found


def test_using_the_library_loads_no_report():
    """They are for whoever asks: of a step's programs, and of models of any family."""
    found = modules_after("import gtp_jax; gtp_jax.Stack; gtp_jax.train_step; gtp_jax.shard")
    assert "gtp_jax.train" in found
    loaded = {f"gtp_jax.{room}" for room in ("inspect", "hlo", "models", "convert", "runner")} & set(found)
    assert not loaded


@pytest.mark.parametrize("room", others_full(["ops", "weights", "nn", "runner.data"], ["nn"]))
def test_a_package_can_be_imported_before_any_other(room):
    """While it is being imported, no name of `gtp_jax` may bring in a package above it."""
    assert f"gtp_jax.{room}" in modules_after(f"import gtp_jax.{room}")


def test_the_library_shows_the_names_that_users_need_and_their_packages_and_nothing_else():
    shown = {name for name in dir(gtp_jax) if not name.startswith("__")}
    assert shown == {*NAMES, *gtp_jax.PACKAGES}  # pyright: ignore
    everything: dict[str, object] = {}
    exec("from gtp_jax import *", everything)
    assert everything.keys() - {"__builtins__"} == NAMES
    assert everything["Stack"] is gtp_jax.nn.Stack and everything["explain"] is gtp_jax.inspect.explain
    for package in gtp_jax.PACKAGES:  # pyright: ignore
        assert getattr(gtp_jax, package) is importlib.import_module(f"gtp_jax.{package}")


@pytest.mark.parametrize("name", MOVED)
def test_an_old_name_still_works_and_warns_once_where_it_is_used(name):
    vars(gtp_jax).pop(name, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scope: dict[str, object] = {}
        exec(compile(f"from gtp_jax import {name}", "a user's file", "exec"), scope)
        found = getattr(gtp_jax, name)
    assert found is scope[name] is getattr(importlib.import_module(MOVED[name]), name)
    (warning,) = caught
    assert warning.category is DeprecationWarning and warning.filename == "a user's file"
    assert str(warning.message) == f"`gtp_jax.{name}` is deprecated: use {MOVED[name]}.{name}"
    assert name not in dir(gtp_jax)
    vars(gtp_jax).pop(name)


def test_no_file_uses_an_old_name():
    """Not even in texts, which tell users what to write."""
    folders = [ROOT / folder for folder in ("benchmarks", "docs", "examples", "ffi", "gtp_jax", "tests")]
    files = [
        path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".pyi", ".md", ".ipynb"}
    ]
    names = "|".join(MOVED)
    used = re.compile(rf"(?<![\w./-])gtp(_jax)?\.({names})\b|from gtp_jax import .*\b({names})\b")
    assert used.search("x = gtp." + "MoE(4)") and used.search("from gtp_jax " + "import Dense, lora")
    assert not used.search("work.gtp.pack") and not used.search("gtp.checkpoint")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*files, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if used.search(line)
    ]
    assert len(files) > 500 and not found


def test_an_attribute_that_an_import_lacks_is_not_taken_for_a_missing_name():
    """`from gtp_jax import Dense` would otherwise say only that there is no `Dense`."""
    lacking = 'import jax.tree_util; del jax.tree_util.register_dataclass; import gtp_jax; hasattr(gtp_jax, "Dense")'
    ran = subprocess.run([sys.executable, "-c", lacking], capture_output=True, text=True)
    assert "cannot be imported: module 'jax.tree_util' has no attribute 'register_dataclass'" in ran.stderr


def test_nn_has_no_name_that_type_checkers_do_not_know():
    """They read its stub, which has the names of `_public` and those of packages above."""
    own = {name for name in vars(gtp_jax.nn) if not name.startswith("_")}
    assert own <= {*vars(gtp_jax.nn._public), *sum(gtp_jax.nn.ABOVE.values(), ()), "ABOVE", "look_up"}  # pyright: ignore
