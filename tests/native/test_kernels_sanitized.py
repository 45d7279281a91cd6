"""The CPU kernels under AddressSanitizer and UndefinedBehaviorSanitizer, on random shapes, dtypes and alignments."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FFI = Path(__file__).parents[2] / "ffi"
CASES = int(os.environ.get("GTP_FUZZ_CASES", "1500"))
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None or not FFI.is_dir(), reason="needs a C++ compiler and the sources in ffi/")
def test_random_jobs_stay_within_their_buffers(tmp_path):
    program = tmp_path / "fuzz"
    sources = [FFI / "tests" / "fuzz.cc", *sorted((FFI / "kernels" / "cpu").glob("*.cc"))]
    flags = "-std=c++20 -O1 -g -ffp-contract=off -fno-trapping-math -pthread".split()
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    build = [COMPILER, *flags, *sanitizers, f"-I{FFI / 'include'}", *sources, "-o", program]
    subprocess.run(build, check=True, timeout=300)
    ran = subprocess.run([program, "7", str(CASES)], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout == f"{CASES} cases\n"
