"""Measures what a recovery takes on this machine's GPUs, or on one virtual CPU device, from an empty and a warm cache.

    python benchmarks/scripts/recovery_times.py --preset 1b -- --batch 8 --seq 2048

Each run under a supervisor makes steps until a snapshot counts. Then a process of it is killed, or stopped, so that it
is silent, and the run must make its next step within the time: 60 s if it compiles anew, 30 s if its programs are in
the persistent compilation cache. One GPU is enough: its process is started again. Data are the standard library's
source.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gtp_jax.hlo import columns
from gtp_jax.runner.elastic._devices import uses_gpus
from gtp_jax.runner.elastic._events import PARTS

ROOT = Path(__file__).parents[2]
HARM = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
LIMITS_S = {"empty": 60.0, "warm": 30.0}
# In this order each cache is what the run before has left, or is emptied.
CASES = [("kill", "empty"), ("kill", "warm"), ("stop", "warm"), ("stop", "empty")]
HEADER = ("harm", "cache", *(part.removesuffix("_s") for part in PARTS), "in all", "limit", "steps lost")


def arguments(options: argparse.Namespace, out: Path, snapshots: Path) -> list[str]:
    """Returns the flags of a run that does not end by itself."""
    flags = dict(preset=options.preset, out=out, snapshot_dir=snapshots, snapshot_interval=options.snapshot_interval)
    flags.update(steps=1_000_000, save_every=1_000_000, eval_every=1_000_000, eval_batches=1)
    own = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    # a rehearsal would fill the cache that is to be empty
    return ["--elastic", "--no-rehearse", *own, *([] if uses_gpus() else ["--gtp=1"]), *options.flags]


@contextlib.contextmanager
def running(flags: Sequence[str], folder: Path, cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A run under a supervisor, whose output goes to `folder/output.txt`."""
    surroundings = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    with (folder / "output.txt").open("w") as output:
        command = [sys.executable, "-m", "gtp_jax", "train", *flags]
        run = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=surroundings)
    try:
        yield run
    finally:
        run.kill()  # which ends its processes, too, and saves nothing
        run.wait()


def events(out: Path, name: str) -> list[dict[str, Any]]:
    """Returns the events of one name that a run's supervisor has written so far."""
    path = out / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in found if "process" not in event and event["event"] == name]


def wait(condition: Callable[[], Any], run: subprocess.Popen[str], seconds: float) -> Any:
    """Waits for something that a run does, and returns it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if run.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the run ended too early" if run.poll() is not None else f"not within {seconds} s")
        time.sleep(0.02)
    return found


def recovery(harm: str, cached: str, options: argparse.Namespace, root: Path, cache: Path) -> dict[str, Any]:
    """Harms a run that makes steps, and returns what its recovery took.

    Args:
        harm: a key of `HARM`.
        cached: `empty` to have no compiled program when the process is harmed.
        options: of the command line.
        root: for what the run writes.
        cache: of compiled programs.
    """
    folder = root / f"{harm}-{cached}"
    folder.mkdir()
    base = options.snapshot_dir or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    with tempfile.TemporaryDirectory(dir=base) as snapshots:
        out = folder / "run"
        with running(arguments(options, out, Path(snapshots)), folder, cache) as run:
            try:
                wait(lambda: events(out, "snapshot"), run, options.timeout)
                time.sleep(options.steps_for)
                programs = [path for path in cache.rglob("*") if path.is_file()]
                if cached == "empty":
                    for path in cache.iterdir():
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
                elif not programs:
                    raise RuntimeError(f"no program is in the cache {cache}")
                os.kill(events(out, "fleet")[-1]["processes"][-1], HARM[harm])
                [recovered] = wait(lambda: events(out, "recovered"), run, options.timeout)
            except RuntimeError as error:
                raise SystemExit(f"{harm}, {cached}: {error}\n{(folder / 'output.txt').read_text()[-4000:]}") from error
    shutil.rmtree(folder)
    return recovered


def main() -> int:
    """Returns 0 if every recovery was within its time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="tiny", metavar="NAME", help="size of the model (default: tiny)")
    parser.add_argument("--harm", choices=HARM, help="do only this (default: both)")
    parser.add_argument("--snapshot-interval", type=int, default=20, metavar="N", help="in steps (default: 20)")
    parser.add_argument("--snapshot-dir", metavar="DIR", help="in memory, with room for two (default: /dev/shm)")
    parser.add_argument("--steps-for", type=float, default=3.0, metavar="S", help="from snapshot to harm (default: 3)")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="of each wait (default: 300)")
    parser.add_argument("--limit", type=float, default=1e9, metavar="S", help="start no run after these seconds")
    parser.add_argument("flags", nargs="*", help="further flags of `gtp-jax train`, behind --")
    options = parser.parse_args()
    began, rows, late = time.monotonic(), [], 0
    with tempfile.TemporaryDirectory() as scratch:
        cache = Path(scratch) / "compiled"
        cache.mkdir()
        for harm, cached in CASES:
            if options.harm not in (None, harm):
                continue
            if time.monotonic() - began > options.limit:
                print(f"{harm}, {cached}: left out, after {time.monotonic() - began:.0f} s", flush=True)
                continue
            found = recovery(harm, cached, options, Path(scratch), cache)
            seconds, limit_s = [found[part] for part in (*PARTS, "total_s")], LIMITS_S[cached]
            late += found["total_s"] > limit_s
            rows.append((harm, cached, *(f"{s:.1f}" for s in seconds), f"{limit_s:.0f}", str(found["steps_lost"])))
            print(f"{time.monotonic() - began:5.0f} s: {harm}, {cached}: {found['text']}", flush=True)
    print(f"\n{columns(HEADER, rows, right=range(2, len(HEADER)))}\n\n{time.monotonic() - began:.0f} s in all")
    print("every recovery was within its time" if not late else f"{late} of {len(rows)} recoveries took too long")
    return 1 if late or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
