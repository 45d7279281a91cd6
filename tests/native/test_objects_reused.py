"""A second build takes over objects of the first, where what they were made from is the same, and only there."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jaxlib
import pytest

FFI = Path(__file__).parents[2] / "ffi"
KERNEL = "kernels/CMakeFiles/gtp_kernels.dir/cpu/parallel.cc.o"
HANDLER = "handlers/CMakeFiles/gtp_native.dir/checks.cc.o"
CUDA = "kernels/CMakeFiles/gtp_kernels.dir/cuda/take.cu.o"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
DRY = "-n"  # says what ninja would compile, and compiles nothing
LONG_AGO = (1_000_000_000, 1_000_000_000)

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        not (COMPILER and shutil.which("cmake") and shutil.which("ninja") and FFI.is_dir()),
        reason="needs a C++ compiler, cmake, ninja and the sources in ffi/",
    ),
]


def installed(folder: Path) -> Path:
    """Returns a new folder with jaxlib's headers, as each `pip install` makes one for the build."""
    headers = Path(jaxlib.__file__).parent / "include"
    shutil.copytree(headers, folder / "jaxlib" / "include", copy_function=shutil.copyfile)
    (folder / "jaxlib" / "__init__.py").touch()
    return folder


def compiled(tmp_path: Path, packages: Path, *options: str, cuda: bool = False) -> set[str]:
    """Builds objects as scikit-build-core does, which removes CMake's files first; returns which were compiled."""
    built = tmp_path / "build"
    (built / "CMakeCache.txt").unlink(missing_ok=True)
    shutil.rmtree(built / "CMakeFiles", ignore_errors=True)
    environment = os.environ | {"PYTHONPATH": str(packages), "CXX": str(tmp_path / "compiler")}
    objects = [KERNEL, HANDLER, *([CUDA] if cuda else [])]
    definitions = [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Debug"]
    definitions += ["-DGTP_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=90a-real"] if cuda else ["-DGTP_CUDA=OFF"]
    configure = ["cmake", "-S", tmp_path / "ffi", "-B", built, "-G", "Ninja", *definitions]
    subprocess.run(configure, check=True, env=environment, timeout=120, stdout=subprocess.DEVNULL)
    ninja = ["ninja", *options, "-C", built, *objects]
    ran = subprocess.run(ninja, check=True, env=environment, timeout=300, capture_output=True, text=True)
    return {name for name in objects if re.search(rf"Building (CXX|CUDA) object {re.escape(name)}", ran.stdout)}


def compiler(tmp_path: Path, version: str) -> None:
    """Puts a compiler that names itself `version` where the builds look for one."""
    script = tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}"\nexec {COMPILER} "$@"\n')
    script.chmod(0o755)
    os.utime(script, LONG_AGO)


@contextlib.contextmanager
def changed(file: Path) -> Iterator[None]:
    """Changes a file for a while, to one with an old time, as a copied tree has."""
    text = file.read_text()
    file.write_text(text + "\n// changed\n")
    os.utime(file, LONG_AGO)
    yield
    file.write_text(text)
    os.utime(file, LONG_AGO)


def test_only_objects_whose_sources_headers_and_compiler_are_the_same_are_taken_over(tmp_path):
    shutil.copytree(FFI, tmp_path / "ffi")
    compiler(tmp_path, "1")
    first, second = installed(tmp_path / "first"), installed(tmp_path / "second")
    both = {KERNEL, HANDLER}
    assert compiled(tmp_path, first) == both
    assert compiled(tmp_path, second) == set()

    for file, expected in (
        ("kernels/cpu/parallel.cc", {KERNEL}),
        ("handlers/checks.h", {HANDLER}),
        ("include/gtp/jobs.h", both),
    ):
        with changed(tmp_path / "ffi" / file):
            assert compiled(tmp_path, first, DRY) == expected, file
    compiler(tmp_path, "2")
    assert compiled(tmp_path, first, DRY) == both
    compiler(tmp_path, "1")
    assert compiled(tmp_path, first, DRY) == set()
    with changed(second / "jaxlib/include/xla/ffi/api/ffi.h"):
        assert compiled(tmp_path, second, DRY) == {HANDLER}


@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
def test_an_install_in_another_environment_compiles_no_cuda_again(tmp_path):
    shutil.copytree(FFI, tmp_path / "ffi")
    compiler(tmp_path, "1")
    assert compiled(tmp_path, installed(tmp_path / "first"), cuda=True) == {KERNEL, HANDLER, CUDA}
    assert compiled(tmp_path, installed(tmp_path / "second"), cuda=True) == set()
    with changed(tmp_path / "ffi" / "kernels/cuda/take.cu"):
        assert compiled(tmp_path, tmp_path / "second", DRY, cuda=True) == {CUDA}
