"""Measures the CPU time of tests: of compiling, lowering and tracing programs, of processes, garbage, and the rest.

    python -m tests.structure.cpu tests/hook/test_lora.py            # stages, tests and programs
    python -m tests.structure.cpu tests/train -m slow --top 40       # what it does not know goes to pytest

Seconds are of the process's CPU, all threads together, so that other work on the machine changes them little. A stage
within another counts for the inner one.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections import Counter
from dataclasses import dataclass, field

import jax.monitoring
import pytest

STAGES = {
    "/jax/core/compile/backend_compile_duration": "XLA compiles",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "JAX lowers",
    "/jax/core/compile/jaxpr_trace_duration": "JAX traces",
}
COLLECTION, GARBAGE, PROCESSES, REST = "pytest collects", "garbage", "processes of tests", "the rest"


@dataclass
class Meter:
    """Adds up CPU seconds by stage, by test and by program, as a plugin of pytest and a listener of JAX."""

    stages: Counter[str] = field(default_factory=Counter)
    programs: Counter[str] = field(default_factory=Counter)  # seconds in XLA by name
    compiled: Counter[str] = field(default_factory=Counter)  # how many of a name
    tests: Counter[str] = field(default_factory=Counter)
    # stages that are under way, the innermost last: when each began, and the seconds of those within it
    _open: list[tuple[float, float]] = field(default_factory=list)

    def begin(self, *_: object, **__: object) -> None:
        self._open.append((time.process_time(), 0.0))

    def end(self, stage: str) -> float:
        """Returns the seconds since the innermost stage began, without those of stages within it."""
        began, inner = self._open.pop()
        whole = time.process_time() - began
        if self._open:
            self._open[-1] = (self._open[-1][0], self._open[-1][1] + whole)
        self.stages[stage] += whole - inner
        return whole - inner

    def on_start(self, event: str, _: float, **__: object) -> None:
        if event in STAGES:
            self.begin()

    def on_end(self, event: str, _: float, *, fun_name: str = "?", **__: object) -> None:
        if event in STAGES and self._open:
            seconds = self.end(STAGES[event])
            if STAGES[event] == "XLA compiles":
                self.programs[fun_name] += seconds
                self.compiled[fun_name] += 1

    def on_garbage(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self.begin()
        else:
            self.end(GARBAGE)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self):
        self.begin()
        result = yield
        self.end(COLLECTION)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        began = cpu_seconds()
        result = yield
        self.tests[item.nodeid] += cpu_seconds() - began
        return result


def cpu_seconds() -> float:
    """Returns the seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.structure.cpu", description=__doc__.split("\n")[0])
    parser.add_argument("--top", type=int, default=15, help="how many tests and programs to show")
    args, rest = parser.parse_known_args()
    meter = Meter()
    jax.monitoring.register_scalar_listener(meter.on_start)
    jax.monitoring.register_event_duration_secs_listener(meter.on_end)
    gc.callbacks.append(meter.on_garbage)
    status = pytest.main(["-n", "0", "-q", *rest], plugins=[meter])
    total = cpu_seconds()
    meter.stages[PROCESSES] = total - time.process_time()
    meter.stages[REST] = total - meter.stages.total()
    print(f"\n{total:8.1f} s of CPU, {meter.compiled.total()} programs")
    for title, seconds in (("", meter.stages), ("test", meter.tests), ("program", meter.programs)):
        print(f"\n{'seconds':>8}      % {'  times' if title == 'program' else ''}  {title}")
        for name, one in seconds.most_common(args.top):
            times = f"{meter.compiled[name]:7}" if title == "program" else ""
            print(f"{one:8.1f} {one / total:6.1%} {times}  {name}")
    return int(status)


if __name__ == "__main__":
    raise SystemExit(main())
