"""Trains on hosts of a Ray cluster: `python examples/launch/ray_job.py --hosts 4 --gpus 8 -- --preset=8b ...`.

Ray's `JaxTrainer` starts one worker per host; each worker starts `gtp-jax train` with the address of worker 0. What
follows `--` goes to `gtp-jax train`. When a worker fails, Ray starts all of them again, and `--resume=auto` continues
the run from its last checkpoint.
"""

import argparse
import socket
import subprocess
import sys

import ray
import ray.train.collective
from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


def work(config: dict) -> None:
    context = train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    mine = f"{ray.util.get_node_ip_address()}:{free_port()}" if rank == 0 else None
    coordinator = ray.train.collective.broadcast_from_rank_zero(mine)
    command = [sys.executable, "-m", "gtp_jax", "train", "--resume=auto", *config["flags"]]
    if size > 1:
        command += [f"--coordinator={coordinator}", f"--num-processes={size}", f"--process-id={rank}"]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains on a Ray cluster; flags after -- go to gtp-jax train.")
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of each host; 0 for CPUs")
    parser.add_argument("--storage", help="a directory or bucket for Ray's own files, shared by all hosts")
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    resources = {"GPU": args.gpus} if args.gpus else {"CPU": 1}
    JaxTrainer(
        work,
        train_loop_config={"flags": args.flags},
        jax_config=JaxConfig(),  # gtp-jax connects the processes
        scaling_config=ScalingConfig(
            num_workers=args.hosts,
            use_gpu=args.gpus > 0,
            resources_per_worker=resources,
            placement_strategy="STRICT_SPREAD" if args.gpus else "PACK",
        ),
        run_config=RunConfig(
            name="gtp_jax", storage_path=args.storage, failure_config=FailureConfig(max_failures=args.restarts)
        ),
    ).fit()


if __name__ == "__main__":
    main()
