"""The CUDA kernels and the CPU kernels write the same bytes and no others, whatever pointers, strides and gaps."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FFI = Path(__file__).parents[2] / "ffi"
CASES = os.environ.get("GTP_FUZZ_CASES", "1000")
NVCC = shutil.which(os.environ.get("CUDACXX", "nvcc"))
PROGRAM = os.environ.get("GTP_FUZZ_CUDA")  # built elsewhere, for a machine without nvcc


@pytest.mark.full
@pytest.mark.skipif(not NVCC or not FFI.is_dir(), reason="needs nvcc, and ffi/")
def test_the_program_that_times_the_kernels_is_one_with_their_interface(tmp_path):
    flags = ["-std=c++20", "-arch=sm_90a", f"-I{FFI / 'include'}", "-c", "-o", tmp_path / "time_cuda.o"]
    subprocess.run([NVCC, *flags, FFI / "tests" / "time_cuda.cu"], check=True, timeout=300)


@pytest.mark.gpu
@pytest.mark.skipif(not (NVCC or PROGRAM) or not FFI.is_dir(), reason="needs nvcc, or $GTP_FUZZ_CUDA, and ffi/")
def test_random_jobs_give_the_bytes_of_the_cpu_kernels(tmp_path):
    program = PROGRAM or tmp_path / "fuzz_cuda"
    if NVCC and not PROGRAM:
        flags = "-std=c++20 -O2 -fmad=false --threads 0 -diag-suppress=128 -Xcompiler -ffp-contract=off".split()
        flags += ["-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_80,code=compute_80"]
        sources = [FFI / "tests" / "fuzz_cuda.cu"]
        sources += sorted([*(FFI / "kernels" / "cuda").glob("*.cu"), *(FFI / "kernels" / "cpu").glob("*.cc")])
        subprocess.run([NVCC, *flags, f"-I{FFI / 'include'}", *sources, "-o", program], check=True, timeout=900)
    # the second time by way of the PTX, as GPUs without machine code of their own run it
    for environment in ({}, {"CUDA_FORCE_PTX_JIT": "1"}):
        ran = subprocess.run(
            [program, "3", CASES], env=os.environ | environment, capture_output=True, text=True, timeout=900
        )
        assert ran.returncode == 0, f"{environment}: {ran.stderr[-3000:]}"
        assert ran.stdout == f"{CASES} cases\n"
