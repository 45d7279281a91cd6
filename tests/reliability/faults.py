"""Sixty things that go wrong with two processes; run as a program, this suffers them all.

python tests/reliability/faults.py --help
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as pytest has it

from reliability.fleets import Fault, Pair, suffer  # noqa: E402

LONG = ("--steps=100000", "--save-every=5", "--eval-every=100000")
LAST = "[Tt]he last checkpoint is of step"
DEAD = f"cannot go on(.|\n)*{LAST}"


def differs(field: str, flag: str) -> Fault:
    """Process 1 was given another value of one flag."""
    return Fault(f"{flag} on one of the two", rf"  --{field}: ", other=(flag,))


def in_environment(name: str, value: str, says: str) -> Fault:
    """Process 1 has another environment."""
    return Fault(f"{name}={value} on one of the two", says, environment={name: value})


def when(stage: str, number: int, what: signal.Signals, says: str, **options) -> Fault:
    """Something is sent to a process at a stage of the run."""

    def then(pair: Pair) -> None:
        if stage == "start":
            time.sleep(1.5)
        elif stage == "compilation":
            pair.wait_for("mesh ")
            time.sleep(2)
        else:
            pair.wait_for_step(7)
            pair.wait_for_checkpoint()  # of step 5, which the message names
        pair.send(number, what)

    victim = number if stage == "start" or what in (signal.SIGKILL, signal.SIGSTOP) else None
    if stage == "start":
        options["seconds"] = 180  # the other one waits 120 s for it
    return Fault(f"{what.name} to process {number} at {stage}", says, flags=LONG, then=then, victim=victim, **options)


OTHER_VALUES = """
seed=7 batch=8 lr=0.01 steps=6 save-every=3 eval-every=3 eval-batches=2 seq=64 warmup=1 weight-decay=0.2
max-grad-norm=2.0 preset=tiny-moe dtype=bfloat16 microbatches=2 recipe=mxfp8 unroll=1 keep-gathered=0 grad-reduce=bf16
remat=everything keep=5 keep-best=2
"""
DISAGREEMENTS = [
    *(differs(given.partition("=")[0], f"--{given}") for given in OTHER_VALUES.split()),
    differs("prefetch", "--no-prefetch"),
    differs("reduce-over-dp", "--reduce-over-dp=last"),
    differs("shard-optimizer", "--no-shard-optimizer"),
    differs("high-precision-first", "--high-precision-first=1"),
    Fault("other degrees of the mesh on one of the two", "gtp|mesh|device", other=("--gtp=1", "--dp=2")),
    Fault("another number of devices on one of the two", "device", other=("--local-devices=2",)),
]


def other_text(pair: Pair) -> None:
    (pair.folder / "other").mkdir()
    (pair.folder / "other" / "0.txt").write_text("other words " * 3000)


def no_tokenizer(pair: Pair) -> None:
    (pair.folder / "tokenizer.json").write_text("{}")


def changed_code(pair: Pair) -> None:
    shutil.copytree(Path(__file__).parents[2] / "gtp_jax", pair.folder / "changed" / "gtp_jax")
    with (pair.folder / "changed" / "gtp_jax" / "ops" / "_norm.py").open("a") as file:
        file.write("\n# changed\n")
    # the finder of an editable installation comes before PYTHONPATH
    (pair.folder / "changed" / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
    )


INPUTS = [
    Fault("other text on one of the two", "text", first=other_text, other=("--data=other",)),
    Fault("no such text on one of the two", "does not exist", other=("--data=missing",)),
    Fault(
        "a tokenizer on one of the two that is none",
        "tokenizer",
        first=no_tokenizer,
        other=("--tokenizer=tokenizer.json",),
    ),
    Fault("another directory of the run on one of the two", "out", other=("--out=elsewhere",)),
    Fault("--resume on one of the two", "resume|no run", other=("--resume",)),
    Fault("--force on one of the two", "force", other=("--force",)),
    Fault("--from on one of the two", "nowhere", other=("--from=nowhere",)),
    Fault(
        "another version of the code on one of the two",
        "code|version",
        first=changed_code,
        environment={"PYTHONPATH": "changed"},
    ),
    in_environment("XLA_FLAGS", "--xla_cpu_enable_fast_math=true", "XLA_FLAGS|xla_cpu_enable_fast_math"),
    in_environment("JAX_ENABLE_X64", "1", "(?i)x64"),
    in_environment("JAX_DEFAULT_MATMUL_PRECISION", "bfloat16", "(?i)matmul_precision"),
    in_environment("JAX_THREEFRY_PARTITIONABLE", "0", "(?i)threefry"),
]


def taken(pair: Pair) -> None:
    pair.listener = socket.create_server(("127.0.0.1", pair.port))  # pyright: ignore[reportAttributeAccessIssue]


def unwritable(pair: Pair) -> None:
    pair.out.write_text("a file")


MEETING = [
    Fault("three processes on one of the two", "num.processes|3", other=("--num-processes=3",)),
    Fault("the same number twice", "process 0|process_id|number", other=("--process-id=0",), seconds=150),
    Fault("a number out of range", "--process-id is 2", other=("--process-id=2",), seconds=150),
    Fault("a port that is taken", "port|taken|in use", flags=("--join-timeout=10",), first=taken, seconds=150),
    Fault("another port on one of the two", "coordinator", other=("--coordinator=127.0.0.1:9",), seconds=180),
    Fault("a file where the directory of the run should be", "is a file|not a directory|file", first=unwritable),
]


def remove_out(pair: Pair) -> None:
    pair.wait_for_step(7)
    shutil.rmtree(pair.out, ignore_errors=True)


def remove_signs_of_life(pair: Pair) -> None:
    pair.wait_for_step(7)
    for file in pair.out.rglob("*"):
        if re.search("alive|heartbeat|process", file.name):
            shutil.rmtree(file, ignore_errors=True) if file.is_dir() else file.unlink(missing_ok=True)


def suspend_both(pair: Pair) -> None:
    pair.wait_for_step(2)
    for what, pause in ((signal.SIGSTOP, 25.0), (signal.SIGCONT, 0.0)):
        for number in (0, 1):
            pair.send(number, what)
        time.sleep(pause)


def interrupt_both(pair: Pair) -> None:
    pair.wait_for_step(2)
    for number in (0, 1):
        pair.send(number, signal.SIGINT)


def late(pair: Pair) -> None:
    pair.send(1, signal.SIGSTOP)
    time.sleep(20)
    pair.send(1, signal.SIGCONT)


ENDS = [
    *(
        when(
            stage,
            number,
            what,
            DEAD if stage == "steps" else "cannot go on|found no|gone|ended|no sign|process",
        )
        for what in (signal.SIGKILL, signal.SIGSTOP)
        for stage in ("start", "compilation", "steps")
        for number in (0, 1)
    ),
    *(
        when(stage, number, what, "found no coordinator" if stage == "start" else f"signal|{what.name}")
        for what, stage, number in [
            (signal.SIGTERM, "start", 0),
            (signal.SIGTERM, "compilation", 1),
            (signal.SIGTERM, "steps", 0),
            (signal.SIGTERM, "steps", 1),
            (signal.SIGUSR1, "compilation", 0),
            (signal.SIGUSR1, "steps", 1),
            (signal.SIGINT, "steps", 1),
        ]
    ),
    Fault("Ctrl-C to both", "signal", flags=LONG, then=interrupt_both),
    Fault("the directory of the run is removed", "No such file|gone|removed|cannot", flags=LONG, then=remove_out),
    Fault(
        "files of life are removed",
        "",
        flags=("--steps=60", "--save-every=30", "--eval-every=60"),
        then=remove_signs_of_life,
    ),
    Fault(
        "both are suspended for 25 s",
        "",
        flags=("--steps=400", "--save-every=200", "--eval-every=400"),
        then=suspend_both,
    ),
    Fault("one starts 20 s late", "", then=late),
]

FAULTS = [*DISAGREEMENTS, *INPUTS, *MEETING, *ENDS]
SAMPLE = [
    "--seed=7 on one of the two",
    "--steps=6 on one of the two",
    "another number of devices on one of the two",
    "another directory of the run on one of the two",
    "other text on one of the two",
    "the same number twice",
    "a port that is taken",
    "SIGKILL to process 1 at steps",
    "SIGTERM to process 1 at compilation",
    "one starts 20 s late",
]


def main() -> int:
    """Suffers the faults asked for; returns 1 if one of them was not found."""
    parser = argparse.ArgumentParser(
        description="Lets runs of two processes suffer faults, and counts what became of them."
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="those whose name matches")
    parser.add_argument("--sample", action="store_true", help=f"{len(SAMPLE)} of the {len(FAULTS)}")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs at a time, 4 cores each (default: 1)")
    parser.add_argument("--keep", action="store_true", help="say where the output of each that was not found is")
    asked = parser.parse_args()
    chosen = [f for f in FAULTS if re.search(asked.only, f.name) and (not asked.sample or f.name in SAMPLE)]
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    counts: collections.Counter[str] = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(asked.at_once) as pool:
        running = {pool.submit(suffer, fault, folder / str(i)): (i, fault) for i, fault in enumerate(chosen)}
        for done in concurrent.futures.as_completed(running):
            i, fault = running[done]
            outcome = done.result()
            counts[outcome.verdict] += 1
            print(f"{outcome.verdict:<14} {outcome.seconds:5.0f} s {outcome.codes!s:<12} {fault.name}", flush=True)
            if not outcome.good:
                (folder / str(i) / "printed.txt").write_text(outcome.printed)
                if asked.keep:
                    print(f"    {folder / str(i)}{os.sep}printed.txt")
            else:
                shutil.rmtree(folder / str(i), ignore_errors=True)
    print(f"\n{len(chosen)} tried: " + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return 0 if set(counts) <= {"found", "went on"} else 1


if __name__ == "__main__":
    sys.exit(main())
