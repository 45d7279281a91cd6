"""GPUs that the kernels are compiled for: Hopper, and those of the machine that compiles."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gtp_jax.native import _library

FFI = Path(__file__).parents[2] / "ffi"
CODES = "sm_75\nsm_80\nsm_86\nsm_89\nsm_90\nsm_100\nsm_103\nsm_120\n"

pytestmark = pytest.mark.skipif(
    not (shutil.which("cmake") and FFI.is_dir()), reason="needs cmake and the sources in ffi/"
)


def found(tmp_path: Path, capabilities: str | None) -> str:
    """Returns the architectures on a machine whose `nvidia-smi` prints these; without that command if `None`."""
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\nprintf '{capabilities}'\n" if capabilities is not None else "#!/bin/sh\nexit 9\n")
    script.chmod(0o755)
    program = tmp_path / "print.cmake"
    call = f'find_architectures(all "{CODES}")'
    program.write_text(f'include({FFI}/architectures.cmake)\n{call}\nmessage("<${{all}}>")\n')
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(
        ["cmake", "-P", program], env=environment, check=True, capture_output=True, text=True, timeout=60
    )
    return run.stdout + run.stderr


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (None, "90a-real;80-virtual"),
        ("9.0\\n9.0\\n", "90a-real;80-virtual"),
        ("10.0\\n", "90a-real;100a-real;80-virtual"),
        ("8.0\\n12.0\\n", "90a-real;80-real;120a-real;80-virtual"),
        ("7.5\\n", "90a-real;80-virtual"),
        ("13.0\\n", "90a-real;80-virtual"),
    ],
)
def test_kernels_are_for_hopper_the_gpus_found_and_others_by_ptx(capabilities, expected, tmp_path):
    assert f"<{expected}>" in found(tmp_path, capabilities)


def test_a_gpu_that_nvcc_does_not_know_is_named(tmp_path):
    assert "nvcc does not support compute capability 13.0" in found(tmp_path, "13.0\\n")


def nvcc() -> str:
    if not (path := shutil.which("nvcc")):
        pytest.skip("needs nvcc")
    return path


@pytest.mark.parametrize(("architectures", "grouped"), [("", True), ("90-real", False), ("80-virtual;90a-real", True)])
def test_grouped_products_are_offered_only_where_hoppers_own_code_is_compiled(architectures, grouped, tmp_path):
    """For sm_90, without the `a`, their kernels are empty: they would return whatever the memory holds."""
    configure = ["cmake", "-S", FFI, "-B", tmp_path, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += [f"-DCMAKE_CUDA_COMPILER={nvcc()}", f"-DCMAKE_CUDA_ARCHITECTURES={architectures}"]
    subprocess.run(configure, check=True, timeout=120, capture_output=True)
    target = "handlers/CMakeFiles/_native.dir/bindings.cc.o"
    ran = subprocess.run(
        ["ninja", "-C", tmp_path, "-t", "commands", target], check=True, capture_output=True, text=True
    )
    assert "GTP_WITH_CUDA" in ran.stdout
    assert ("GTP_WITH_HOPPER" in ran.stdout) == grouped


def test_codes_of_four_bits_compile_to_blackwells_own_instruction(tmp_path):
    source = tmp_path / "codes.cu"
    source.write_text(
        '#include "device.cuh"\n__global__ void codes(const float* x, unsigned* out) {\n  float eight[8];\n'
        "  for (int i = 0; i < 8; ++i) eight[i] = x[i];\n"
        "  *out = gtp::cuda::encode_e2m1_x8<true, false>(eight, x[8]);\n}\n"
    )
    folders = [f"-I{FFI / 'include'}", f"-I{FFI / 'kernels' / 'cuda'}"]
    command = [nvcc(), "-std=c++20", "-fmad=false", *folders, "-gencode=arch=compute_100a,code=sm_100a"]
    subprocess.run([*command, "-cubin", source, "-o", tmp_path / "codes.cubin"], check=True, timeout=120)
    ran = subprocess.run([*command, "-ptx", source, "-o", "-"], capture_output=True, text=True, timeout=120)
    text = ran.stdout
    assert len(re.findall(r"cvt\.rn\.satfinite\.e2m1x2\.f32", text)) == 4


def test_a_library_of_other_formats_is_refused(monkeypatch):
    built = pytest.importorskip("gtp_jax.native._native")
    monkeypatch.setattr(built, "formats", lambda: [{"name": "NVFP4"}, {"name": "MXFP8"}])
    with pytest.raises(ImportError, match="built for the formats NVFP4, MXFP8, but this version has NVFP4, NVFP4_1D"):
        _library._library.__wrapped__()
