"""A step of a mixture with its experts gathered, beside the same step with tokens exchanged, in one process.

    python experts.py --preset qwen3-30b-a3b --num-layers 12 --vocab-size 32768 --gtp 2 --tokens 16384 --seq 4096

Contenders are compiled first, side by side, and then take turns: each round runs every one, every second round in
reverse order. Contenders of one mesh share a state. Ahead of that, a process of its own checks on a small mixture that
each transport gives the same bits twice, and those of the others; a transport that fails is not timed.
"""

from __future__ import annotations

import argparse
import concurrent.futures
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

START = time.monotonic()
GATHERED = "gathered"


@dataclasses.dataclass
class Row:
    """What one contender made of the step."""

    name: str
    ep: int
    transport: str
    recipe: str
    seconds: list[float] = dataclasses.field(default_factory=list)
    clocks_mhz: list[float] = dataclasses.field(default_factory=list)
    watts: list[float] = dataclasses.field(default_factory=list)
    compile_s: float = 0.0
    planned_bytes: int = 0
    loss: float | None = None
    failure: str = ""


def main() -> None:
    args = _flags().parse_args()
    if args.checks:
        return _checks(args)
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"args": {k: str(v) for k, v in vars(args).items()}, "checks": {}, "rows": []}
    rows = [
        Row(f"{how} {recipe}", 1 if how == GATHERED else args.ranks, how, recipe)
        for recipe in args.recipes
        for how in args.contenders
    ]
    if not args.no_checks and not args.target:
        results["checks"] = _run_checks(args)
        for row in rows:
            word = results["checks"].get(row.transport, "")
            if row.transport != GATHERED and not word.startswith("same bits"):
                row.failure = f"not timed, as its check failed: {word}"

    def finish(code: int, why: str = "") -> None:
        results["rows"] = [dataclasses.asdict(row) for row in rows]
        results["stopped"] = why
        (args.out / "experts.json").write_text(json.dumps(results, indent=1))
        print(f"\n{why}\n" if why else "", flush=True)
        _print_table(rows, args, results)
        sys.stdout.flush()
        os._exit(code)

    # a collective that hangs is ended, and what was measured until then is kept
    watch = threading.Timer(
        max(1.0, args.limit - (time.monotonic() - START)), lambda: finish(3, f"ended after {args.limit:.0f} s")
    )
    watch.daemon = True
    watch.start()
    try:
        _measure(rows, args, results)
    except BaseException as error:  # whatever happened, print what there is
        finish(1, _said(error))
    finish(0)


def _flags() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--preset", default="qwen3-30b-a3b")
    for name in ("num_layers", "vocab_size", "hidden_size", "intermediate_size", "num_experts", "top_k"):
        flags.add_argument(f"--{name.replace('_', '-')}", type=int, help="in place of the preset's")
    flags.add_argument("--ranks", type=int, default=2, help="devices: gtp of gathered experts, ep of the others")
    flags.add_argument("--tokens", type=int, default=16384, help="of a step, a device")
    flags.add_argument("--seq", type=int, default=4096)
    flags.add_argument("--microbatches", type=int, default=1)
    flags.add_argument("--remat", default="matmuls")
    flags.add_argument("--grad-reduce", default="bf16")
    flags.add_argument("--unroll", default="full", type=lambda text: text if text == "full" else int(text))
    flags.add_argument("--contenders", nargs="+", default=[GATHERED, "gather", "padded", "ragged"])
    flags.add_argument("--recipes", nargs="+", default=["bf16", "fp8-matmuls"])
    flags.add_argument("--rounds", type=int, default=2)
    flags.add_argument("--warmup", type=int, default=2, help="steps of each turn ahead of the clock")
    flags.add_argument("--steps", type=int, default=5, help="of each turn")
    flags.add_argument("--compilers", type=int, default=8, help="threads")
    flags.add_argument("--limit", type=float, default=300, help="seconds for all")
    flags.add_argument("--checks-limit", type=float, default=100)
    flags.add_argument("--no-checks", action="store_true")
    flags.add_argument("--checks", action="store_true", help="make the checks alone")
    flags.add_argument("--cpu", action="store_true", help="virtual devices")
    flags.add_argument("--target", help="compile for this chip, h200 for instance, and run nothing")
    flags.add_argument("--out", type=Path, default=Path("experts"), help="folder for experts.json")
    return flags


def _jax(args: argparse.Namespace) -> Any:
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.93")
    import jax

    if args.cpu or args.target:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.ranks)
    return jax


def _config(args: argparse.Namespace, transport: str) -> Any:
    from gtp_jax.models import preset_of

    names = ("num_layers", "vocab_size", "hidden_size", "intermediate_size", "num_experts", "top_k")
    sizes = {name: getattr(args, name) for name in names if getattr(args, name)}
    return dataclasses.replace(
        preset_of(args.preset),
        **sizes,
        remat=args.remat,
        grad_reduce=args.grad_reduce,
        unroll=args.unroll,
        transport=None if transport == GATHERED else transport,
    )


class Program:
    """A contender: its mesh, how its state is made, and its step."""

    def __init__(self, args: argparse.Namespace, row: Row) -> None:
        import jax
        import jax.numpy as jnp
        import optax
        from jax.sharding import NamedSharding, PartitionSpec

        import gtp_jax as gtp
        from gtp_jax import plan
        from gtp_jax.models import Llama, next_token_loss
        from gtp_jax.nn import abstract_model
        from gtp_jax.recipes import RECIPES

        self.config = config = _config(args, row.transport)
        degrees = {"gtp": args.ranks} if row.ep == 1 else {"gtp": args.ranks // row.ep, "ep": row.ep}
        devices = jax.devices()[: args.ranks]
        if args.target:
            devices = list(plan.topology_devices(plan.parse_target(f"{args.target}:{args.ranks}")))
        self.mesh = gtp.make_mesh(**degrees, devices=devices)
        self.optimizer = optax.adamw(1e-4, weight_decay=1e-4)
        self.make = lambda rngs: Llama(config, rngs=rngs)
        self.degrees = tuple(degrees.items())
        with jax.set_mesh(self.mesh):
            self.like = gtp.TrainState.create(abstract_model(self.make), self.optimizer)
            step = gtp.train_step(
                next_token_loss,
                self.optimizer,
                microbatches=args.microbatches,
                recipe=RECIPES[row.recipe](),
                view="local",
            )
            shape = (args.tokens * args.ranks // args.seq, args.seq)
            axes = tuple(name for name in self.mesh.axis_names if name != "tp")
            self.placed = NamedSharding(self.mesh, PartitionSpec(axes))
            like: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.placed)
            self.shape = shape
            self.lowered = step.lower(self.like, {"tokens": like, "targets": like})  # pyright: ignore

    def compile(self, target: str | None) -> None:
        """Compiles the step; safe in a thread."""
        from gtp_jax import plan

        begin = time.perf_counter()
        options: Any = dict(plan.COMPILE_OPTIONS) if target else None
        self.step = self.lowered.compile(compiler_options=options)
        self.compile_s = time.perf_counter() - begin
        memory: Any = self.step.memory_analysis()
        self.planned = memory.temp_size_in_bytes + memory.argument_size_in_bytes

    def new_state(self) -> Any:
        """Returns a state of new parameters."""
        import jax
        from flax import nnx

        import gtp_jax as gtp

        with jax.set_mesh(self.mesh):
            return gtp.TrainState.create(gtp.init(self.make, nnx.Rngs(0)), self.optimizer)

    def batch(self) -> Any:
        """Returns tokens at random."""
        import jax
        import jax.numpy as jnp

        tokens = jax.random.randint(jax.random.key(1), self.shape, 0, self.config.vocab_size)
        batch = {"tokens": tokens, "targets": jnp.roll(tokens, -1, axis=1)}
        return jax.device_put(batch, self.placed)

    def fitted(self, state: Any) -> Any:
        """Returns a state of another contender of the same mesh as this program takes it."""
        return dataclasses.replace(state, model_def=self.like.model_def)


def _compiled(rows: list[Row], args: argparse.Namespace) -> dict[str, Program]:
    """Traces one contender after another, and compiles them in threads meanwhile."""
    programs: dict[str, Program] = {}
    with concurrent.futures.ThreadPoolExecutor(args.compilers) as pool:
        started: dict[str, Any] = {}
        for row in rows:
            if row.failure:
                continue
            try:
                programs[row.name] = Program(args, row)
                started[row.name] = pool.submit(programs[row.name].compile, args.target)
            except Exception as error:
                row.failure = _said(error)
        print(f"{time.monotonic() - START:.0f} s: traced {len(programs)}", flush=True)
        for row in rows:
            if row.failure:
                continue
            try:
                started[row.name].result()
                row.compile_s, row.planned_bytes = programs[row.name].compile_s, programs[row.name].planned
            except Exception as error:
                row.failure = _said(error)
            print(f"{time.monotonic() - START:.0f} s: compiled {row.name} {row.failure}", flush=True)
    return programs


def _measure(rows: list[Row], args: argparse.Namespace, results: dict[str, Any]) -> None:
    jax = _jax(args)
    from gtp_jax.plan import step_flops

    results["jax"] = jax.__version__
    results["device"] = args.target or jax.devices()[0].device_kind
    config = _config(args, GATHERED)
    results["flops_a_device"] = step_flops(
        matmul_params=config.matmul_params(),
        tokens=args.tokens,
        layers=config.num_layers,
        seq=args.seq,
        heads=config.num_heads,
        head_dim=config.head_dim,
    )
    results["active_matmul_params"], results["params"] = config.matmul_params(), config.param_count()
    programs = _compiled(rows, args)
    if args.target:
        for row in rows:
            if not row.failure:
                text = str(programs[row.name].step.as_text())
                print(f"{row.name}: ragged-all-to-all {text.count(' ragged-all-to-all')}", flush=True)
        return
    meshes = list(dict.fromkeys(p.degrees for p in programs.values()))
    state = held = batch = None
    for turn in range(args.rounds):
        for degrees in meshes[:: -1 if turn % 2 else 1]:
            here = [row for row in rows if row.name in programs and programs[row.name].degrees == degrees]
            # what may fail and take the state with it comes last
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
                    row.failure, state = _said(error), None
                shown = f"{1e3 * statistics.median(row.seconds):.1f} ms" if row.seconds else row.failure
                print(f"{time.monotonic() - START:.0f} s: round {turn}, {row.name}: {shown}", flush=True)


def _turn(program: Program, row: Row, state: Any, batch: Any, args: argparse.Namespace) -> Any:
    import jax

    state = program.fitted(state)
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
    """Asks nvidia-smi for clocks and power, ten times a second."""

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


def _run_checks(args: argparse.Namespace) -> dict[str, str]:
    """Returns, of each transport, what its check found: of a process of its own, which may hang or crash."""
    command = [sys.executable, __file__, "--checks", f"--ranks={args.ranks}", *(["--cpu"] if args.cpu else [])]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    said: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: said.extend(process.stdout or ()), daemon=True)
    reader.start()
    try:
        process.wait(args.checks_limit)
    except subprocess.TimeoutExpired:
        process.kill()
        said.append(f"the checks were ended after {args.checks_limit:.0f} s\n")
    reader.join(5)
    (args.out / "checks.txt").write_text("".join(said))
    found = {}
    for line in said:
        if line.startswith("CHECK "):
            name, _, what = line[6:].strip().partition(": ")
            worse = name in found and not found[name].startswith("same bits")
            found[name] = found[name] if worse else what
            print(line.strip(), flush=True)
    missing = [name for name in ("gather", "padded", "ragged") if name not in found]
    return {**found, **{name: f"no result; exit status {process.returncode}, see checks.txt" for name in missing}}


def _checks(args: argparse.Namespace) -> None:
    """Compares bits of losses, gradients and new parameters, with routers as drawn, and with routers of zeros, by which
    every token takes the first experts: one rank has all rows, several rounds of them, and the others none."""
    jax = _jax(args)
    args.preset, args.num_layers, args.vocab_size = "qwen3-30b-a3b", 2, 1024
    args.hidden_size, args.intermediate_size, args.num_experts, args.top_k = 512, 256, 32, 8
    args.tokens, args.seq, args.out = (256, 64, None) if args.cpu else (4096, 1024, None)
    rows = [Row(name, args.ranks, name, "bf16") for name in ("gather", "padded", "ragged")]
    programs = _compiled(rows, args)
    first = programs["gather"]
    drawn = first.new_state()
    zeros = jax.tree_util.tree_map_with_path(lambda p, a: a * 0 if "router" in str(p) else a, drawn.params)
    assert any("router" in str(p) for p, _ in jax.tree_util.tree_leaves_with_path(drawn.params))
    states = {"as drawn": drawn, "one rank takes all": dataclasses.replace(drawn, params=zeros)}
    # an independent value to compare with: experts gathered, at gtp, to rounding
    reference = Row(GATHERED, 1, GATHERED, "bf16")
    known = _compiled([reference], args)[GATHERED]
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
                print(f"CHECK {row.name}: {_said(error)}", flush=True)


def _step_of(program: Program, state: Any) -> Any:
    """Returns what a step makes of a state on the host."""
    import jax

    with jax.set_mesh(program.mesh):
        put = jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), program.fitted(state), program.like)
        return program.step(put, program.batch())


def _differing(a: Any, b: Any) -> str:
    """Names the first arrays of two steps' results that differ in a bit."""
    import jax
    import numpy as np

    a, b = ((state.params, state.opt_state, metrics) for state, metrics in (a, b))
    names = []
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        if x.tobytes() != y.tobytes():
            names.append(f"{jax.tree_util.keystr(path)} ({np.mean(x != y):.2%})")
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _print_table(rows: list[Row], args: argparse.Namespace, results: dict[str, Any]) -> None:
    print(
        f"{args.ranks} x {results.get('device')}, jax {results.get('jax')}: {args.preset}, "
        f"{args.num_layers} layers, {args.tokens} tokens a device, sequences of {args.seq}, "
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


def _said(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


if __name__ == "__main__":
    main()
