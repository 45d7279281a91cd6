"""Saves with PyTorch's distributed checkpoint: `torchrun --nproc-per-node N saving_torch.py JOB` on N devices.

Stacks of matrices are saved as one array per layer, as in a PyTorch model. Weights are sharded over fsdp. If N is even,
they are also restored on another mesh, with tp 2, which shards the second dimension of matrices.
"""

from __future__ import annotations

import math
import os
import shutil
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]
import torch.distributed.checkpoint as dcp  # pyright: ignore[reportMissingImports]
import torch.distributed.tensor as dtensor  # pyright: ignore[reportMissingImports]
from saving import Clock, Job, job, tell
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # pyright: ignore[reportMissingImports]
from torch.distributed.device_mesh import init_device_mesh  # pyright: ignore[reportMissingImports]
from torch.distributed.tensor import Shard  # pyright: ignore[reportMissingImports]

_THREADS = 8


class _KeptStager(DefaultStager):
    """A stager that uses the same pinned memory for all saves.

    After every save, PyTorch 2.11 closes the stager and the object inside it that copies, which makes both unusable.
    """

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self._state_dict_stager.close = lambda: None

    def close(self) -> None:
        """Does nothing."""


def state(given: Job, mesh: Any) -> dict[str, Any]:
    """Returns the arrays by name, sharded over a mesh and filled with random numbers."""
    ranks = math.prod(mesh.shape)
    tensors = {}
    for index, stacked in enumerate(given.shapes):
        layers, shape = (stacked[0], stacked[1:]) if len(stacked) == 3 else (1, stacked)
        dims = sorted(range(len(shape)), key=shape.__getitem__, reverse=True)  # the longest is sharded over fsdp
        cuts = [Shard(dims[axis % len(dims)]) for axis in range(mesh.ndim)]
        assert all(size % ranks == 0 for size in shape), (shape, ranks)
        for layer in range(layers):
            array = dtensor.empty(*shape, device_mesh=mesh, placements=cuts)
            array.to_local().normal_()
            tensors[f"{index}.{layer}"] = array
    return tensors


def main() -> None:
    """Saves, restores, and restores on another mesh if there is one, in rounds."""
    given = job()
    cuda, rank, ranks = given.platform == "gpu", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = "cuda" if cuda else "cpu"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    mesh = init_device_mesh(device, (ranks,), mesh_dim_names=("fsdp",))
    both = init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=("fsdp", "tp")) if ranks % 2 == 0 else None
    # On GPUs, the way that blocks the caller least: pinned memory that is kept between saves, and a background thread.
    options = StagingOptions(use_pinned_memory=cuda, use_shared_memory=cuda, use_async_staging=False)
    staging = {"async_stager": _KeptStager(options)} if cuda else {}
    saved = state(given, mesh)
    # The arrays into which states are restored. They are made once, because only reading is timed.
    like, other = state(given, mesh), None if both is None else state(given, both)

    def report(**facts: Any) -> None:
        if rank == 0:
            tell(**facts)

    def restored(target: Any) -> float:
        dist.barrier()
        clock = Clock()
        dcp.load(target, checkpoint_id=given.directory)
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        return clock.seconds()

    report(state_bytes=sum(4 * math.prod(shape) for shape in given.shapes), versions={"torch": torch.__version__})
    for _ in range(given.rounds + 1):
        if rank == 0:
            os.sync()
        writer = dcp.FileSystemWriter(given.directory, thread_count=_THREADS, single_file_per_rank=False)
        dist.barrier()
        clock = Clock()
        if given.variant == "async":
            pending: Any = dcp.async_save(saved, storage_writer=writer, **staging)
            blocked = clock.seconds()
            pending.result()
        else:
            dcp.save(saved, storage_writer=writer)
            blocked = clock.seconds()
        dist.barrier()
        report(blocked=blocked, saved=clock.seconds())
        report(restored=restored(like))
        if other is not None:
            report(moved=restored(other))
        dist.barrier()
        if rank == 0:
            shutil.rmtree(given.directory)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
