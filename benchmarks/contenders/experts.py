"""Compares gathering experts with exchanging tokens, for the same step of a mixture of experts, in one process.

    python experts.py --preset qwen3-30b-a3b --num-layers 12 --vocab-size 32768 --ranks 2 --tokens 16384 --seq 4096

First, unless --no-checks is given, another process checks on a small mixture that each transport gives the same bits
when it runs twice, and the same bits as the transport `gather`. A transport that fails is not timed. Then all
contenders are compiled in parallel and take turns: each round runs all of them, every second round in reverse order.
Contenders with the same mesh share a state. With --target, contenders are only compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from expert_checks import make_checks, run_checks
from expert_programs import GATHERED, START, Program, Row, compiled, config_of, said, start_jax


def main() -> None:
    args = _flags().parse_args()
    if args.checks:
        return make_checks(args)
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"args": {k: str(v) for k, v in vars(args).items()}, "checks": {}, "rows": []}
    rows = [_row(word, recipe, args.ranks) for recipe in args.recipes for word in args.contenders]
    if not args.no_checks and not args.target:
        results["checks"] = run_checks(args)
        for row in rows:
            word = results["checks"].get(row.transport, "")
            if row.transport != GATHERED and not word.startswith("same bits"):
                row.failure = f"not timed, because its check failed: {word}"

    def finish(code: int, why: str = "") -> None:
        results["rows"] = [dataclasses.asdict(row) for row in rows]
        results["stopped"] = why
        (args.out / "experts.json").write_text(json.dumps(results, indent=1))
        print(f"\n{why}\n" if why else "", flush=True)
        _print_table(rows, args, results)
        sys.stdout.flush()
        os._exit(code)

    # after --limit, saves what was measured and ends the whole run, even if a collective hangs
    watch = threading.Timer(
        max(1.0, args.limit - (time.monotonic() - START)), lambda: finish(3, f"ended after {args.limit:.0f} s")
    )
    watch.daemon = True
    watch.start()
    try:
        _measure(rows, args, results)
    except BaseException as error:  # print what was measured, whatever happened
        finish(1, said(error))
    finish(0)


def _row(word: str, recipe: str, ranks: int) -> Row:
    """Returns the row of a contender such as `gathered`, `gather` or `gather:2` (a transport in two chunks)."""
    how, _, chunks = word.partition(":")
    return Row(f"{word} {recipe}", 1 if how == GATHERED else ranks, how, recipe, int(chunks or 1))


def _flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--preset", default="qwen3-30b-a3b")
    for name in ("num_layers", "vocab_size", "hidden_size", "intermediate_size", "num_experts", "top_k"):
        flags.add_argument(f"--{name.replace('_', '-')}", type=int, help="value to use instead of the preset's")
    flags.add_argument(
        "--ranks",
        type=int,
        default=2,
        help="number of devices: the degree of gtp if experts are gathered, of ep if tokens are exchanged",
    )
    flags.add_argument("--tokens", type=int, default=16384, help="tokens per step and device")
    flags.add_argument("--seq", type=int, default=4096)
    flags.add_argument("--microbatches", type=int, default=1)
    flags.add_argument("--remat", default="matmuls")
    flags.add_argument("--grad-reduce", default="bf16")
    flags.add_argument("--unroll", default="full", type=lambda text: text if text == "full" else int(text))
    flags.add_argument(
        "--contenders",
        nargs="+",
        default=[GATHERED, "gather", "padded", "ragged"],
        help="contenders: `gathered`, or the name of a transport; `gather:2` is the transport gather in two chunks",
    )
    flags.add_argument("--recipes", nargs="+", default=["bf16", "fp8-matmuls"])
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--warmup", type=int, default=2, help="number of warm-up steps per turn")
    flags.add_argument("--steps", type=int, default=5, help="number of timed steps per turn")
    flags.add_argument("--compilers", type=int, default=8, help="number of threads that compile")
    flags.add_argument("--limit", type=float, default=300, help="time limit in seconds for the whole run")
    flags.add_argument("--checks-limit", type=float, default=100)
    flags.add_argument("--no-checks", action="store_true")
    flags.add_argument("--checks", action="store_true", help="run only the checks")
    flags.add_argument("--cpu", action="store_true", help="run on virtual CPU devices")
    flags.add_argument("--target", help="compile for this chip, such as h200, and run nothing")
    flags.add_argument("--out", type=Path, default=Path("experts"), help="folder for experts.json")
    return flags


def _measure(rows: list[Row], args: argparse.Namespace, results: dict[str, Any]) -> None:
    jax = start_jax(args)
    from gtp_jax.hlo import collectives, step_flops

    results["jax"] = jax.__version__
    results["device"] = args.target or jax.devices()[0].device_kind
    config = config_of(args, GATHERED)
    results["flops_a_device"] = step_flops(
        matmul_params=config.matmul_params(),
        tokens=args.tokens,
        layers=config.num_layers,
        seq=args.seq,
        heads=config.num_heads,
        head_dim=config.head_dim,
    )
    results["active_matmul_params"], results["params"] = config.matmul_params(), config.param_count()
    programs = compiled(rows, args)
    if args.target:
        for row in rows:
            if not row.failure:
                found = collectives(str(programs[row.name].step.as_text()))
                count = sum(len(c.results) * c.times for c in found if c.kind == "ragged-all-to-all")
                print(f"{row.name}: ragged-all-to-all {count}", flush=True)
        return
    meshes = list(dict.fromkeys(p.degrees for p in programs.values()))
    state = held = batch = None
    for turn in range(args.rounds):
        for degrees in meshes[:: -1 if turn % 2 else 1]:
            here = [row for row in rows if row.name in programs and programs[row.name].degrees == degrees]
            # a contender that fails may take the state with it; the next one then makes a new state
            for row in here[:: -1 if turn % 2 else 1]:
                if row.failure:
                    continue
                program = programs[row.name]
                try:
                    if state is None or held != degrees:
                        state = batch = None
                        state, batch, held = program.new_state(), program.batch(), degrees
                    state = _turn(program, row, state, batch, args)
                except Exception as error:
                    row.failure, state = said(error), None
                shown = f"{1e3 * statistics.median(row.seconds):.1f} ms" if row.seconds else row.failure
                print(f"{time.monotonic() - START:.0f} s: round {turn}, {row.name}: {shown}", flush=True)


def _turn(program: Program, row: Row, state: Any, batch: Any, args: argparse.Namespace) -> Any:
    import jax

    state, metrics = program.fitted(state), {}
    with jax.set_mesh(program.mesh):
        for _ in range(args.warmup):
            state, metrics = program.step(state, batch)
        jax.block_until_ready(state)
        sampler = _Clocks(args.cpu)
        for _ in range(args.steps):
            begin = time.perf_counter()
            state, metrics = program.step(state, batch)
            jax.block_until_ready((state, metrics))
            row.seconds.append(time.perf_counter() - begin)
    clocks, watts = sampler.stop()
    row.clocks_mhz += clocks
    row.watts += watts
    row.loss = float(metrics["loss"])
    return state


class _Clocks:
    """Records the SM clock and the power that nvidia-smi reports, ten times per second."""

    def __init__(self, off: bool) -> None:
        self.process = None
        if off:
            return
        ask = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "100"]
        try:
            self.process = subprocess.Popen(ask, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            return

    def stop(self) -> tuple[list[float], list[float]]:
        if self.process is None:
            return [], []
        self.process.terminate()
        said = self.process.communicate()[0]
        pairs = [line.split(",") for line in said.splitlines() if line.count(",") == 1]
        try:
            return [float(a) for a, _ in pairs], [float(b) for _, b in pairs]
        except ValueError:
            return [], []


def _print_table(rows: list[Row], args: argparse.Namespace, results: dict[str, Any]) -> None:
    layers = "" if args.num_layers is None else f"{args.num_layers} layers, "
    print(
        f"{args.ranks} x {results.get('device')}, jax {results.get('jax')}: {args.preset}, "
        f"{layers}{args.tokens} tokens per device, sequences of {args.seq}, "
        f"{results.get('active_matmul_params', 0) / 1e9:.3f} B active of {results.get('params', 0) / 1e9:.3f} B "
        f"parameters, remat {args.remat}, grads {args.grad_reduce}"
    )
    header = ("contender", "ms", "low", "high", "TFLOP/s/GPU", "GiB", "compile s", "SM MHz", "W", "loss")
    print(("{:24}" + "{:>12}" * (len(header) - 1)).format(*header))
    for row in rows:
        if not row.seconds:
            print(f"{row.name:24}  {row.failure or f'not run; {row.planned_bytes / 2**30:.1f} GiB planned'}")
            continue
        ms = 1e3 * statistics.median(row.seconds)
        cells = (
            f"{ms:.1f}",
            f"{1e3 * min(row.seconds):.1f}",
            f"{1e3 * max(row.seconds):.1f}",
            f"{results['flops_a_device'] / ms / 1e9:.1f}",
            f"{row.planned_bytes / 2**30:.1f}",
            f"{row.compile_s:.0f}",
            f"{statistics.mean(row.clocks_mhz):.0f}" if row.clocks_mhz else "",
            f"{statistics.mean(row.watts):.0f}" if row.watts else "",
            "" if row.loss is None else f"{row.loss:.4f}",
        )
        print(f"{row.name:24}" + "".join(f"{cell:>12}" for cell in cells), row.failure)


if __name__ == "__main__":
    main()
