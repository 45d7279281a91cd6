"""Computes draws of the grammar, compares each with the oracle, and keeps a record, so that a run can go on.

    python -m tests.meaning.draws 0 400 --record draws.json

prints a line for each draw that is neither right nor refused as allowed, and the counts at the end. A seed that the
record holds is not computed again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import sys
import traceback
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import gtp_jax as gtp

from . import oracle
from .drawn import computed, make
from .grammar import GROUP, Draw, draw
from .refusals import allowed

# between the logits of the last expert that is chosen and the first that is not: more than rounding moves them
LEAST_MARGIN = {"bfloat16": 0.02, "float32": 1e-4, "float64": 1e-9}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a draw ended: `passed`, `refused` or `failed`, and why."""

    kind: str
    why: str = ""


def scope(draw: Draw) -> Any:
    if draw.mesh is None:
        return contextlib.nullcontext()
    return jax.set_mesh(gtp.make_mesh(**draw.degrees, devices=jax.devices()[: math.prod(draw.degrees.values())]))


def batch_of(draw: Draw, attempt: int) -> dict[str, np.ndarray]:
    """Returns the batch: another one for each attempt."""
    rng, model = np.random.default_rng([draw.seed // GROUP, attempt]), draw.model
    x: Any = rng.integers(0, model.classes, model.shape) if model.tokens else rng.normal(size=model.input_shape)
    batch = {"x": x if model.tokens else x.astype(np.float64 if model.dtype == "float64" else np.float32)}
    if draw.loss.kind in ("tokens", "cross_entropy"):
        shape = model.shape[:1] if model.pool in ("mean", "last") else model.shape
        targets = rng.integers(0, model.classes, shape).astype(np.int32)
        if draw.loss.masked:
            targets = np.where(rng.random(shape) < 0.2, -1, targets)
            batch["weights"] = (rng.random(shape) < 0.8).astype(np.float32)
        batch["targets"] = targets
    return batch


def program(draw: Draw) -> Draw:
    """Returns the draw without what the oracle's program does not depend on."""
    plain = dict(seed=draw.seed // GROUP, mesh=None, stacked=False, remat=None, sequence_parallel=True)
    return dataclasses.replace(draw, **plain, route="", recipe=None, in_scope=False, exclude=False)


@functools.lru_cache(2 * GROUP)
def compiled(draw: Draw, dtype: str) -> Any:
    """Returns the oracle's jitted program, of a draw without what it does not depend on."""

    def run(params: Any, batch: Any, words: Any, number: Any) -> Any:
        def loss(params: Any) -> Any:
            return oracle.loss_of(draw, params, batch, words, jnp.dtype(dtype), number)

        return jax.value_and_grad(loss, has_aux=True)(params)

    return jax.jit(run)


def wanted(
    draw: Draw, params: dict[tuple[str, ...], np.ndarray], batch: Any, words: Any, dtype: str
) -> tuple[dict[str, Any], float]:
    """Returns what the oracle computes of all microbatches in this dtype, and the least margin of experts."""
    run, parts = compiled(program(draw), dtype), draw.microbatches
    wide = np.float64 if dtype == "float64" else np.float32
    nested: dict[str, Any] = {}
    for path, value in params.items():
        at = nested
        for part in path[:-1]:
            at = at.setdefault(part, {})
        at[path[-1]] = value.astype(wide)
    found = []
    for m in range(parts):
        part = {k: v.astype(wide) if v.dtype.kind == "f" else v for k, v in batch.items()}
        part = {name: value[m::parts] for name, value in part.items()}
        (_, (count, value, margin)), gradients = jax.tree.map(np.asarray, run(nested, part, words, np.uint32(m)))
        leaves = jax.tree_util.tree_leaves_with_path(gradients)
        found.append((value, count, margin, {tuple(k.key for k in path): g for path, g in leaves}))
    values, counts, margins, gradients = zip(*found, strict=True)
    by = sum(counts) if draw.loss.counts else parts
    summed = {name: sum(g[name].astype(np.float64) for g in gradients) / by for name in gradients[0]}
    result: dict[str, Any] = {"loss": sum(values) / by, "gradients": summed}
    if draw.loss.counts:
        result["tokens"] = sum(counts)
    result["grad_norm"] = np.sqrt(sum((g**2).sum() for g in summed.values()))
    return result, float(min(margins))


def judge(draw: Draw, found: dict[str, Any], exact: dict[str, Any], rounded: dict[str, Any]) -> Outcome:
    """Compares what the library found with what is exact; what the oracle itself loses by rounding in the dtype of the
    draw is the measure of what may differ."""
    dtype = draw.model.dtype or "bfloat16"
    relative = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.04}[dtype]
    norms = [np.linalg.norm(g) for g in exact["gradients"].values()]
    floor = math.hypot(*norms) * {"float64": 1e-12, "float32": 1e-6, "bfloat16": 2e-3}[dtype]
    wrong = []
    if bool(found.get("skipped", False)):
        return Outcome("failed", "the step was skipped")
    numbers = found.keys() - {"gradients", "skipped"}
    pairs = [(name, found[name], exact[name], rounded[name], 0.0) for name in sorted(numbers)]
    if "gradients" in found:
        if found["gradients"].keys() != exact["gradients"].keys():
            missing = found["gradients"].keys() ^ exact["gradients"].keys()
            return Outcome("failed", f"other gradients: {sorted(missing)}")
        own, whole, near = found["gradients"], exact["gradients"], rounded["gradients"]
        pairs += [(".".join(name), own[name], whole[name], near[name], floor) for name in whole]
    for name, a, b, c, least in pairs:
        a, b, c = (np.asarray(v, np.float64) for v in (a, b, c))
        if a.shape != b.shape:
            return Outcome("failed", f"{name} has shape {a.shape}, wanted {b.shape}")
        size = np.linalg.norm(b) if b.ndim else abs(b)
        lost = np.linalg.norm(c - b) if b.ndim else abs(c - b)
        error = np.linalg.norm(a - b) if b.ndim else abs(a - b)
        limit = relative * size + 4 * lost * (dtype != "float64") + least + 1e-12
        if not error <= limit:
            wrong.append((float(error / limit), f"{name}: off by {error:.3g} of {size:.3g}, allowed {limit:.2g}"))
    if wrong:
        wrong.sort(reverse=True)
        return Outcome("failed", f"wrong: {len(wrong)} of {len(pairs)}; {wrong[0][1]}")
    return Outcome("passed")


def outcome_of(draw: Draw) -> Outcome:
    """Computes a draw with the library and the oracle, and compares."""
    dtype = draw.model.dtype or "bfloat16"
    with jax.enable_x64(dtype == "float64"), scope(draw):
        try:
            model, params, words = make(draw)
        except Exception as error:
            return refused(draw, error)
    quantized = {path: oracle.quantized(draw, path, value) for path, value in params.items()}
    for attempt in range(200):
        batch = batch_of(draw, attempt)
        with jax.enable_x64(True):
            exact, margin = wanted(draw, quantized, batch, words, "float64")
        if margin > LEAST_MARGIN[dtype]:
            break
    else:
        return Outcome("failed", "no batch whose experts are chosen clearly")
    with jax.enable_x64(dtype == "float64"), scope(draw):
        try:
            found = jax.tree.map(np.asarray, computed(draw, model, batch))
        except Exception as error:
            return refused(draw, error)
        outcome = judge(draw, found, exact, exact)
        if outcome.kind == "passed" or dtype == "float64":
            return outcome
        # what differs by more may be what rounding loses, for which the oracle is computed once more
        return judge(draw, found, exact, wanted(draw, quantized, batch, words, dtype)[0])


def refused(draw: Draw, error: Exception) -> Outcome:
    reason = allowed(draw, error)
    if reason is not None:
        return Outcome("refused", reason)
    last = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:400]
    return Outcome(
        "failed", f"raised: {type(error).__name__} at {pathlib.Path(last.filename).name}:{last.lineno}: {text}"
    )


def run(seeds: Iterable[int], record: pathlib.Path | None = None) -> Any:
    """Computes draws, and returns their outcomes by seed, those of the record included."""
    known = json.loads(record.read_text()) if record is not None and record.exists() else {}
    found = {}
    for seed in seeds:
        old = known.get(str(seed))
        if old is not None:
            found[seed] = Outcome(old["kind"], old["why"])
            continue
        one = draw(seed)
        found[seed] = outcome_of(one)
        if record is not None and seed % 20 == 0:
            jax.clear_caches()  # of a long run
        known[str(seed)] = dataclasses.asdict(found[seed])
        if record is not None:
            record.write_text(json.dumps(known, indent=1))
        if found[seed].kind == "failed":
            print(f"seed {seed}: {found[seed].why}\n    {one}", flush=True)
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--record", type=pathlib.Path, help="JSON file of outcomes, read and written")
    args = parser.parse_args(argv)
    found = run(range(args.first, args.first + args.count), args.record)
    counts = collections.Counter((one.kind, one.why if one.kind == "refused" else "") for one in found.values())
    for (kind, why), number in sorted(counts.items()):
        print(f"{number:5} {kind} {why}".rstrip())
    return any(one.kind == "failed" for one in found.values())


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    sys.exit(main(sys.argv[1:]))
