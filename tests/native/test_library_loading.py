"""The compiled library: its facts are the library's, and a missing, broken or newer one is dealt with."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from messages import naming

import gtp_jax
from gtp_jax import native
from gtp_jax.formats import ELEMENTS, FORMATS
from gtp_jax.native import _library

needs_library = pytest.mark.skipif(not native.is_built(), reason=native.describe())


@needs_library
def test_formats_are_those_of_python():
    built = _library._facts()
    known = {described["name"]: described for described in built.formats}
    assert list(known) == list(FORMATS)  # in the order of their codes
    for index, (name, form) in enumerate(FORMATS.items()):
        assert form.code == index
        assert known[name] == {
            "name": name,
            "element": list(ELEMENTS).index(form.element),
            "element_max": form.element_max,
            "element_bits": form.element_bits,
            "block": list(form.block or (0, 0)),
            "scale": [None, "e4m3", "e8m0"].index(form.scale),
            "scale_max": form.scale_max or 1.0,
            "has_amax": form.has_amax,
            "transposed_columns": form.transposed_columns,
        }


def test_newer_library_is_refused_before_jax_sees_it():
    for version in ("0.99", "7.0"):
        with pytest.raises(ImportError, match=naming(version, "jaxlib Build again")):
            _library._check_version([int(part) for part in version.split(".")])


PROGRAM = """
import jax, jax.numpy as jnp
import gtp_jax as gtp
from gtp_jax import native
from gtp_jax.runner.cli import main
x = jnp.linspace(-3, 3, 64).reshape(2, 32)
q = gtp.ops.quantize(x, gtp.formats.NVFP4)
assert abs(gtp.ops.dequantize(q, jnp.float32) - x).max() < 0.51
print(native.describe())
main(["doctor"])
"""


def run_with(library: bytes | None, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the program with a copy of the package whose compiled library is these bytes, or missing."""
    source = Path(gtp_jax.__file__).parent
    shutil.copytree(source, folder / "gtp_jax", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    if library is not None:
        (folder / "gtp_jax" / "native" / _library._FILE).write_bytes(library)
    # without `site` and the working directory, no other copy of the package comes first
    paths = [str(folder), str(Path(jax.__file__).parents[1])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-S", "-P", "-c", PROGRAM]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_everything_works_without_the_library_and_the_doctor_says_what_to_do(tmp_path):
    ran = run_with(None, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert re.search(naming("C++ compiler", "C++20 nvcc", "pip install", "Training works"), ran.stdout)


@pytest.mark.full
def test_broken_library_fails_loudly(tmp_path):
    ran = run_with(b"not a shared object", tmp_path)
    assert ran.returncode != 0
    assert re.search(naming("ImportError", _library._FILE, "Build again: pip install"), ran.stderr)
