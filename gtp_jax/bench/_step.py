"""One training step through each contender, in a process of its own so that memory and flags are its own."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plan import step_flops
from ._contender import Contender
from .contenders.workload import MARK, Workload

_REASON_LENGTH = 110


@dataclasses.dataclass(frozen=True)
class Row:
    """What one contender made of a step.

    Attributes:
        contender: which.
        seconds: of each timed step; none if it failed.
        facts: what else it reports: `compile_s`, `peak_bytes` a device, `loss` of the first step, `parameters`,
            `versions`.
        failure: why there is no result.
    """

    contender: Contender
    seconds: tuple[float, ...] = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    failure: str = ""

    @property
    def median_s(self) -> float:
        """Seconds of a step."""
        return statistics.median(self.seconds)

    @property
    def low_s(self) -> float:
        """The fastest step."""
        return min(self.seconds)

    @property
    def high_s(self) -> float:
        """The slowest step."""
        return max(self.seconds)


def workload_flops(work: Workload) -> int:
    """Operations of a step over all devices, as `gtp_jax.plan.step_flops` counts them."""
    attention = work.dim * work.head_dim * (2 * work.heads + 2 * work.kv_heads)
    parameters = work.layers * (attention + 3 * work.dim * work.ffn) + work.vocab * work.dim
    return step_flops(
        matmul_params=parameters,
        tokens=work.tokens,
        layers=work.layers,
        seq=work.seq,
        heads=work.heads,
        head_dim=work.head_dim,
    )


def measure_steps(
    chosen: Sequence[Contender],
    work: Workload,
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    torch_python: str = sys.executable,
    within_s: float = float("inf"),
    logs: Path | None = None,
) -> Iterator[Row]:
    """Runs contenders one after another.

    Args:
        chosen: which.
        work: what they run.
        environment: of their processes.
        timeout_s: for one contender, its start and compilation included.
        torch_python: the interpreter that has PyTorch.
        within_s: for all of them; those that come too late are not run.
        logs: folder for what each prints; nowhere by default.
    """
    deadline = time.monotonic() + within_s
    for contender in chosen:
        left = deadline - time.monotonic()
        if left <= 0:
            yield Row(contender, failure=f"not run: {within_s:.0f} s for all contenders were over")
            continue
        code, output = _run(
            contender.command(work.flags, work.devices, torch_python), environment, min(timeout_s, left)
        )
        if logs is not None:
            (logs / f"{contender.name.replace(' ', '_')}.txt").write_text(output)
        yield _row(contender, code, output, min(timeout_s, left))


def ratio(row: Row, rows: Sequence[Row], family: str) -> float | None:
    """How many times as fast a row is as the best of a family with the same policy in the same run."""
    rivals = [
        r.median_s
        for r in rows
        if r.seconds and (r.contender.family, r.contender.policy) == (family, row.contender.policy)
    ]
    return min(rivals) / row.median_s if rivals and row.seconds else None


def _run(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> tuple[int | None, str]:
    """Exit status, `None` after a timeout, and output."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(environment),
        start_new_session=True,  # so that torchrun's children end with it
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
        return process.returncode, output
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return None, output
        raise


def _row(contender: Contender, code: int | None, output: str, allowed_s: float) -> Row:
    results = [line[len(MARK) :] for line in output.splitlines() if line.startswith(MARK)]
    if results:
        facts = json.loads(results[-1])
        return Row(contender, tuple(facts.pop("seconds")), facts)
    return Row(contender, failure=f"not done in {allowed_s:.0f} s" if code is None else reason(code, output))


def reason(code: int, output: str) -> str:
    """The line of a failed program's output that most likely says why."""
    errors = re.findall(r"^(?:\[rank0\]: *)?([\w.]*(?:Error|Exception): .+|error: .+)$", output, re.MULTILINE)
    errors += re.findall(r"ModuleNotFoundError: [^)\n]+", output)
    memory = [e for e in errors if "memory" in e.lower()]
    line = (memory or errors or [f"exit status {code}"])[0].strip()
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 1] + "…"
