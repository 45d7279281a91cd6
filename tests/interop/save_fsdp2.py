"""Takes a step with FSDP2 on two processes and saves a checkpoint: `python save_fsdp2.py MODEL DCP LOGITS.npy`."""

import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

PROCESSES = 2
TOKENS = torch.arange(32).reshape(2, 16) * 3 % 100


def run(rank: int, store: str, folder: str, saved: str, logits: str) -> None:
    """One process of the step."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    mesh = init_device_mesh("cpu", (PROCESSES,))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=saved)
    with torch.no_grad():
        found = model(TOKENS).logits
    if rank == 0:
        np.save(logits, found.numpy())
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/store", *sys.argv[1:]), nprocs=PROCESSES)
