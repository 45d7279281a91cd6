"""No process reads, writes or holds a whole model: each has its share of the bytes, on disk and in memory."""

import json
import os

import pytest

from .processes import printed_by, start

pytestmark = pytest.mark.slow

WORKER = """
import gc, json, sys
import jax, jax.numpy as jnp, optax
import gtp_jax as gtp
from gtp_jax.checkpoint import Checkpoints
from gtp_jax.models import Llama, LlamaConfig
from gtp_jax.nn import abstract_model

address, rank, directory = sys.argv[1:]
jax.distributed.initialize(address, 4, int(rank))
config = LlamaConfig(vocab_size=1024, hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=4,
                     head_dim=64, intermediate_size=2048)

def shapes(**degrees):
    with jax.set_mesh(gtp.make_mesh(**degrees)):
        return gtp.TrainState.create(abstract_model(lambda rngs: Llama(config, rngs=rngs)), optax.adamw(1e-3))

def filled(leaf):
    make = (lambda: jax.random.normal(jax.random.key(leaf.size), leaf.shape)) if leaf.ndim else (lambda: jnp.int32(3))
    return jax.jit(make, out_shardings=leaf.sharding)()

def status(name):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[name].split()[0]) * 1024

def transferred():
    return {line.split(":")[0]: int(line.split(":")[1]) for line in open("/proc/self/io")}

def measured(work):
    '''What the process read, wrote, and held at most beyond what it held before there was a state.'''
    gc.collect()
    open("/proc/self/clear_refs", "w").write("5")
    io = transferred()
    out = work()
    after = transferred()
    held = status("VmHWM") - bare
    return out, {"read": after["rchar"] - io["rchar"], "written": after["wchar"] - io["wchar"], "held": held}

like = shapes(gtp=8)
jax.block_until_ready(jax.tree.map(filled, like))  # compiles; a first state is made and freed
gc.collect()
bare = status("VmRSS")
state = jax.tree.map(filled, like)
jax.block_until_ready(state)
own = sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
whole = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
checkpoints = Checkpoints(directory)

def save():
    checkpoints.save(1, state)
    checkpoints.wait()

_, saved = measured(save)
checkpoints.close()
found = {"own": own, "whole": whole, "save": saved}
del state
for name, degrees in {"same": dict(gtp=8), "tp": dict(gtp=4, tp=2)}.items():
    like = shapes(**degrees)
    restored, found[name] = measured(lambda: jax.block_until_ready(checkpoints.restore(like)[0]))
    del restored
print("FOUND" + json.dumps(found))
jax.distributed.shutdown()
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of four processes, with two devices each, read, wrote and held."""
    # What is freed goes back at once, or it would count for held.
    environment = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    environment["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    directory = str(tmp_path_factory.mktemp("shared") / "run")
    return [json.loads(out.split("FOUND")[1]) for out in printed_by(start(WORKER, 4, directory, **environment))]


def test_each_process_reads_and_writes_its_share(found):
    for one in found:
        assert 0.24 < one["own"] / one["whole"] < 0.26
        assert 0.2 < one["save"]["written"] / one["whole"] < 0.26
        for mesh in ("same", "tp"):
            assert 0.2 < one[mesh]["read"] / one["whole"] < 0.26, mesh
            assert one[mesh]["written"] < 2**20, mesh


def test_no_process_ever_holds_a_whole_model(found):
    for one in found:
        # its share, and what of it is being coded or decoded; some noise, for the memory is that of the process
        for what in ("save", "same", "tp"):
            assert 0.9 * one["own"] < one[what]["held"] < 0.75 * one["whole"], (what, one)
