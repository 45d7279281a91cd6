"""Starts `gtp-jax train` in processes of its own."""

from __future__ import annotations

import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from messages import naming

import gtp_jax
from gtp_jax.runner.cli import main
from gtp_jax.runner.trainer import read_log

WORDS = "def return self weight gather slice scatter mesh axis for in range import yield None True assert".split()
TIMEOUT_S = 120


def write_text(folder: Path, documents: int = 40) -> Path:
    """Some 100 kB of words to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        (folder / f"{i:02d}.txt").write_text(" ".join(random.Random(i).choices(WORDS, k=450)))
    return folder


def small(text: Path, out: Path, **changes: Any) -> list[str]:
    """Flags of a run that takes seconds; a flag that is None is left out."""
    # layers are written out and compiled one by one; of two, the second is gathered ahead, as of the four of "tiny"
    flags = dict(data=text, out=out, num_layers=2, steps=8, seq=32, batch=8)
    flags |= dict(eval_every=4, eval_batches=1, save_every=2, sample_tokens=0)
    return [f"--{k.replace('_', '-')}={v}" for k, v in {**flags, **changes}.items() if v is not None]


def python(*words: object, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    """Starts Python with this package, on CPU devices unless the environment that is added says otherwise."""
    root = str(Path(gtp_jax.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root, **(env or {"JAX_PLATFORMS": "cpu"})}
    return subprocess.Popen([sys.executable, *map(str, words)], text=True, env=environment, **options)


def start(flags: list[str], *, output: Path | None = None, gpus: str | None = None) -> subprocess.Popen[str]:
    """Starts a run on virtual CPU devices, or on the GPUs named; its output goes to a file if one is given."""
    where: Any = subprocess.PIPE if output is None else output.open("w")
    env = None if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    return python("-m", "gtp_jax", "train", *flags, env=env, stdout=where, stderr=subprocess.STDOUT)


def finish(run: subprocess.Popen[str]) -> str:
    """Waits for a run and returns its output."""
    try:
        return run.communicate(timeout=TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        run.kill()
        raise AssertionError(f"still running after {TIMEOUT_S} s: {run.communicate()[0][-2000:]}") from None


def train(flags: list[str], *, gpus: str | None = None) -> str:
    """A run that must succeed; returns its output."""
    run = start(flags, gpus=gpus)
    output = finish(run)
    assert run.returncode == 0, output[-4000:]
    return output


@contextmanager
def processes(
    count: int, flags: list[str], folder: Path, *, last: list[str] | None = None, gpu_each: bool = False
) -> Iterator[list[subprocess.Popen[str]]]:
    """A run in several processes, whose output goes to `folder/process0.txt` and so on; `last`: more for the last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    shared = [*flags, f"--coordinator=127.0.0.1:{port}", f"--num-processes={count}"]
    extra = [[]] * (count - 1) + [last or []]
    runs = []
    for i in range(count):
        gpus = str(i) if gpu_each else None
        own = [f"--process-id={i}", *extra[i]]
        runs.append(start([*shared, *own], output=folder / f"process{i}.txt", gpus=gpus))
    try:
        yield runs
    finally:
        for run in runs:
            run.kill()
            run.wait()


def wait_until(condition: Callable[[], bool], run: subprocess.Popen[str], seconds: float = TIMEOUT_S) -> None:
    """Waits for something that a run does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert run.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.02)


def read_records(out: Path) -> list[dict[str, Any]]:
    """The log of a run, without what depends on the clock."""
    records = read_log(out / "log.jsonl")
    return [{k: v for k, v in record.items() if not k.endswith("_per_s")} for record in records]


def logged(out: Path, step: int) -> bool:
    """Whether a run has logged this step."""
    return (out / "log.jsonl").exists() and any(r["step"] >= step for r in read_records(out) if "loss" in r)


def losses(out: Path, *names: str) -> dict[tuple[int, str], float]:
    """The losses of a log by step and name: those of training and held-out text, or those that are named."""
    names = names or ("loss", "held_out")
    return {(r["step"], name): r[name] for r in read_log(out / "log.jsonl") for name in names if name in r}


def refused(capsys: Any, message: str, *words: object) -> None:
    """Asserts that a command ends with status 2, and an error that names what `message` does."""
    capsys.readouterr()
    assert main(list(map(str, words))) == 2
    errors = capsys.readouterr().err
    assert re.search(naming(message), errors), errors
