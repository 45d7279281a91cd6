"""Checks that each transport of experts.py gives the same bits when it runs twice, and the same bits as `gather`."""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from expert_programs import GATHERED, Program, Row, compiled, said, start_jax

EXPERTS = Path(__file__).with_name("experts.py")


def run_checks(args: argparse.Namespace) -> dict[str, str]:
    """Returns the finding for each transport. The checks run in another process, because they may hang or crash."""
    command = [sys.executable, str(EXPERTS), "--checks", f"--ranks={args.ranks}", *(["--cpu"] if args.cpu else [])]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    try:
        process.wait(args.checks_limit)
    except subprocess.TimeoutExpired:
        process.kill()
        lines.append(f"the checks were ended after {args.checks_limit:.0f} s\n")
    reader.join(5)
    (args.out / "checks.txt").write_text("".join(lines))
    found = {}
    for line in lines:
        if line.startswith("CHECK "):
            name, _, what = line[6:].strip().partition(": ")
            worse = name in found and not found[name].startswith("same bits")
            found[name] = found[name] if worse else what
            print(line.strip(), flush=True)
    missing = [name for name in ("gather", "padded", "ragged") if name not in found]
    return {**found, **{name: f"no result; exit status {process.returncode}, see checks.txt" for name in missing}}


def make_checks(args: argparse.Namespace) -> None:
    """Compares the bits of metrics, optimizer states and new parameters, with random routers and with routers of zeros,
    and the losses with those of gathered experts. Prints a line `CHECK TRANSPORT: FINDING` for each comparison.

    With routers of zeros, every token chooses the first 8 of 32 experts. On up to four ranks, one rank therefore has
    all rows, in several rounds, and the others have none.
    """
    jax = start_jax(args)
    args.preset, args.num_layers, args.vocab_size = "qwen3-30b-a3b", 2, 1024
    args.hidden_size, args.intermediate_size, args.num_experts, args.top_k = 512, 256, 32, 8
    args.tokens, args.seq, args.out = (256, 64, None) if args.cpu else (4096, 1024, None)
    rows = [Row(name, args.ranks, name, "bf16") for name in ("gather", "padded", "ragged")]
    programs = compiled(rows, args)
    first = programs["gather"]
    drawn = first.new_state()
    zeros = jax.tree_util.tree_map_with_path(lambda p, a: a * 0 if "router" in str(p) else a, drawn.params)
    assert any("router" in str(p) for p, _ in jax.tree_util.tree_leaves_with_path(drawn.params))
    states = {"as drawn": drawn, "one rank takes all": dataclasses.replace(drawn, params=zeros)}
    # an independent loss to compare with, up to rounding: that of experts gathered over gtp
    reference = Row(GATHERED, 1, GATHERED, "bf16")
    known = compiled([reference], args)[GATHERED]
    states = {name: jax.device_get(state) for name, state in states.items()}  # a step consumes its state
    losses = {name: float(_step_of(known, state)[1]["loss"]) for name, state in states.items()}
    for name, state in states.items():
        results: dict[str, Any] = {}
        for row in rows:
            if row.failure:
                print(f"CHECK {row.name}: {row.failure}", flush=True)
                continue
            try:
                twice = [_step_of(programs[row.name], state) for _ in range(2)]
                results[row.name] = twice[0]
                same = _differing(*twice)
                if same:
                    what = f"DIFFERENT BITS WHEN RUN TWICE, {name}: {same}"
                elif other := _differing(results["gather"], twice[0]):
                    what = f"DIFFERENT BITS FROM gather, {name}: {other}"
                else:
                    loss = float(twice[0][1]["loss"])
                    what = f"same bits twice and as gather, {name}: loss {loss:.6f}, {losses[name]:.6f} gathered"
                    if abs(loss - losses[name]) > 2e-3 * abs(losses[name]):
                        what = f"WRONG LOSS {what}"
                print(f"CHECK {row.name}: {what}", flush=True)
            except Exception as error:
                print(f"CHECK {row.name}: {said(error)}", flush=True)


def _step_of(program: Program, state: Any) -> Any:
    """Returns the result of a step from a state that is on the host."""
    import jax

    with jax.set_mesh(program.mesh):
        put = jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), program.fitted(state), program.like)
        return program.step(put, program.batch())


def _differing(a: Any, b: Any) -> str:
    """Returns the names of the first arrays of two steps' results that differ in a bit; empty if there are none."""
    import jax
    import numpy as np

    a, b = ((state.params, state.opt_state, metrics) for state, metrics in (a, b))
    names = []
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if x.tobytes() != y.tobytes():
            names.append(f"{jax.tree_util.keystr(path)} ({np.mean(x != y):.2%})")
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
