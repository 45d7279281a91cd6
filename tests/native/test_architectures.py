"""GPUs that the kernels are compiled for: those of the machine that compiles, or those that are named."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest
from messages import naming
from selection import others_full

from gtp_jax import native
from gtp_jax.native import _library

FFI = Path(__file__).parents[2] / "ffi"
BUILT = _library._Facts([0, 1], "13.0", "90a-real", {"cpu": "", "CUDA": ""}, [])
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
        (None, "90a-real"),
        ("9.0\\n9.0\\n", "90a-real"),
        ("10.0\\n", "100a-real"),
        ("8.0\\n12.0\\n", "80-real;120a-real"),
        ("7.5\\n", "90a-real"),
        ("7.5\\n8.6\\n", "86-real"),
        ("13.0\\n", "80-virtual"),
    ],
)
def test_kernels_are_for_the_gpus_found_or_else_for_hopper(capabilities, expected, tmp_path):
    said = found(tmp_path, capabilities)
    assert f"<{expected}>" in said
    assert ("compute capability 13.0" in said) == (expected == "80-virtual")  # which nvcc does not know


def nvcc() -> str:
    if not (path := shutil.which("nvcc")):
        pytest.skip("needs nvcc")
    return path


def configured(folder: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Configures a build in a folder, without a GPU, and returns what CMake said."""
    (folder / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (folder / "nvidia-smi").chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | variables
    command = ["cmake", "-S", FFI, "-B", folder, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"]
    command += [f"-DCMAKE_CUDA_COMPILER={nvcc()}", *options]
    return subprocess.run(command, timeout=120, capture_output=True, text=True, env=environment)


@pytest.mark.full
def test_the_architectures_that_are_named_are_compiled_and_an_option_precedes_the_environment(tmp_path):
    named, option = "90a-real;100a-real;80-virtual", "-DCMAKE_CUDA_ARCHITECTURES=80-real"
    for options, variables, expected in (
        ([], {}, "90a-real"),
        ([], {"CUDAARCHS": named}, named),
        ([option], {"CUDAARCHS": named}, "80-real"),
    ):
        assert f"CUDA kernels for {expected}\n" in configured(tmp_path, *options, **variables).stdout
        (tmp_path / "CMakeCache.txt").unlink()


@pytest.mark.full
@pytest.mark.parametrize("word", ["all", "native"])
def test_architectures_without_a_number_are_refused(word, tmp_path):
    """What is compiled is written into the module, so that a GPU that can run none of it is refused."""
    ran = configured(tmp_path, CUDAARCHS=word)
    assert ran.returncode != 0 and re.search(naming(f'CUDA architectures "{word}" name'), ran.stderr)


@pytest.mark.parametrize(
    ("architectures", "grouped"),
    others_full([("", True), ("90-real", False), ("80-virtual;90a-real", True)], [("90-real", False)]),
)
def test_grouped_products_are_offered_only_where_hoppers_own_code_is_compiled(architectures, grouped, tmp_path):
    """For sm_90, without the `a`, their kernels are empty: they would return whatever the memory holds."""
    configured(tmp_path, f"-DCMAKE_CUDA_ARCHITECTURES={architectures}").check_returncode()
    target = "handlers/CMakeFiles/gtp_native.dir/exports.cc.o"
    ran = subprocess.run(
        ["ninja", "-C", tmp_path, "-t", "commands", target], check=True, capture_output=True, text=True
    )
    assert "GTP_WITH_CUDA" in ran.stdout
    assert ("GTP_WITH_HOPPER" in ran.stdout) == grouped


@pytest.mark.full
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
    facts = json.dumps({**dataclasses.asdict(BUILT), "formats": [{"name": "NVFP4"}, {"name": "MXFP8"}]})
    monkeypatch.setattr(_library, "_opened", lambda: types.SimpleNamespace(gtp_facts=lambda: facts))
    with pytest.raises(ImportError, match=naming("NVFP4, MXFP8, NVFP4_1D,")):
        _library._facts.__wrapped__()


def test_a_gpu_that_can_run_none_of_the_code_is_refused_with_what_builds_it(monkeypatch):
    monkeypatch.setattr(_library, "_facts", lambda: BUILT)
    monkeypatch.setattr(_library, "_has", lambda target, platform: target == "gtp_quantize")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    gpu = types.SimpleNamespace(compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert native.has("gtp_quantize", "CUDA") and native.has("gtp_quantize", "cpu")
    gpu.compute_capability = "8.6"
    with pytest.raises(ImportError, match=naming("(90a-real) capability 8.6 CUDAARCHS=86-real", "pip install")):
        native.has("gtp_quantize", "CUDA")
    assert native.has("gtp_quantize", "cpu") and not native.has("gtp_no_such", "CUDA")
