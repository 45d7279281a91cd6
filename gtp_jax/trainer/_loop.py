"""The training loop: step, evaluate, save, and stop when asked."""

from __future__ import annotations

import collections
import dataclasses
import functools
import time

import jax

from ..checkpoint import Checkpoints
from ..models import saved as saved_of
from ..train import TrainState
from ._interrupt import Interrupt
from ._job import Job
from ._progress import Progress
from ._slow import DeviceProbe, timed_batches
from ._watch import Activity, Watch

# One more step is launched before the last one's loss is looked at, so that GPUs never wait. Virtual CPU devices share
# a thread pool, where two steps could block each other.
_AHEAD = {"gpu": 1, "cpu": 0}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a loop ended.

    Attributes:
        step: updates made in all.
        tokens_per_s: over all devices, without evaluations, checkpoints and the first step; 0 if unknown.
        signal: the number of the signal that ended it, or `None`.
    """

    step: int
    tokens_per_s: float
    signal: int | None


def run_loop(
    job: Job, state: TrainState, checkpoints: Checkpoints, watch: Watch, progress: Progress, interrupt: Interrupt
) -> Outcome:
    """Trains from the state's step to the last one, or until a signal comes. The state is consumed.

    Evaluates and saves as the configuration says; at the end the state is saved, and on a signal if there is time.

    Raises:
        Diverged: if the loss is not finite; the state is not saved then.
    """
    config = job.config
    ahead = _AHEAD.get(jax.default_backend(), 0)
    begin = step = job.begin
    launched: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()

    def settle(left: int = 0) -> None:
        while len(launched) > left:
            ended = launched.popleft()
            progress.step(*ended)
            watch.doing("step", ended[0])

    held_out: dict[int, float] = {}
    # virtual CPU devices share the host's cores: their times say nothing about one of them
    probe = DeviceProbe() if jax.default_backend() == "gpu" else None

    def evaluate() -> None:
        settle()
        watch.doing("evaluate", step)
        with progress.paused():
            if probe is not None:
                probe(watch)
            loss = job.held_out_loss(state)
        progress.held_out(step, loss)
        held_out[step] = loss
        watch.doing("step", step)

    def save_to(target: Checkpoints, activity: Activity) -> None:
        settle()  # so that a state whose loss is not finite is not saved
        watch.doing(activity, step)
        save_began = time.perf_counter()
        with progress.paused():
            extra = {"text": job.corpus.fingerprint, **saved_of(job.model)}
            target.save(step, state, extra, loss=held_out.get(step), recipe=config.quantization.to_recipe())
        interrupt.saved(time.perf_counter() - save_began)
        watch.doing("step", step)

    with interrupt.loop():
        watch.doing("step", begin)
        if begin == 0:
            evaluate()
        saved = begin
        for batch in timed_batches(watch, job.train.steps(begin, config.steps)):
            if interrupt.requested(step):
                break
            launch_began = time.perf_counter()
            state, metrics = job.step(state, batch)
            watch.timed("dispatch", time.perf_counter() - launch_began)
            step += 1
            launched.append((step, metrics))
            settle(left=ahead)
            last = step == config.steps
            if last or step % config.eval_every == 0:
                evaluate()
            if last or step % config.save_every == 0:
                save_to(checkpoints, "save")
                saved = step
            if not last:
                watch.stepped(step, state, functools.partial(save_to, activity="snapshot"))
        if saved != step and interrupt.saves:
            save_to(checkpoints, "save")
        checkpoints.wait()
        return Outcome(step, progress.tokens_per_s, interrupt.signal)
