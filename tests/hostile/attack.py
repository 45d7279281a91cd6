"""Feeds hostile files to everything that reads foreign ones, and counts how the attempts end.

    PYTHONPATH=tests:. JAX_PLATFORMS=cpu python -m hostile.attack 1000

Each process has 8 GiB of address space, and is ended when it is silent for too long, so that a reader in compiled code
that does not return is counted too.
"""

from __future__ import annotations

import collections
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hypothesis

from .targets import ACCEPTED, HUNG, REFUSED, SILENT, TRACEBACK, Folder, Outcome, drawn, outcome

KINDS = (REFUSED, ACCEPTED, SILENT, TRACEBACK, HUNG)
BAD = KINDS[2:]
_BYTES = 8 << 30
_SECONDS = 600


def attempts(folder: Folder, name: str, count: int) -> list[tuple[Any, Outcome]]:
    """Feeds a target with so many files, always the same ones."""
    attack, strategy = drawn(folder)[name]
    ended: list[tuple[Any, Outcome]] = []

    @hypothesis.settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def attempt(hostile: Any) -> None:
        if len(ended) < count:
            ended.append((hostile, outcome(folder, attack, hostile)))

    attempt()
    return ended


def run(total: int) -> dict[str, Any]:
    """Runs every target in a process of its own.

    Returns:
        Counts by target and ending, `worst`: those that did not end as they should, and the largest memory in MB.
    """
    with tempfile.TemporaryDirectory() as root:
        names = list(drawn(Folder(Path(root))))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # to import what this process does
    counts: dict[str, dict[str, int]] = {}
    worst: list[str] = []
    memory = 0
    for name in names:
        words = [sys.executable, "-m", "hostile.attack", "--target", name, str(-(-total // len(names)))]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, env=environment)
        except subprocess.TimeoutExpired as error:
            found = {"counts": {HUNG: 1}, "worst": [f"{name}: {error}"], "memory": 0}
        else:
            if done.returncode:
                worst.append(f"{name}: exit status {done.returncode}: {done.stderr[-2000:]}")
                continue
            found = json.loads(done.stdout.splitlines()[-1])
        counts[name] = found["counts"]
        worst += found["worst"]
        memory = max(memory, found["memory"])
    return {"counts": counts, "worst": worst, "memory": memory}


def _one(name: str, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    with tempfile.TemporaryDirectory() as root:
        folder = Folder(Path(root))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        ended = attempts(folder, name, count)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    counts = collections.Counter(how.kind for _, how in ended)
    worst = [f"{name}: {how.kind}: {how.text[:300]} <- {hostile!r:.600}" for hostile, how in ended if how.kind in BAD]
    print("\n" + json.dumps({"counts": counts, "worst": worst, "memory": grown}))


def _main(words: list[str]) -> int:
    if words[:1] == ["--target"]:
        _one(words[1], int(words[2]))
        return 0
    found = run(int(words[0]) if words else 1000)
    print(f"{'target':12} {'tried':>6} " + " ".join(f"{kind:>14}" for kind in KINDS))
    totals = collections.Counter[str]()
    for name, counts in found["counts"].items():
        totals.update(counts)
        print(f"{name:12} {sum(counts.values()):>6} " + " ".join(f"{counts.get(kind, 0):>14}" for kind in KINDS))
    print(f"{'all':12} {sum(totals.values()):>6} " + " ".join(f"{totals[kind]:>14}" for kind in KINDS))
    print(f"memory grew by {found['memory']} MB at most")
    for line in found["worst"]:
        print(line)
    return 1 if found["worst"] else 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
