"""The script that docs/from-fsdp.md moves to gtp_jax runs in PyTorch, on two processes without GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_REASON = "torch is not installed; tests/interop/environment.sh makes an environment that has it"
pytest.importorskip("torch", reason=_REASON)

from docs.pages import ROOT, blocks  # noqa: E402


def test_the_script_before_runs_and_saves_a_checkpoint_per_epoch(tmp_path):
    page = blocks(ROOT / "docs" / "from-fsdp.md", "python")
    (block,) = [block for block in page if Path(__file__).name in block.reason]
    (tmp_path / "train.py").write_text(block.code)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(launch, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
    first, second = (float(loss) for loss in re.findall(r"epoch \d: loss (\S+)", ran.stdout))
    assert second < first < 8
    assert [(tmp_path / "run" / name / ".metadata").exists() for name in ("0", "1")] == [True, True]
