"""A checkpoint that FSDP2 has saved comes here by the program of docs/from-fsdp.md."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

_REASON = "not installed; tests/interop/environment.sh makes an environment that has it"
pytest.importorskip("transformers", reason=f"transformers is {_REASON}")
pytest.importorskip("torch", reason=f"torch is {_REASON}")

from convert.hugging_face import CONFIG  # noqa: E402
from docs.pages import ROOT, blocks  # noqa: E402

import gtp_jax as gtp  # noqa: E402
from gtp_jax.convert import import_llama  # noqa: E402
from gtp_jax.models import load  # noqa: E402

TOKENS = np.arange(32, dtype=np.int32).reshape(2, 16) * 3 % 100


def test_a_checkpoint_of_two_processes_has_the_same_logits_here(tmp_path, monkeypatch):
    folder, saved, out = (tmp_path / name for name in ("model", "dcp", "hf"))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    program = Path(__file__).with_name("save_fsdp2.py")
    subprocess.run([sys.executable, program, folder, saved, tmp_path / "logits.npy"], check=True)

    page = blocks(ROOT / "docs" / "from-fsdp.md", "python")
    (block,) = [block for block in page if Path(__file__).name in block.reason]
    monkeypatch.setattr(sys, "argv", ["program", *map(str, (folder, saved, out))])
    exec(compile(block.code, str(block.page), "exec"), {"__name__": "page"})

    import_llama(out, tmp_path / "imported")
    with jax.set_mesh(gtp.make_mesh(gtp=2, tp=2, devices=jax.devices()[:4])):
        found = nnx.jit(lambda model, x: model(x))(load(tmp_path / "imported", dtype="float32"), TOKENS)
    wanted = np.load(tmp_path / "logits.npy")
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
