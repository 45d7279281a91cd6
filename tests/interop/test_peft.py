"""PEFT loads the adapters of a run onto the model that it started from, and computes what gtp_jax does."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

_REASON = "not installed; tests/interop/environment.sh makes an environment that has it"
peft = pytest.importorskip("peft", reason=f"peft is {_REASON}")
transformers = pytest.importorskip("transformers", reason=f"transformers is {_REASON}")
torch = pytest.importorskip("torch", reason=f"torch is {_REASON}")

import safetensors.torch  # noqa: E402

import gtp_jax as gtp  # noqa: E402
from gtp_jax.checkpoint import Checkpoints  # noqa: E402
from gtp_jax.convert import export_llama, export_peft, import_llama, merge_adapters  # noqa: E402
from gtp_jax.models import Adapters, load, saved  # noqa: E402

TOKENS = np.random.default_rng(0).integers(0, 101, (4, 24))
SIZES = dict(
    vocab_size=101,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
KINDS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def theirs(model):
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.float().numpy()


def ours(checkpoint):
    with jax.set_mesh(gtp.make_mesh(tp=2, devices=jax.devices()[:2])):
        return np.asarray(nnx.jit(lambda model, x: model(x))(load(checkpoint, dtype="float32"), TOKENS))


def assert_close(found, wanted):
    """Equal to 1e-5 of the largest."""
    largest = np.abs(wanted).max()
    print(f"difference of logits, of the largest: {np.abs(found - wanted).max() / largest:.1e}")
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * largest)


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    """A folder with a model of transformers, and a run with adapters that start from its import."""
    folder, (config, kind) = tmp_path_factory.mktemp("peft"), KINDS[request.param]
    torch.manual_seed(0)
    kind(config(**SIZES, initializer_range=0.1)).save_pretrained(folder / "hf")
    imported = import_llama(folder / "hf", folder / "imported")
    adapters = Adapters(4, 8.0, ("query", "value", "out", "mlp"))
    with jax.set_mesh(gtp.make_mesh(gtp=4, tp=2)):
        model = adapters.on(load(folder / "imported", dtype="float32"), nnx.Rngs(0))
        for place, (path, v) in enumerate(nnx.to_flat_state(nnx.state(model, nnx.LoRAParam))):
            if path[-1] == "b":
                value = np.random.default_rng(place).normal(0, 0.2, v.get_value().shape).astype(np.float32)
                nnx.update(
                    model, nnx.from_flat_state([(path, v.replace(jax.device_put(value, v.get_value().sharding)))])
                )
        with Checkpoints(folder / "run") as checkpoints:
            state = gtp.TrainState.create(model, optax.sgd(0.1))
            checkpoints.save(1, state, {**saved(imported.config), **adapters.extra()})
    return folder, kind


def test_peft_computes_with_exported_adapters_what_gtp_jax_does(made, tmp_path):
    folder, kind = made
    done = export_peft(folder / "run", tmp_path / "adapter")
    assert done.targets == ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    base = kind.from_pretrained(folder / "hf", dtype=torch.float32)
    before = theirs(base)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    wanted = theirs(adapted)
    assert np.abs(wanted - before).max() > 0.01 * np.abs(before).max()
    assert_close(ours(folder / "run"), wanted)
    # PEFT writes them again as they were
    adapted.save_pretrained(tmp_path / "again")
    one, other = (tensors(path) for path in (tmp_path / "adapter", tmp_path / "again"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def tensors(folder):
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")


def test_merged_weights_are_those_that_peft_merges(made, tmp_path):
    folder, kind = made
    merge_adapters(folder / "run", tmp_path / "merged")
    export_peft(folder / "run", tmp_path / "adapter")
    export_llama(tmp_path / "merged", tmp_path / "hf", dtype="float32")
    base = kind.from_pretrained(folder / "hf", dtype=torch.float32)
    wanted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    found = kind.from_pretrained(tmp_path / "hf", dtype=torch.float32).state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    assert_close(ours(tmp_path / "merged"), theirs(kind.from_pretrained(tmp_path / "hf", dtype=torch.float32)))
