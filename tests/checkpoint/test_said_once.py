"""An error is said once: stderr has what is raised, and nothing that orbax and tensorstore print beside it."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import dataclasses, pathlib, resource, sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    params: dict

rng = np.random.default_rng(0)
whole = NamedSharding(gtp.make_mesh(devices=jax.devices()[:1]), PartitionSpec())
arrays = {f"w{i}": rng.standard_normal((256, 256)).astype(np.float32) for i in range(40)}
state = State(jax.device_put(arrays, whole))
root = pathlib.Path(sys.argv[1])
with Checkpoints(root / "run") as checkpoints:
    checkpoints.save(1, state)
    checkpoints.restore(state)
print("restored", file=sys.stderr)
largest = max((p for p in (root / "run/1/arrays").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
for what in sys.argv[2:]:
    try:
        if what == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
            with Checkpoints(root / "full") as checkpoints:
                checkpoints.save(1, state)
        else:
            largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 3])
            Checkpoints(root / "run").restore(state)
    except (OSError, ValueError) as error:
        print(type(error).__name__, error, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["full", "damaged"])
def test_a_full_disk_and_a_damaged_file_are_said_once(tmp_path, what):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path, what], capture_output=True, text=True, env=environment, timeout=300
    )
    first, *lines = done.stderr.splitlines()
    assert first == "restored", done.stderr[:2000]
    if what == "full":
        assert len(lines) == 1 and lines[0].startswith("OSError [Errno 27] File too large: a step was not saved"), lines
    else:
        assert len(lines) == 3 and lines[0].startswith("DamagedCheckpoint the checkpoint "), lines
        assert "were written" in lines[1] and lines[2].startswith("Restore another step"), lines
