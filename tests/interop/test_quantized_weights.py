"""Quantized weights are imported as the values that transformers and compressed-tensors take them for."""

import numpy as np
import pytest

_REASON = "not installed; tests/interop/environment.sh makes an environment that has it"
transformers = pytest.importorskip("transformers", reason=f"transformers is {_REASON}")
torch = pytest.importorskip("torch", reason=f"torch is {_REASON}")
pytest.importorskip("compressed_tensors", reason=f"compressed-tensors is {_REASON}")

from convert.hugging_face import CONFIG, read_model  # noqa: E402
from convert.test_quantized_import import LAYOUTS, QWEN_FP8, fp8, quantized  # noqa: E402

from gtp_jax.convert import export_llama, import_llama  # noqa: E402

# transformers takes whole blocks only
BLOCKS = "fp8 in whole blocks"
LAYOUTS[BLOCKS] = (
    {**QWEN_FP8, "weight_block_size": [32, 32], "modules_to_not_convert": ["lm_head"]},
    lambda x: fp8(x, (32, 32), "weight_scale_inv"),
)


@pytest.mark.parametrize("layout", [BLOCKS, *(name for name in LAYOUTS if "channel" in name or "compressed" in name)])
def test_values_are_those_of_the_library_that_defines_the_layout(layout, tmp_path):
    quantized(tmp_path / "hf", layout)
    import_llama(tmp_path / "hf", tmp_path / "imported")
    export_llama(tmp_path / "imported", tmp_path / "exported", dtype="float32")
    found = read_model(tmp_path / "exported")
    own = {}
    if layout == BLOCKS:
        own["quantization_config"] = transformers.FineGrainedFP8Config(
            dequantize=True, weight_block_size=(32, 32), modules_to_not_convert=["lm_head"]
        )
    is_fp4 = "fp4" in layout  # which is dequantized to bfloat16 there
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.bfloat16 if is_fp4 else torch.float32, **own
    )
    with torch.no_grad():
        model(torch.zeros((1, 4), dtype=torch.int64))  # compressed-tensors dequantizes at the first call
    theirs = {name: value.detach().float().numpy() for name, value in model.named_parameters()}
    assert found.keys() <= theirs.keys() and len(found) == 9 * CONFIG["num_hidden_layers"] + 3
    for name, values in found.items():
        error = np.abs(theirs[name] - values)
        assert np.all(error <= 2.0 ** (-8 if is_fp4 else -23) * np.abs(values)), (name, error.max())
