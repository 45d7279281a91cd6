"""A model that was published in FP8 in blocks of 128 x 128 is frozen with its own codes and scales, bit for bit."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints, StoredArray
from gtp_jax.convert import export_llama, import_llama
from gtp_jax.models import load
from gtp_jax.ops import SlottedWeight, linear_fp8_blocks

from ..ops import oracle
from .hugging_face import CONFIG, QWEN3_MOE, random_tensors, read_model, write_file, write_model
from .test_quantized_import import quantized

LAYOUT = "fp8 in blocks of 128"
# our names in a layer, and theirs
NAMES = {
    "attention/qkv/kernel/query": "self_attn.q_proj",
    "attention/qkv/kernel/key": "self_attn.k_proj",
    "attention/qkv/kernel/value": "self_attn.v_proj",
    "attention/out/kernel": "self_attn.o_proj",
    "mlp/up/kernel/gate": "mlp.gate_proj",
    "mlp/up/kernel/up": "mlp.up_proj",
    "mlp/down/kernel": "mlp.down_proj",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A published model with its values, and its import."""
    folder = tmp_path_factory.mktemp("fp8")
    values = quantized(folder / "hf", LAYOUT)
    done = import_llama(folder / "hf", folder / "imported")
    assert done.codes == tuple(f"blocks/layers/{name}" for name in NAMES)
    return folder, values


def scope(**degrees):
    return jax.set_mesh(gtp.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))]))


def codes_of(model):
    found = nnx.to_flat_state(nnx.state(model, gtp.nn.Frozen))
    return {
        "/".join(map(str, path)): jax.tree.map(np.asarray, v.get_value())
        for path, v in found
        if isinstance(v.get_raw_value(), gtp.formats.QuantizedArray)
    }


@pytest.mark.parametrize("degrees", others_full([dict(gtp=1), dict(gtp=4), dict(gtp=7)], [dict(gtp=7)]))
def test_a_loaded_base_has_the_published_codes_and_scales_bit_for_bit(degrees, made):
    folder, values = made
    published = read_model(folder / "hf")
    with scope(**degrees), gtp.layout.even_shares():
        codes = codes_of(load(folder / "imported", recipe=gtp.recipes.FP8Blocks()))
    assert codes.keys() == {f"blocks/layers/{name}" for name in NAMES}
    fractions = []
    for ours, theirs in NAMES.items():
        for layer in range(CONFIG["num_hidden_layers"]):
            found, name = codes[f"blocks/layers/{ours}"], f"model.layers.{layer}.{theirs}.weight"
            scales = published[f"{name}_scale_inv"].astype(np.float32)
            assert found.codes[layer].tobytes() == published[name].tobytes()
            assert found.scales[layer].tobytes() == scales.tobytes()
            fractions += list(np.frexp(scales)[0].ravel())
            one = jax.tree.map(lambda a, layer=layer: a[layer], found)
            np.testing.assert_array_equal(
                np.asarray(gtp.ops.dequantize(one, jnp.float32)), values[name].astype(np.float32)
            )
    assert set(fractions) != {0.5}, "scales are not all powers of two"


@pytest.mark.full
def test_products_forward_and_backward_multiply_the_published_values(made):
    folder, values = made
    with scope(gtp=2):
        found = codes_of(load(folder / "imported", recipe=gtp.recipes.FP8Blocks()))["blocks/layers/mlp/up/kernel/gate"]
    codes = jax.tree.map(lambda a: jnp.asarray(a[1]), found)
    slot = jnp.zeros(codes.shape, jnp.float32)
    rows, columns = codes.shape
    product = lambda x: linear_fp8_blocks(x, SlottedWeight(codes, slot))  # noqa: E731
    y = jax.jit(product)(jnp.eye(columns))
    wanted = values["model.layers.1.mlp.gate_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(np.asarray(y), wanted.T)
    back = jax.jit(lambda g: jax.vjp(product, jnp.zeros((rows, columns)))[1](g)[0])(jnp.eye(rows))
    np.testing.assert_array_equal(np.asarray(back), wanted)


@pytest.mark.full
def test_logits_of_values_are_those_of_an_import_that_is_not_frozen(made):
    """`gtp_jax.generation.generate` multiplies values."""
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    with scope(gtp=2):
        model = load(made[0] / "imported", dtype="float32", recipe=gtp.recipes.FP8Blocks(exclude=("embed", "head")))
        found = gtp.generation.generate(model, tokens, max_new_tokens=6, temperature=0.0)
        values = load(made[0] / "imported", dtype="float32")
        wanted = gtp.generation.generate(values, tokens, max_new_tokens=6, temperature=0.0)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)


def test_values_and_other_recipes_do_not_use_the_codes(made):
    folder, values = made
    export_llama(folder / "imported", folder / "exported", dtype="float32")
    for name, value in read_model(folder / "exported").items():
        assert np.array_equal(value, values[name].astype(np.float32)), name
    with scope(gtp=2):
        codes = codes_of(load(folder / "imported", recipe=gtp.FP8()))
    assert {one.format.name for one in codes.values()} == {"FP8_E4M3"}


def test_an_export_in_fp8_writes_the_published_codes_and_scales_as_they_are(made):
    folder, _ = made
    done = export_llama(folder / "imported", folder / "fp8", dtype="fp8")
    found, published = read_model(folder / "fp8"), read_model(folder / "hf")
    assert sorted(found) == sorted(published) and done.tensors == len(found)
    for name, array in published.items():
        wanted = array.astype(np.float32) if name.endswith("scale_inv") else array
        assert (found[name].dtype, found[name].tobytes()) == (wanted.dtype, wanted.tobytes()), name
    said = json.loads((folder / "fp8" / "config.json").read_text())["quantization_config"]
    assert (said["quant_method"], said["weight_block_size"]) == ("fp8", [128, 128])
    assert not (folder / "fp8" / "hf_quant_config.json").exists()


def test_an_export_in_fp8_quantizes_values_in_tiles_by_the_oracle(tmp_path):
    tensors = random_tensors(CONFIG)
    import_llama(write_model(tmp_path / "hf", tensors, CONFIG), tmp_path / "imported")
    export_llama(tmp_path / "imported", tmp_path / "fp8", dtype="fp8")
    import_llama(tmp_path / "fp8", tmp_path / "again")
    export_llama(tmp_path / "again", tmp_path / "values", dtype="float32")
    found = read_model(tmp_path / "values")
    for name, values in tensors.items():
        if name.endswith("_proj.weight"):
            np.testing.assert_array_equal(found[name], oracle.rounded_blocked(values, (128, 128)), err_msg=name)


def test_damaged_codes_are_not_exported(made, tmp_path, monkeypatch):
    read = StoredArray._rows

    def flipped(self, begin, end):
        found = read(self, begin, end)
        return found ^ np.uint8(1) if self.name.startswith("codes/") and self.name.endswith("gate/codes") else found

    monkeypatch.setattr(StoredArray, "_rows", flipped)
    with pytest.raises(ValueError, match=naming("codes/blocks/layers/mlp/up/kernel/gate/codes")):
        export_llama(made[0] / "imported", tmp_path / "fp8", dtype="fp8")
    assert not (tmp_path / "fp8").exists()


@pytest.mark.full
def test_experts_keep_their_codes(tmp_path):
    quantized(tmp_path / "hf", LAYOUT, QWEN3_MOE)
    import_llama(tmp_path / "hf", tmp_path / "imported")
    published = read_model(tmp_path / "hf")
    with scope(gtp=2, ep=2):
        codes = codes_of(load(tmp_path / "imported", recipe=gtp.recipes.FP8Blocks()))
    for expert in range(QWEN3_MOE["num_experts"]):
        name = f"model.layers.1.mlp.experts.{expert}.down_proj.weight"
        found = codes["blocks/layers/mlp/down/kernel"]
        assert found.codes[1, expert].tobytes() == published[name].tobytes()
        assert found.scales[1, expert].tobytes() == published[f"{name}_scale_inv"].astype(np.float32).tobytes()


@pytest.mark.parametrize("change", ["another block", "a layer in high precision"])
def test_what_is_not_whole_in_the_format_is_kept_as_values_only(change, tmp_path):
    quantized(tmp_path / "hf", "fp8 in blocks" if change == "another block" else LAYOUT)
    name = "model.layers.1.mlp.down_proj.weight"
    if change != "another block":
        tensors = {key: value.copy() for key, value in read_model(tmp_path / "hf").items()}
        tensors[name] = tensors[name].astype(np.float32)
        del tensors[f"{name}_scale_inv"]
        write_file(tmp_path / "hf" / "model.safetensors", tensors)
    done = import_llama(tmp_path / "hf", tmp_path / "imported")
    kept = set() if change == "another block" else set(NAMES) - {"mlp/down/kernel"}
    assert set(done.codes) == {f"blocks/layers/{one}" for one in kept}
    leaves = Checkpoints(tmp_path / "imported", read_only=True).manifest()["leaves"]
    assert len([one for one in leaves if one.startswith("codes/")]) == 2 * len(kept)


def test_a_negative_scale_is_refused(tmp_path):
    quantized(tmp_path / "hf", LAYOUT)
    tensors = {key: value.copy() for key, value in read_model(tmp_path / "hf").items()}
    tensors["model.layers.0.mlp.down_proj.weight_scale_inv"][0, 0] *= -1
    write_file(tmp_path / "hf" / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=naming("down_proj.weight_scale_inv")):
        import_llama(tmp_path / "hf", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()
