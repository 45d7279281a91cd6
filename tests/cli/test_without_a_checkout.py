"""Packages: the sdist has what builds the wheels, and the pure wheel trains where there is no checkout."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import jax
import pytest

import gtp_jax

ROOT = Path(__file__).parents[2]
SOURCES = {path.relative_to(ROOT).as_posix() for path in (ROOT / "gtp_jax").rglob("*.py")}
KERNELS = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "ffi").rglob("*.*")
    if "tests" not in path.parts and path.suffix in (".cc", ".cu", ".h", ".cuh", ".txt", ".cmake")
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Returns a folder with an sdist, and the pure wheel that was built from it."""
    for package in ("build", "scikit_build_core"):
        pytest.importorskip(package)
    folder = tmp_path_factory.mktemp("dist")
    # what builds the kernels is not needed, and takes long to download
    options = ["--no-isolation", "--skip-dependency-check", "-C", "wheel.cmake=false", "--outdir", folder]
    ran = subprocess.run([sys.executable, "-m", "build", *options, ROOT], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


def test_the_sdist_has_what_builds_the_wheels_and_no_more(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert SOURCES | KERNELS <= names
    files = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"}
    assert {name.partition("/")[0] for name in names} == {"gtp_jax", "ffi", *files}
    assert not [name for name in names if re.search(r"\.so$|\.png$|__pycache__|^ffi/tests", name)]


def test_the_pure_wheel_has_every_module_and_is_for_every_platform(built):
    (wheel,) = built.glob("*.whl")
    assert wheel.name == f"gtp_jax-{gtp_jax.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert SOURCES | {"gtp_jax/py.typed", "gtp_jax/__init__.pyi"} <= names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"gtp_jax"}
    assert not [name for name in names if name.endswith(".so")]


def test_the_readmes_first_program_and_the_commands_run_from_the_pure_wheel_alone(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "environment", symlinks=True)
    paths = {"base": str(tmp_path / "environment"), "platbase": str(tmp_path / "environment")}
    site = Path(sysconfig.get_path("purelib", "venv", paths))
    pip = [sys.executable, "-m", "pip", "--python", tmp_path / "environment", "install", "--quiet", "--no-deps", wheel]
    subprocess.run(pip, check=True, timeout=120)
    # the packages that it needs, after its own; what is installed there as editable stays hidden
    (site / "needed.pth").write_text(str(Path(jax.__file__).parents[1]))

    def ran(program: str, *words: str | Path) -> str:
        command = [tmp_path / "environment" / "bin" / program, *words]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert ran("python", "-c", "import gtp_jax; print(gtp_jax.__file__)").startswith(str(site))
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "first.py").write_text(re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0])
    losses = re.findall(r"loss (\d\.\d{3})", ran("python", tmp_path / "first.py"))
    assert len(losses) == 3 and all(loss in readme for loss in losses)
    doctor = ran("gtp-jax", "doctor")
    assert "the pure wheel" in doctor and "Training works here" in doctor
    assert ran("gtp-jax", "--version").strip() == f"gtp_jax {gtp_jax.__version__}"
