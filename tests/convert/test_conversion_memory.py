"""Import and export hold a few tensors in memory, however many the model has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gtp_jax

# In a process of its own, whose highest resident size is that of nothing else.
PROGRAM = """
import json, resource, sys
from pathlib import Path
import numpy as np
from gtp_jax.convert import export_llama, import_llama
from gtp_jax.models.llama._hf_names import tensors
from gtp_jax.convert._safetensors import Entry, Writer
from gtp_jax.models import LlamaConfig

config = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=256, hidden_size=512, head_dim=64,
              num_attention_heads=8, num_key_value_heads=8, intermediate_size=1536, rms_norm_eps=1e-5)
values = np.random.default_rng(0).standard_normal(1536 * 512).astype(np.float32)

def convert(folder, layers):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    sizes = LlamaConfig(vocab_size=256, hidden_size=512, num_layers=layers, num_heads=8, num_kv_heads=8, head_dim=64,
                        intermediate_size=1536)
    entries = [Entry(tensor.name, "F32", tensor.shape) for tensor in tensors("llama", sizes)]
    with Writer(folder / "model.safetensors", entries, {}) as writer:
        for entry in entries:
            writer.write(values[: entry.nbytes // 4].reshape(entry.shape))
    import_llama(folder, folder / "imported")
    export_llama(folder / "imported", folder / "exported", dtype="float32")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

root = Path(sys.argv[1])
convert(root / "first", 2)
few = convert(root / "few", 2)
many = convert(root / "many", 12)
size = (root / "many/exported/model.safetensors").stat().st_size
print(json.dumps([many - few, size, values.nbytes]))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    root = Path(gtp_jax.__file__).parents[1]
    environment = {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr[-2000:]
    grown, size, largest = json.loads(run.stdout.splitlines()[-1])
    assert size > 40 * largest
    assert grown < 12 * largest, f"{grown} bytes more for a model of {size}, whose largest tensor has {largest}"
