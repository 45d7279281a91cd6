"""Under jax.distributed every process writes and reads its own share."""

import os
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest

from gtp_jax.checkpoint import Checkpoints

from .processes import free_address, printed_by, start

STATE = """
import jax, optax
import gtp_jax as gtp
from flax import nnx
from gtp_jax.nn import abstract_model

class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = gtp.Embed(1002, 64, rngs=rngs)
        self.dense = gtp.Dense(64, 120, use_bias=True, rngs=rngs)

def shapes(**degrees):
    with jax.set_mesh(gtp.make_mesh(**degrees)):
        return gtp.TrainState.create(abstract_model(Model), optax.adamw(1e-3))

def values(**degrees):
    with jax.set_mesh(gtp.make_mesh(**degrees)):
        state = gtp.TrainState.create(gtp.init(Model, nnx.Rngs(5)), optax.adamw(1e-3))
        return jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s))(state)  # moments other than zero
"""

WORKER = """
import errno, pathlib, shutil, sys
import jax
from gtp_jax.checkpoint import Checkpoints, _checkpoints

address, rank, shared, private = sys.argv[1:]
jax.distributed.initialize(address, 2, int(rank))
with Checkpoints(shared) as checkpoints:
    checkpoints.save(1, values(gtp=4, tp=2), {"order": [3, 1]})
like = shapes(gtp=8)
with jax.set_mesh(gtp.make_mesh(gtp=8)), Checkpoints(shared) as checkpoints:
    restored, extra = checkpoints.restore(like)
    checkpoints.save(2, restored, extra)
try:
    Checkpoints(shared if rank == "0" else private).restore(like)
except OSError as error:
    print(error)
own = shared
if rank == "1":  # what this process alone reads is damaged
    own = f"{private}.copy"
    shutil.copytree(shared, own)
    for file in sorted(pathlib.Path(own, "2", "arrays").rglob("d/*")):
        file.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
passed = []
_, _, step = Checkpoints(own).restore_last_whole(like, lambda step, error: passed.extend(error.lines))
print("from step", step, *passed[:1])
if rank == "1":
    def refused(*_, **__):
        raise OSError(errno.EIO, "Input/output error")
    _checkpoints.read_arrays = refused
try:
    Checkpoints(shared).restore_last_whole(like)
except OSError as error:
    print(error)
jax.distributed.shutdown()
"""


TWO_AT_ONCE = """
import sys
import jax, numpy as np
import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints

address, rank, folder = sys.argv[1:]
jax.distributed.initialize(address, 2, int(rank))
whole = jax.sharding.NamedSharding(gtp.make_mesh(gtp=2), jax.sharding.PartitionSpec())
kept = {"checkpoints": 2, "snapshots": 1}
every = [Checkpoints(f"{folder}/{name}", keep=keep) for name, keep in kept.items()]
for step in range(1, 21):
    for one in every:
        one.save(step, {"w": jax.device_put(np.full(8, step, np.int32), whole)})
for one in every:
    one.close()
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes_share_a_checkpoint_that_one_process_can_read(tmp_path, logical, assert_same_bits):
    # Compiled as this process compiles: LLVM's passes decide whether the values at birth fuse a multiply with an add.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    shared, private = str(tmp_path / "shared"), str(tmp_path / "private")
    workers = start(STATE + WORKER, 2, shared, private, XLA_FLAGS=flags)
    scope: dict = {}
    exec(STATE, scope)
    state = scope["values"](gtp=2, tp=2, dp=2)
    wanted = logical(state)
    for out in printed_by(workers):
        assert "the processes see different checkpoints in" in out and "step [2, -1] in process 0 to 1 (-1: no" in out
        assert re.search("from step 1 .*: changed since it was written", out)
        assert "could not be read in process 1 in 3 attempts, though nothing proves that it is damaged: " in out
    for step in (1, 2):
        assert {"ocdbt.process_0", "ocdbt.process_1"} <= set(os.listdir(f"{shared}/{step}/arrays"))
        restored, extra = Checkpoints(shared).restore(state, step)
        assert extra == {"order": [3, 1]}
        assert_same_bits(logical(restored), wanted)


@pytest.mark.slow
def test_two_directories_are_saved_at_the_same_time(tmp_path):
    printed_by(start(TWO_AT_ONCE, 2, str(tmp_path), JAX_NUM_CPU_DEVICES="1"))
    for name, kept in (("checkpoints", [19, 20]), ("snapshots", [20])):
        checkpoints = Checkpoints(tmp_path / name, read_only=True)
        assert checkpoints.steps() == kept
        assert checkpoints.restore({"w": jnp.zeros(8, jnp.int32)})[0]["w"].tolist() == [20] * 8


@pytest.mark.full
def test_a_manifest_is_read_before_processes_are_connected(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, {"w": jnp.ones(2)})
    code = f"""
import jax
from gtp_jax.checkpoint import Checkpoints
print(Checkpoints({str(tmp_path)!r}, read_only=True).manifest()["step"])
jax.distributed.initialize({free_address()!r}, 1, 0)  # raises once JAX has started
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "3\n", done.stderr
