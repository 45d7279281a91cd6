"""Quantized weights of other libraries are imported as the values that they stand for, each rounded once to float32."""

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from messages import naming

from gtp_jax.convert import export_llama, import_llama
from gtp_jax.runner.cli import main

from .hugging_face import CONFIG, GPT_OSS, QWEN3_MOE, assert_same, random_tensors, read_model, write_file, write_model

E4M3, E8M0, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu, ml_dtypes.bfloat16
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def spread(scales, block, shape):
    """Block scales, one for each element."""
    rows, columns = (np.arange(size) // run for size, run in zip(shape, block, strict=True))
    return scales.astype(np.float64)[rows[:, None], columns[None, :]]


def fp8(values, block, name="weight_scale", dtype=np.float32, shape=None):
    """Codes and scales of blocks of `block`, of which the last may be shorter; and the values, float64."""
    rows, columns = values.shape
    grid = -(-rows // block[0]), -(-columns // block[1])
    amax = np.zeros(grid)
    np.maximum.at(amax, (np.arange(rows)[:, None] // block[0], np.arange(columns)[None] // block[1]), np.abs(values))
    scales = (amax / 448).astype(dtype)
    codes = np.clip(values / spread(scales, block, values.shape), -448, 448).astype(E4M3)
    exact = codes.astype(np.float64) * spread(scales, block, values.shape)
    return {"weight": codes, name: scales if shape is None else scales.reshape(shape)}, exact


def fp4(values, run, encode, decode, codes="weight_packed"):
    """E2M1 codes in pairs, with scales of `run` columns that `encode` makes of the magnitudes; and the values."""
    scales = encode(np.abs(values).reshape(values.shape[0], -1, run).max(-1) / 6)
    wide = np.repeat(decode(scales), run, axis=1)
    nearest = np.abs(np.abs(values / wide)[..., None] - E2M1).argmin(-1).astype(np.uint8) | (values < 0) * np.uint8(8)
    exact = np.where(nearest & 8, -1, 1) * E2M1[nearest & 7] * wide
    return {codes: nearest[:, ::2] | nearest[:, 1::2] << 4, "weight_scale": scales}, exact


def power_of_two(x):
    return (127 + np.ceil(np.log2(np.maximum(x, 2.0**-126)))).astype(np.uint8)


def as_power(biased):
    return 2.0 ** (biased.astype(np.float64) - 127)


def nvfp4(values, second, divides):
    """NVFP4 with a scale of the whole weight below the name `second`."""
    whole = np.float32(np.abs(values).max() / (6 * 448))
    written = np.float32(1) / whole if divides else whole
    whole = 1 / np.float64(written) if divides else np.float64(written)
    parts, exact = fp4(
        values,
        16,
        lambda x: (x / whole).astype(E4M3),
        lambda scales: scales.astype(np.float64) * whole,
        "weight_packed" if divides else "weight",
    )
    return {**parts, second: written.reshape((1,) if divides else ())}, exact


def compressed(form, **weights):
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


WHOLE = 10**6, 10**6
FP8_BITS = {"num_bits": 8, "type": "float"}
FP4_BITS = {"num_bits": 4, "type": "float"}
QWEN_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 40]}
PER_CHANNEL = compressed("float-quantized", strategy="channel", **FP8_BITS)
# What config.json says, and what a weight becomes.
LAYOUTS = {
    "fp8 in blocks": (QWEN_FP8, lambda x: fp8(x, (48, 40), "weight_scale_inv", BF16)),
    "fp8 in blocks of 128": (
        {**QWEN_FP8, "weight_block_size": [128, 128]},
        lambda x: fp8(x, (128, 128), "weight_scale_inv", BF16),
    ),
    "fp8 of one scale": ({"quant_method": "fp8"}, lambda x: fp8(x, WHOLE, "weight_scale_inv", shape=())),
    "fp8 per channel": (PER_CHANNEL, lambda x: fp8(x, (1, 10**6), dtype=BF16)),
    "fp8 per tensor": (
        compressed("naive-quantized", strategy="tensor", **FP8_BITS),
        lambda x: fp8(x, WHOLE, shape=(1,)),
    ),
    "fp8 in blocks of compressed-tensors": (
        compressed("float-quantized", strategy="block", block_structure=[32, 32], **FP8_BITS),
        lambda x: fp8(x, (32, 32)),
    ),
    "nvfp4 of compressed-tensors": (
        compressed("nvfp4-pack-quantized", group_size=16, strategy="tensor_group", **FP4_BITS),
        lambda x: nvfp4(x, "weight_global_scale", divides=True),
    ),
    "mxfp4 of compressed-tensors": (
        compressed("mxfp4-pack-quantized", group_size=32, strategy="group", **FP4_BITS),
        lambda x: fp4(x, 32, power_of_two, as_power),
    ),
    "nvfp4 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda x: nvfp4(x, "weight_scale_2", divides=False),
    ),
    "fp8 of modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda x: fp8(x, WHOLE, shape=())),
}


def quantized(folder: Path, layout: str, config: dict = CONFIG, extra=()) -> dict[str, np.ndarray]:
    """Writes a model whose projections are quantized, and returns its values in float64."""
    said, encode = LAYOUTS[layout]
    tensors, values = {}, {}
    for name, value in random_tensors(config).items():
        values[name] = value.astype(np.float64)
        if name.endswith("_proj.weight"):
            parts, values[name] = encode(values[name])
            tensors |= {name.removesuffix("weight") + part: array for part, array in parts.items()}
            tensors |= {name.removesuffix("weight") + part: np.ones((), np.float32) for part in extra}
        else:
            tensors[name] = value.astype(BF16)
            values[name] = tensors[name].astype(np.float64)
    write_model(folder, tensors, {**config, "quantization_config": said})
    return values


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_import_has_the_values_of_the_codes(layout, tmp_path):
    wanted = quantized(tmp_path / "hf", layout)
    done = import_llama(tmp_path / "hf", tmp_path / "imported")
    assert done.quantized is not None and done.left_out == ()
    export_llama(tmp_path / "imported", tmp_path / "exported", dtype="float32")
    found = read_model(tmp_path / "exported")
    assert sorted(found) == sorted(wanted)
    for name, values in wanted.items():
        # a float64 product of the two NVFP4 scales may round where the quotient of the import does not
        assert np.all(np.abs(found[name] - values) <= 2.0**-24 * np.abs(values)), name
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())


def test_experts_are_imported_as_well(tmp_path):
    wanted = quantized(tmp_path / "hf", "fp8 in blocks", QWEN3_MOE)
    import_llama(tmp_path / "hf", tmp_path / "imported")
    export_llama(tmp_path / "imported", tmp_path / "exported", dtype="float32")
    for name, values in read_model(tmp_path / "exported").items():
        assert np.array_equal(values, wanted[name].astype(np.float32)), name


@pytest.mark.parametrize("dtype", ["mxfp8", "nvfp4"])
def test_an_export_of_ours_is_imported_and_quantizes_to_the_same_values(dtype, tmp_path):
    import_llama(write_model(tmp_path / "hf", random_tensors(CONFIG), CONFIG), tmp_path / "first")
    export_llama(tmp_path / "first", tmp_path / dtype, dtype=dtype)
    import_llama(tmp_path / dtype, tmp_path / "second")
    export_llama(tmp_path / "second", tmp_path / "again", dtype=dtype)
    first, again = read_model(tmp_path / dtype), read_model(tmp_path / "again")
    assert sorted(first) == sorted(again)
    for name, codes in first.items():
        if dtype == "mxfp8" and f"{name}_scale" in first:  # a block of values up to 224 may take half of the scale
            values = [as_power(m[f"{name}_scale"]).repeat(32, 1) * m[name].astype(np.float64) for m in (first, again)]
            assert np.array_equal(*values), name
        elif dtype == "nvfp4" and not name.endswith("scale_2"):  # of which the quotient may round
            assert codes.tobytes() == again[name].tobytes(), name


def test_an_older_modelopt_names_its_layout_in_a_file_of_its_own(tmp_path):
    quantized(tmp_path / "hf", "nvfp4 of modelopt")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "hf" / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert import_llama(tmp_path / "hf", tmp_path / "imported").quantized == "NVFP4 of ModelOpt"


def test_scales_of_activations_are_left_out_and_the_command_says_so(tmp_path, capsys):
    quantized(tmp_path / "hf", "fp8 of modelopt", extra=("input_scale",))
    assert main(["convert", "import", str(tmp_path / "hf"), str(tmp_path / "imported")]) == 0
    said = capsys.readouterr().out
    assert re.search(naming("stored as FP8 values 21 scales of activations"), said)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq' FP8"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({**QWEN_FP8, "fmt": "e5m2"}, "fmt 'e5m2'"),
        (compressed("pack-quantized", num_bits=4, type="int"), "format 'pack-quantized'"),
        (compressed("float-quantized", strategy="token", **FP8_BITS), "strategy 'token'"),
        ({**PER_CHANNEL, "sparsity_config": {"format": "2:4"}}, "sparsity_config"),
        (compressed("float-quantized", strategy="channel", symmetric=False, **FP8_BITS), "weights symmetric"),
    ],
)
def test_another_layout_is_refused_by_its_name(said, message, tmp_path):
    write_model(tmp_path / "hf", random_tensors(CONFIG), {**CONFIG, "quantization_config": said})
    with pytest.raises(ValueError, match=naming(message)):
        import_llama(tmp_path / "hf", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def changed(folder, layout, change):
    """A model whose tensors are changed, by the name of their part of one weight; and that weight."""
    quantized(folder, layout)
    at, tensors = "model.layers.0.self_attn.q_proj.", read_model(folder)
    parts = {name.removeprefix(at): array.copy() for name, array in tensors.items() if name.startswith(at)}
    others = {name: array for name, array in tensors.items() if not name.startswith(at)}
    change(parts)
    write_file(folder / "model.safetensors", {**others, **{at + name: array for name, array in parts.items()}})
    return at


SCALES = "weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({SCALES: t[SCALES][:1, :1]}),
            "weight_scale_inv: BF16[1, 1] [3, 2] BF16 F8_E8M0",
        ),
        (lambda t: t.pop(SCALES), "weight_scale_inv: no file [3, 2]"),
        (lambda t: t.update(weight=t["weight"].view(np.uint8)), "weight: U8[128, 64] F8_E4M3"),
        (lambda t: t.update(weight_zero_point=np.zeros((1,), np.float32)), "weight_zero_point: no such tensor"),
    ],
    ids=["shape", "missing", "dtype", "zero point"],
)
def test_parts_that_do_not_fit_are_refused(change, message, tmp_path):
    at = changed(tmp_path / "hf", "fp8 in blocks", change)
    with pytest.raises(ValueError, match=naming(at + message)):
        import_llama(tmp_path / "hf", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    ("layout", "part", "value", "message"),
    [
        ("fp8 in blocks", "weight", np.nan, "weight NaN"),
        ("fp8 in blocks", "weight_scale_inv", np.nan, "weight_scale_inv NaN"),
        ("fp8 in blocks of 128", "weight_scale_inv", np.inf, "weight_scale_inv NaN"),
        ("mxfp4 of compressed-tensors", "weight_scale", 255, "weight_scale NaN"),
        ("nvfp4 of modelopt", "weight_scale_2", np.inf, "weight_scale_2 NaN"),
        ("nvfp4 of compressed-tensors", "weight_global_scale", 0, "weight_packed scales NaN"),
    ],
)
def test_the_part_of_a_weight_that_is_not_finite_is_named(layout, part, value, message, tmp_path):
    def spoil(parts):
        parts[part][(0,) * parts[part].ndim] = value

    at = changed(tmp_path / "hf", layout, spoil)
    with pytest.raises(ValueError, match=naming(at + message)):
        import_llama(tmp_path / "hf", tmp_path / "imported")


def test_experts_of_gpt_oss_in_mxfp4_are_the_values_of_their_codes(tmp_path):
    tensors, rng = random_tensors(GPT_OSS), np.random.default_rng(0)
    stored, values = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors[name].shape
        codes = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(118, 124, codes.shape[:3], np.uint8)
        stored |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        del stored[name]
        values[name] = np.empty_like(tensors[name])
        for one in range(inputs):
            pair = codes[:, :, one // 32, one % 32 // 2]
            code = pair >> 4 if one % 2 else pair & 15
            values[name][:, one] = np.where(code & 8, -1, 1) * E2M1[code & 7] * as_power(scales[:, :, one // 32])
    mxfp4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    done = import_llama(write_model(tmp_path / "hf", stored, {**GPT_OSS, **mxfp4}), tmp_path / "imported")
    assert done.quantized == "MXFP4 of gpt-oss"
    export_llama(tmp_path / "imported", tmp_path / "out", dtype="float32")
    assert_same(read_model(tmp_path / "out"), values)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    bad = {**stored, "model.layers.0.mlp.experts.down_proj_scales": np.full((4, 64, 5), 255, np.uint8)}
    with pytest.raises(ValueError, match=naming("layers.0.mlp.experts.down_proj_scales NaN")):
        import_llama(write_model(tmp_path / "bad", bad, {**GPT_OSS, **mxfp4}), tmp_path / "other")
