"""The same with PyTorch's distributed checkpoint, a process a device; torch is asked for only here.

`measure_torch` starts this file under torchrun, where it runs as a program of its own.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_WHAT = ("blocked", "saved", "restored", "moved")
_THREADS = 8


def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def measure_torch(
    shapes: Sequence[Sequence[int]], directory: Path, *, rounds: int, processes: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each round, by what was done, as in `CheckpointTimes`.

    Args:
        shapes: of the float32 arrays of the state.
        directory: for the files.
        rounds: after one that is not counted.
        processes: one a device.
        device: `cuda` or `cpu`.

    Raises:
        RuntimeError: with the end of its output, if it fails.
    """
    job, result = directory / "torch.json", directory / "torch_result.json"
    settings = {"shapes": [list(s) for s in shapes], "rounds": rounds, "device": device, "result": str(result)}
    job.write_text(json.dumps(settings | {"directory": str(directory / "torch")}))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes)), **os.environ}
    run = subprocess.run([*launch, __file__, str(job)], capture_output=True, text=True, env=environment)
    if run.returncode:
        raise RuntimeError((run.stderr or run.stdout).strip()[-2000:])
    return json.loads(result.read_text())


def _main(settings: dict[str, Any]) -> None:
    import torch  # pyright: ignore[reportMissingImports]
    import torch.distributed as dist  # pyright: ignore[reportMissingImports]
    import torch.distributed.checkpoint as dcp  # pyright: ignore[reportMissingImports]
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # pyright: ignore[reportMissingImports]
    from torch.distributed.device_mesh import init_device_mesh  # pyright: ignore[reportMissingImports]
    from torch.distributed.tensor import Shard, distribute_tensor  # pyright: ignore[reportMissingImports]

    device, rank, ranks = settings["device"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    cuda = device == "cuda"
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    fsdp = init_device_mesh(device, (ranks,), mesh_dim_names=("fsdp",))
    both = init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=("fsdp", "tp")) if ranks % 2 == 0 else None

    def state(mesh: Any, fill: bool) -> dict[str, Any]:
        made = {}
        for index, shape in enumerate(settings["shapes"]):
            dim = max(range(len(shape)), key=shape.__getitem__)
            cut = [Shard(dim)] * mesh.ndim if math.prod(shape) > 1 << 16 else [Shard(0)] * mesh.ndim
            whole = torch.randn(shape, device=device) if fill else torch.empty(shape, device=device)
            made[str(index)] = distribute_tensor(whole, mesh, cut)
        return made

    def seconds(work: Any) -> float:
        dist.barrier()
        begin = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        return time.perf_counter() - begin

    # Pinned memory that stays, and a background thread: what blocks least.
    options = StagingOptions(use_pinned_memory=cuda, use_shared_memory=cuda, use_async_staging=False)
    stager = DefaultStager(options) if cuda else None
    saved, found, folder = state(fsdp, True), {what: [] for what in _WHAT}, settings["directory"]
    for index in range(settings["rounds"] + 1):
        dist.barrier()
        begin = time.perf_counter()
        writer = dcp.FileSystemWriter(folder, thread_count=_THREADS, single_file_per_rank=False)
        pending: Any = dcp.async_save(saved, storage_writer=writer, **({"async_stager": stager} if stager else {}))
        blocked = time.perf_counter() - begin
        pending.result()
        dist.barrier()
        times = {"blocked": blocked, "saved": time.perf_counter() - begin}
        times["restored"] = seconds(lambda: dcp.load(state(fsdp, False), checkpoint_id=folder))
        if both is not None:
            times["moved"] = seconds(lambda: dcp.load(state(both, False), checkpoint_id=folder))
        for what, value in times.items() if index else ():
            found[what].append(value)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
        dist.barrier()
    if rank == 0:
        Path(settings["result"]).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    _main(json.loads(Path(sys.argv[1]).read_text()))
