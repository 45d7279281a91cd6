"""Compiles the step of a contender for absent GPUs, as in `--target h200`, and reports on it without running it."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import jax
from workload import Workload, report

from gtp_jax import hlo


def add_target(flags: argparse.ArgumentParser) -> None:
    """Adds the flag `--target`."""
    flags.add_argument("--target", choices=hlo.CHIPS, help="compile for this chip and run nothing; no GPU is needed")


def devices_of(chip: str | None, work: Workload) -> list[Any]:
    """Returns the devices of a step: those of this machine, or the same number of absent GPUs of type `chip`."""
    if chip is None:
        return jax.devices()[: work.devices]
    return list(hlo.topology_devices(hlo.parse_target(f"{chip}:{work.devices}")))


def compile_only(lowered: jax.stages.Lowered, chip: str, **facts: Any) -> None:
    """Compiles a step and reports its memory, its collectives and the time that `gtp_jax.hlo` models.

    It reports `compile_cpu_s`, the CPU time of all threads and of the assembler's processes, because other load on the
    machine hardly affects it.

    Args:
        lowered: the step.
        chip: the name of the chip.
        facts: other results to report.
    """
    begin, begin_cpu = time.perf_counter(), _cpu_s()
    compiled = lowered.compile(compiler_options=dict(hlo.COMPILE_OPTIONS))
    compile_s, compile_cpu_s = time.perf_counter() - begin, _cpu_s() - begin_cpu
    module = hlo.parse(str(compiled.as_text()))
    modelled = hlo.timeline(hlo.launch_order(module), chip)
    memory: Any = compiled.memory_analysis()
    planned = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    report(
        [],
        compile_s=compile_s,
        compile_cpu_s=compile_cpu_s,
        peak_bytes=planned,
        planned_bytes=planned,
        collectives=sum(c.times for c in hlo.collectives(module)),
        modelled_s=modelled.total_us / 1e6,
        modelled_compute_s=modelled.compute_us / 1e6,
        modelled_exposed_s=modelled.exposed_us / 1e6,
        versions={"jax": jax.__version__},
        **facts,
    )


def _cpu_s() -> float:
    return sum(os.times()[:4])
