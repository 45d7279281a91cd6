"""Times and reports a compiled step, for all contenders that are written in JAX."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from workload import Workload, report


def time_and_report(
    lowered: jax.stages.Lowered,
    state: Any,
    operands: tuple[Any, ...],
    work: Workload,
    *,
    loss_of: Callable[[Any], Any],
    trace: str | None,
    parameters: int,
    reduce_dtype: str,
    versions: Mapping[str, str] | None = None,
) -> None:
    """Compiles a step, runs the warm-up steps and the timed steps of the workload, and reports the times.

    Args:
        lowered: the step, `(state, *operands) -> (state, result)`. It may consume the state.
        state: the initial state.
        operands: the other operands of every step.
        work: the workload, which has the numbers of warm-up steps and of timed steps.
        loss_of: returns the loss in a result.
        trace: the folder for a trace of one more step; `None` for no trace.
        parameters: the number of parameters of the model.
        reduce_dtype: the dtype in which weight gradients are summed.
        versions: the versions of packages besides JAX, by name.
    """
    begin = time.perf_counter()
    step = lowered.compile()
    compile_s = time.perf_counter() - begin
    seconds, losses = [], []
    for _ in range(work.warmup + work.steps):
        begin = time.perf_counter()
        state, result = step(state, *operands)
        jax.block_until_ready((state, result))
        seconds.append(time.perf_counter() - begin)
        losses.append(float(loss_of(result)))
    if trace:
        with jax.profiler.trace(trace):
            jax.block_until_ready(step(state, *operands))
    memory: Any = step.memory_analysis()
    planned = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    used = jax.devices()[0].memory_stats() or {}
    report(
        seconds[work.warmup :],
        compile_s=compile_s,
        peak_bytes=used.get("peak_bytes_in_use", planned),
        planned_bytes=planned,
        loss=losses[0],
        last_loss=losses[-1],
        parameters=parameters,
        reduce_dtype=reduce_dtype,
        embedding_dtype=embedding_dtype(str(step.as_text()), work),
        versions={"jax": jax.__version__, **(versions or {})},
    )


def embedding_dtype(program: str, work: Workload) -> str:
    """Returns the dtype in which a compiled program sums the gradients of an embedding's rows.

    If it sums them in several dtypes, the names are joined by commas. If the program has no scatter that does so, for
    example because XLA expands scatters on its platform, returns an empty string.

    Args:
        program: the HLO of the program.
        work: the workload, which has the sizes of the table. A rank may hold only a part of the table.
    """
    found = re.findall(r"= (\w+)\[(\d+),(\d+)\]\S* scatter\(", program)
    parts = [d for d, rows, width in found if work.vocab_size % int(rows) == work.hidden_size % int(width) == 0]
    names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
    return ", ".join(dict.fromkeys(names[d] for d in parts if d in names))
