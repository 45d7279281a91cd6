"""Replays a step of a run on two placements, to tell a fault of a device from one of the program or its data."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from ...checkpoint import Checkpoints, whole_step
from ...layout import even_shares
from ...mesh import choose_devices, make_mesh, on_gpu, use_roles
from ...train import never_skip
from ..data import Corpus
from ._corpus import read_corpus
from ._directory import RunDirectory
from ._divergence import Place
from ._family import Compiled, abstract_state, compile_step
from ._log import read_log
from ._meshes import Meshes
from ._same_text import check_tokens
from ._start import vocab_size_of
from ._train_flags import TrainConfig

Conclusion = Literal["reproducible", "device suspected", "inconclusive"]

# Excludes XLA's GPU programs that may add in another order each time.
_DETERMINISTIC = {"xla_gpu_deterministic_ops": True, "xla_gpu_exclude_nondeterministic_ops": True}

# The largest relative difference between losses of the same step that the order of additions alone may cause.
_ROUNDING = 1e-3


@dataclasses.dataclass(frozen=True)
class Replayed:
    """One replay: a run of the steps from the checkpoint.

    Attributes:
        placement: the ids of the devices, in the order of the mesh.
        losses: the loss of each step.
        norms: the gradient norm of each step.
        digest: the digest of the state after the steps.
    """

    placement: tuple[int, ...]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    digest: str

    def same(self, other: Replayed) -> bool:
        """Returns whether both replays gave the same bits."""
        mine, theirs = ([repr(x) for x in (*one.losses, *one.norms, one.digest)] for one in (self, other))
        return mine == theirs

    @property
    def loss(self) -> float:
        """The loss of the step that is replayed, which is the last."""
        return self.losses[-1]


@dataclasses.dataclass(frozen=True)
class Replay:
    """The result of replaying a step.

    Attributes:
        conclusion: the conclusion, in a word or two.
        reason: the reason for the conclusion, a sentence.
        begin: the step of the checkpoint.
        step: the step that was replayed.
        runs: the replays, two on each placement.
    """

    conclusion: Conclusion
    reason: str
    begin: int
    step: int
    runs: tuple[Replayed, ...]


def replay(out: Path, step: int | None = None) -> Replay:
    """Runs a step again from the last checkpoint before it, twice on each of two placements of ranks on devices.

    Compiles deterministic programs. Runs in a single process, with all devices of the run. Writes nothing.

    Args:
        out: the directory of a run.
        step: the number of the update; by default, the one after the latest checkpoint.

    Raises:
        ValueError: if there is no run or no checkpoint before the step, if the text or the tokenizer has changed, if
            the devices do not fit, or if the run is on replicas of unequal degree.
        TypeError: if `step` is not a whole number.
    """
    step = None if step is None else whole_step(step)
    directory = RunDirectory.of(out)
    directory.check(resume=True, force=False)
    config = dataclasses.replace(TrainConfig.load(directory.config), eval_data=())  # no step reads `eval_data`
    if config.faults.any:
        raise ValueError(
            "a run on replicas of unequal degree cannot be replayed, because the places of its ranks are fixed."
        )
    checkpoints = Checkpoints(directory.checkpoints, read_only=True)
    before = [at for at in checkpoints.steps() if step is None or at < step]
    if not before:
        raise ValueError(f"there is no checkpoint in {directory.checkpoints} before step {step or 1} to replay from.")
    begin = before[-1]
    step = begin + 1 if step is None else step
    choose_devices(config.virtual_devices(1), processes=1, local=None)
    corpus = read_corpus(config, resume=True)
    check_tokens(checkpoints.manifest(begin)["extra"], corpus, config.seq, ". Restore both.")
    degrees = config.degrees(jax.device_count(), virtual=not on_gpu())
    first = np.arange(jax.device_count())
    placements = [first] if first.size == 1 else [first, np.roll(first, 1)]
    vocab_size = vocab_size_of(config, corpus, directory.checkpoints)
    runs = tuple(
        r for place in placements for r in _twice(config, corpus, vocab_size, degrees, place, checkpoints, begin, step)
    )
    logged = next((r["loss"] for r in read_log(directory.log) if r["step"] == step and "loss" in r), None)
    return Replay(*conclude(runs, logged), begin, step, runs)


def conclude(runs: tuple[Replayed, ...], logged: float | None) -> tuple[Conclusion, str]:
    """Returns the conclusion from two replays on each placement, and the reason for it.

    Args:
        runs: the replays: two on each of one or two placements.
        logged: the loss that the run logged for the step; `None` if it did not make the update.
    """
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    unstable = [list(a.placement) for a, b in pairs if not a.same(b)]
    if len(unstable) == len(pairs):
        return "inconclusive", "no placement gives the same bits twice: the program is not deterministic here"
    if unstable:
        return "device suspected", f"the placement {unstable[0]} does not give the same bits twice, the other does"
    first, last = runs[0], runs[-1]
    if len(pairs) == 2 and not first.same(last):
        if _close(first.loss, last.loss):
            return "inconclusive", "placements differ by rounding: collectives add up in an order that follows them"
        return "device suspected", f"the loss is {first.loss} on one placement and {last.loss} on the other"
    if logged is not None and not _close(first.loss, logged):
        return "device suspected", f"the run has logged the loss {logged}, and every replay gives {first.loss}"
    if len(pairs) == 1:
        return "inconclusive", "the one device gives the same bits twice, and there is none to compare it with"
    what = "finite" if math.isfinite(first.loss) and math.isfinite(first.norms[-1]) else "not finite"
    return "reproducible", f"both placements give the same bits twice, and the step is {what}"


def _close(one: float, other: float) -> bool:
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= _ROUNDING * max(abs(one), abs(other))


def _twice(
    config: TrainConfig,
    corpus: Corpus,
    vocab_size: int,
    degrees: dict[str, int],
    place: np.ndarray,
    checkpoints: Checkpoints,
    begin: int,
    step: int,
) -> list[Replayed]:
    """Returns two replays on the devices in the order `place`."""
    model = config.model(vocab_size, dtype="bfloat16" if on_gpu() else "float32")
    roles = config.parallelism.roles
    with use_roles(roles):
        ordinary = make_mesh(**degrees)
    devices = np.asarray(ordinary.devices).reshape(-1)[place].reshape(ordinary.devices.shape)
    meshes = Meshes(Mesh(devices, ordinary.axis_names, axis_types=ordinary.axis_types))
    options: Any = _DETERMINISTIC if on_gpu() else None
    with jax.set_mesh(meshes.mesh), use_roles(roles), even_shares():
        like, optimizer = abstract_state(config, model)
        compiled = compile_step(config, model, meshes, corpus, like, optimizer, compiler_options=options)
        return [_run(compiled, meshes.mesh, like, checkpoints, begin, step) for _ in range(2)]


def _run(compiled: Compiled, mesh: Mesh, like: Any, checkpoints: Checkpoints, begin: int, step: int) -> Replayed:
    state, extra = checkpoints.restore(like, begin)
    at = Place.of_extra(begin, extra)
    go, losses, norms = never_skip(mesh), [], []
    position, made = at.position, begin
    while made < step:
        state, metrics = compiled.step(state, compiled.train.at(position), go)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        position += 1
        if bool(metrics["skipped"]) and made + 1 == step:
            break
        made += not bool(metrics["skipped"])
    devices = tuple(int(device.id) for device in np.asarray(mesh.devices).reshape(-1))
    return Replayed(devices, tuple(losses), tuple(norms), _digest((state.params, state.opt_state)))


def _digest(tree: Any) -> str:
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()
