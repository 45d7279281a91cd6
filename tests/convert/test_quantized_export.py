"""MXFP8 and NVFP4 as NVIDIA ModelOpt documents them, decoded here in numpy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gtp_jax as gtp
from gtp_jax.convert import _quantized, export_llama, import_llama

from .hugging_face import CONFIG, random_tensors, read_model, write_model

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("o_proj",), ("down_proj",))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model's tensors, and its directories by dtype."""
    folder = tmp_path_factory.mktemp("quantized")
    tensors = random_tensors(CONFIG)
    for i, name in enumerate(tensors):
        if name.endswith("_proj.weight"):
            tensors[name] = tensors[name] * np.float32(1 + i % 5)  # so that fused weights have different amaxes
    tensors["model.layers.0.self_attn.o_proj.weight"][...] = 0
    tensors["model.layers.1.self_attn.o_proj.weight"][0, :32] = 0
    import_llama(write_model(folder / "hf", tensors, CONFIG), folder / "imported")
    for dtype in ("mxfp8", "nvfp4"):
        export_llama(folder / "imported", folder / dtype, dtype=dtype)
    return tensors, folder


def decode_nvfp4(weight, scale, scale_2):
    """code * scale * scale_2; the even code of a pair in the low nibble, a scale for 16 codes along the row."""
    codes = np.stack([weight & 15, weight >> 4], -1).reshape(weight.shape[0], -1)
    values = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
    return values.astype(np.float64) * np.repeat(scale.astype(np.float64), 16, 1) * np.float64(scale_2)


def decode_mxfp8(weight, scale):
    """code * 2^(scale - 127), a scale for 32 codes along the row."""
    return weight.astype(np.float64) * np.exp2(np.repeat(scale.astype(np.float64) - 127, 32, 1))


def is_quantized(name):
    return name.endswith("_proj.weight")


def test_names_types_and_shapes_are_modelopts(exported):
    tensors, folder = exported
    mxfp8, nvfp4 = read_model(folder / "mxfp8"), read_model(folder / "nvfp4")
    e4m3 = ml_dtypes.float8_e4m3fn
    for name, values in tensors.items():
        if not is_quantized(name):
            assert mxfp8.pop(name).dtype == nvfp4.pop(name).dtype == ml_dtypes.bfloat16
            continue
        out, features = values.shape
        found = [mxfp8.pop(name + end) for end in ("", "_scale")]
        assert [(t.dtype, t.shape) for t in found] == [(e4m3, (out, features)), (np.uint8, (out, features // 32))]
        found = [nvfp4.pop(name + end) for end in ("", "_scale", "_scale_2")]
        wanted = [(np.uint8, (out, features // 2)), (e4m3, (out, features // 16)), (np.float32, ())]
        assert [(t.dtype, t.shape) for t in found] == wanted
    assert not mxfp8 and not nvfp4


def test_mxfp8_decodes_to_what_our_dequantize_gives(exported):
    tensors, folder = exported
    found = read_model(folder / "mxfp8")
    for name in filter(is_quantized, tensors):
        decoded = decode_mxfp8(found[name], found[name + "_scale"])
        ours = gtp.ops.dequantize(gtp.ops.quantize(jnp.asarray(tensors[name]), gtp.formats.MXFP8), jnp.float32)
        assert np.array_equal(decoded, np.asarray(ours, np.float64)), name
        block = np.repeat(np.abs(tensors[name].reshape(-1, 32)).max(1), 32).reshape(decoded.shape)
        # a step of e4m3 at the block's largest is at most a 16th of it
        assert np.all(np.abs(decoded - tensors[name]) <= block / 16), name


def test_nvfp4_decodes_to_what_our_dequantize_gives(exported):
    tensors, folder = exported
    found = read_model(folder / "nvfp4")
    for i in range(CONFIG["num_hidden_layers"]):
        for group in FUSED:
            part = "self_attn" if "down_proj" not in group and "up_proj" not in group else "mlp"
            names = [f"model.layers.{i}.{part}.{name}.weight" for name in group]
            amax = max(np.abs(tensors[name]).max() for name in names)
            for name in names:
                scale_2 = found[name + "_scale_2"]
                assert scale_2 == (np.float32(amax) / np.float32(6 * 448) if amax else 1), name
                decoded = decode_nvfp4(found[name], found[name + "_scale"], scale_2)
                quantized = gtp.ops.quantize(jnp.asarray(tensors[name]), gtp.formats.NVFP4_1D, amax=jnp.float32(amax))
                ours = np.asarray(gtp.ops.dequantize(quantized, jnp.float32), np.float64)
                assert np.all(np.abs(decoded - ours) <= 2**-21 * np.abs(ours)), name
                block = np.repeat(np.abs(tensors[name].reshape(-1, 16)).max(1), 16).reshape(decoded.shape)
                # half of e2m1's widest step, 1 of 6, and half of the scale's, 1 of 16, of the block's largest
                assert np.all(np.abs(decoded - tensors[name]) <= block * (1 / 6 + 1 / 16)), name


# A Python that has ModelOpt, torch and safetensors; it need not be the one that has jax.
MODELOPT_PYTHON = os.environ.get("GTP_MODELOPT_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def modelopt(tmp_path_factory):
    """`modelopt(export)`: float32 values of its quantized weights as NVIDIA ModelOpt decodes them."""
    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('modelopt') is None)"
    if subprocess.run([MODELOPT_PYTHON, "-c", ask]).returncode:
        pytest.skip(f"{MODELOPT_PYTHON} has no nvidia-modelopt; name one that has in GTP_MODELOPT_PYTHON")
    script = Path(__file__).with_name("modelopt_reader.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def decode(export):
        out = tmp_path_factory.mktemp("modelopt") / "values.npz"
        subprocess.run([MODELOPT_PYTHON, script, export, out], check=True, env=environment)
        return np.load(out)

    return decode


@pytest.mark.parametrize("dtype", ["mxfp8", "nvfp4"])
def test_modelopt_itself_decodes_to_the_same(exported, modelopt, dtype):
    tensors, folder = exported
    found, decoded = read_model(folder / dtype), modelopt(folder / dtype)
    assert sorted(decoded) == sorted(filter(is_quantized, tensors))
    for name, values in decoded.items():
        parts = [found[name + end] for end in ("", "_scale", "_scale_2") if name + end in found]
        wanted = decode_mxfp8(*parts) if dtype == "mxfp8" else decode_nvfp4(*parts)
        # theirs is in float32, where NVFP4's two products round; a power of two does not
        assert np.all(np.abs(values - wanted) <= (dtype == "nvfp4") * 2**-22 * np.abs(wanted)), name


def test_configuration_names_the_layout(exported):
    _, folder = exported
    for dtype, algorithm, block in (("mxfp8", "MXFP8", 32), ("nvfp4", "W4A16_NVFP4", 16)):
        config = json.loads((folder / dtype / "config.json").read_text())
        assert config["torch_dtype"] == "bfloat16"
        said = config["quantization_config"]
        assert (said["quant_method"], said["quant_algo"], said["ignore"]) == ("modelopt", algorithm, ["lm_head"])
        older = json.loads((folder / dtype / "hf_quant_config.json").read_text())["quantization"]
        assert older == {
            "quant_algo": algorithm,
            "kv_cache_quant_algo": None,
            "group_size": block,
            "exclude_modules": ["lm_head"],
        }


def test_a_matrix_taken_in_slices_is_the_same(exported, tmp_path, monkeypatch):
    _, folder = exported
    monkeypatch.setattr(_quantized, "_SLICE_ELEMENTS", 64 * 50)
    export_llama(folder / "imported", tmp_path / "out", dtype="nvfp4")
    one, other = ((path / "model.safetensors").read_bytes() for path in (tmp_path / "out", folder / "nvfp4"))
    assert one == other
