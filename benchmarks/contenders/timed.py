"""Times a compiled step of jax and reports it: what every contender written in jax does at the end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
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
) -> None:
    """Compiles a step, runs it as often as the workload says, and reports.

    Args:
        lowered: `(state, *operands) -> (state, result)`, which may consume the state.
        state: to begin with.
        operands: of every step.
        work: how many steps, and how many ahead of the clock.
        loss_of: takes the loss out of a result.
        trace: folder to write a trace of one more step to.
        parameters: of the model.
        reduce_dtype: in which weight gradients are summed.
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
        versions={"jax": jax.__version__},
    )


def embedding_dtype(program: str, work: Workload) -> str:
    """Returns the dtype in which a compiled program sums the gradients of an embedding's rows; empty if it has no such
    scatter, as on platforms where XLA expands scatters.

    Args:
        program: HLO.
        work: the sizes of the table, of which a rank may have a part.
    """
    found = re.findall(r"= (\w+)\[(\d+),(\d+)\]\S* scatter\(", program)
    parts = [d for d, rows, width in found if work.vocab_size % int(rows) == work.hidden_size % int(width) == 0]
    names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
    return ", ".join(dict.fromkeys(names[d] for d in parts if d in names))
