"""A long run with many checkpoints, whose memory, threads and open files are watched.

python benchmarks/scripts/soak.py --help
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

# How much the median of the last third may exceed that of the second; the first third warms up.
GROWTH = {"memory, MiB": 1.03, "threads": 1.0, "open files": 1.0}


def sampled(pid: int) -> dict[str, float]:
    """Returns what a process has now, of Linux's /proc."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "memory, MiB": int(status["VmRSS"].split()[0]) / 1024,
        "threads": int(status["Threads"]),
        "open files": len(os.listdir(f"/proc/{pid}/fd")),
    }


def soak(steps: int, saves: int, folder: Path, seconds: float = 1.0) -> list[dict[str, float]]:
    """Trains a small model on one virtual device; returns a sample a second of its steps.

    Raises:
        RuntimeError: if the run fails, with what it printed.
    """
    flags = ["--preset=tiny", "--gtp=1", "--local-devices=1", "--seq=32", "--batch=2", f"--steps={steps}"]
    every = [f"--save-every={steps // saves}", f"--eval-every={steps // saves}", "--eval-batches=1"]
    output = folder / "printed.txt"
    with output.open("wb") as printed:
        run = subprocess.Popen(
            [sys.executable, "-m", "gtp_jax", "train", *flags, *every, f"--out={folder / 'run'}"],
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        )
    samples = []
    try:
        while run.poll() is None:
            time.sleep(seconds)
            if (folder / "run" / "log.jsonl").exists():
                try:
                    samples.append(sampled(run.pid))
                except (FileNotFoundError, ProcessLookupError, KeyError):
                    break  # it has just ended
    finally:
        code = run.wait()
    if code:
        raise RuntimeError(f"the run ended with {code}:\n{output.read_text()[-4000:]}")
    return samples


def growth(samples: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Returns the medians of the second and of the last third of samples, by name."""
    third = len(samples) // 3
    parts = samples[third : 2 * third], samples[2 * third :]
    return {name: tuple(statistics.median(s[name] for s in part) for part in parts) for name in GROWTH}  # pyright: ignore[reportReturnType]


def main() -> int:
    """Prints how much grew; returns 1 if something did."""
    parser = argparse.ArgumentParser(
        description="Trains for long on one virtual CPU device, and says what grew meanwhile."
    )
    parser.add_argument("--steps", type=int, default=5000, metavar="N", help="of the run (default: 5000)")
    parser.add_argument("--saves", type=int, default=100, metavar="N", help="checkpoints of the run (default: 100)")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = growth(soak(asked.steps, asked.saves, Path(folder)))
    for name, (second, last) in found.items():
        print(f"{name:<12} {second:10.1f} {last:10.1f}   {'flat' if last <= GROWTH[name] * second else 'GROWS'}")
    return int(any(last > GROWTH[name] * second for name, (second, last) in found.items()))


if __name__ == "__main__":
    sys.exit(main())
