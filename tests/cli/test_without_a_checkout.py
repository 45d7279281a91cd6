"""The wheel has the library and its commands, and not the benchmarks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import gtp_jax

ROOT = Path(__file__).parents[2]
CLONE = "they run in a checkout. Clone the repository, install it with `pip install -e .`"
# Runs several commands in one process, and prints the status of each, its output and its errors.
COMMANDS = """
import contextlib, io, json
from gtp_jax.runner.cli import main

found = []
for words in (["bench"], ["profile"], ["profile", "--preset", "1b"], ["profile", "--trace", "nowhere"], ["--help"]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
    found.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the modules of `folder` and the installed packages, but without those installed as editable."""
    path = os.pathsep.join([str(folder), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-S", *words], capture_output=True, text=True, env=environment, cwd=folder)


@pytest.mark.full
def test_bench_and_profile_say_where_the_benchmarks_are_and_other_commands_run(tmp_path):
    package = Path(gtp_jax.__file__).parent
    shutil.copytree(package, tmp_path / "gtp_jax", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (tmp_path / "benchmarks").mkdir()  # of the user's own
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise RuntimeError")
    ran = python(tmp_path, "-m", "gtp_jax", "bench", "step", "--tp", "2")
    assert ran.returncode == 2 and not ran.stdout and CLONE in ran.stderr
    ran = python(tmp_path, "-c", COMMANDS)
    assert ran.returncode == 0, ran.stderr
    *refused, trace, usage = json.loads(ran.stdout)
    for status, printed, errors in refused:
        assert status == 2 and not printed and CLONE in errors
    assert trace[0] == 2 and "nowhere" in trace[2] and "checkout" not in trace[2]
    assert usage[0] == 0 and "usage: gtp-jax" in usage[1]


@pytest.mark.slow
def test_the_wheel_has_every_module_of_the_package_and_no_benchmarks(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-C", "wheel.cmake=false", "-w", "wheel"]
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".git", "build", "*.so", "__pycache__", ".hypothesis"))
    subprocess.run([*build, str(source)], check=True, cwd=tmp_path)
    (wheel,) = (tmp_path / "wheel").glob("gtp_jax-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    package = Path(gtp_jax.__file__).parent
    modules = {f"gtp_jax/{path.relative_to(package)}" for path in package.rglob("*.py")}
    assert modules <= names and "gtp_jax/py.typed" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gtp_jax"}
    ran = python(tmp_path / "site", "-c", "import gtp_jax; print(gtp_jax.__file__)")
    assert ran.stdout.strip() == str(tmp_path / "site" / "gtp_jax" / "__init__.py"), ran.stderr
