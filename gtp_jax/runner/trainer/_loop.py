"""The training loop: steps, evaluates, saves, continues after a step that was not finite, and stops when asked.

A step that is not finite returns the state unchanged. Steps launched after it receive its `skipped` flag and change
nothing either: they are forgotten, and launched again from the next batch. Every decision is therefore made on the same
state and at the same place as without steps in flight, and depends only on the state, the place and the data. A run
that is stopped anywhere and resumed makes the same decisions.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Generator
from typing import Any

import jax

from ...checkpoint import Checkpoints
from ...flight_recorder import step_recorded
from ...models import saved_evaluation
from ...recipes import Phases
from ...train import TrainState, never_skip
from .._exit_codes import out_of_memory
from ._divergence import Diverged, Place, is_spike
from ._finite_state import state_is_finite
from ._interrupt import Interrupt
from ._job import Job, evaluated_state
from ._progress import Progress
from ._recorder import Recorder
from ._slow import DeviceProbe, timed_batches
from ._text_block import block
from ._watch import Activity

# The number of further steps that are launched before the loss of a step is read. One keeps GPUs from waiting.
# Virtual CPU devices share a thread pool, in which two steps could block each other.
_AHEAD = {"gpu": 1, "cpu": 0}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a loop ended.

    Attributes:
        step: the total number of updates made.
        speed: the work per second of all devices together, in units of `Job.per_step`, excluding evaluations,
            checkpoints and the first step; 0 if unknown.
        signal: the number of the signal that ended the loop; `None` if none did.
        state: the state after the last update.
        sample: the text that the model wrote last; empty if it wrote none.
        sample_step: the step after which it wrote that.
    """

    step: int
    speed: float
    signal: int | None
    state: TrainState | None = None
    sample: str = ""
    sample_step: int = 0


def run_loop(
    job: Job,
    state: TrainState,
    checkpoints: Checkpoints,
    watch: Recorder,
    progress: Progress,
    interrupt: Interrupt,
) -> Outcome:
    """Trains from the job's place to the last step, or until a signal comes. Consumes the state.

    Evaluates and saves as the configuration says. Also saves the state at the end, and on a signal if there is time.

    Args:
        job: the run.
        state: the state at the job's place.
        checkpoints: the checkpoints of the run.
        watch: the recorder of this process.
        progress: the progress bar and the log.
        interrupt: the handler of signals.

    Raises:
        Diverged: if steps are not finite or losses jump, and the configuration does not let the run continue. The state
            is not saved.
        ValueError: if a batch has ids outside the vocabulary.
    """
    return _Loop(job, state, checkpoints, watch, progress, interrupt).run()


class _Loop:
    def __init__(
        self,
        job: Job,
        state: TrainState,
        checkpoints: Checkpoints,
        watch: Recorder,
        progress: Progress,
        interrupt: Interrupt,
    ) -> None:
        self._job, self._limits = job, job.limits
        self._state: Any = state
        self._checkpoints, self._watch, self._progress, self._interrupt = checkpoints, watch, progress, interrupt
        # virtual CPU devices share the host's cores, so their times say nothing about a single device
        self._probe = DeviceProbe() if jax.default_backend() == "gpu" else None
        self._ahead = _AHEAD.get(jax.default_backend(), 0)
        self._place = job.place
        self._launched: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()
        self._go = self._skip = never_skip(job.mesh)
        self._losses: dict[int, float | None] = {}  # of evaluations, by step
        self._write, self._sample = job.sample, ""
        self._saved = self._place.step

    def run(self) -> Outcome:
        interrupt = self._interrupt
        with interrupt.loop():
            self._watch.doing("step", self._place.step)
            if self._place.step == 0 and self._evaluates:
                self._evaluate()
            turn, stopped = self._place.step, False
            while self._place.step < self._limits.steps and not stopped:
                with contextlib.closing(self._batches()) as batches:
                    for position, batch in timed_batches(self._watch, batches):
                        turn, stopped = turn + 1, interrupt.requested(turn)
                        if stopped or not (self._launch(position, batch) and self._at_boundary()):
                            break
                    self._settle()
            if stopped and interrupt.signal is not None:
                self._watch.write("signal", signal=int(interrupt.signal), step=self._place.step)
            if self._saved != self._place.step and interrupt.saves:
                self._save(self._checkpoints, "save")
            self._checkpoints.wait()
            return Outcome(
                self._place.step,
                self._progress.speed,
                interrupt.signal,
                self._state,
                sample=self._sample,
                sample_step=next(reversed(self._losses), 0),
            )

    @property
    def _evaluates(self) -> bool:
        return self._limits.eval_every > 0 and self._job.evaluate is not None

    def _batches(self) -> Generator[tuple[int, Any]]:
        """Yields the next batches with their numbers, one for each update that is left to make."""
        begin = self._place.position
        end = begin + self._limits.steps - self._place.step
        yield from enumerate(self._job.train.steps(begin, end), begin)

    def _launch(self, position: int, batch: Any) -> bool:
        """Launches a step, waits for all but the latest ones, and returns the same as `_settle`."""
        began = time.perf_counter()
        with step_recorded() as record:
            self._state, metrics = self._job.step(self._state, batch, self._skip)
            record(metrics)
        self._watch.timed("dispatch", time.perf_counter() - began)
        self._skip = metrics["skipped"]
        self._launched.append((position, metrics))
        return self._settle(self._ahead)

    def _at_boundary(self) -> bool:
        """Evaluates and saves when due, and returns the same as `_settle`.

        Raises:
            OSError: if an earlier save has failed in the meantime: what is trained after it could not be saved either.
        """
        self._checkpoints.check_save()
        step, limits = self._place.step + len(self._launched), self._limits
        last = step == limits.steps
        evaluates = self._evaluates and (last or step % limits.eval_every == 0)
        saves = last or step % limits.save_every == 0
        if (evaluates or saves) and not self._settle():
            return False
        if evaluates:
            self._evaluate()
        if saves:
            self._save(self._checkpoints, "save")
            self._saved = step
        if not last:
            save = functools.partial(self._save, activity="snapshot", step=step)
            self._watch.stepped(step, self._state, save)
        return True

    def _settle(self, left: int = 0) -> bool:
        """Waits until at most `left` steps are in flight, and returns whether the run continues with the next batch in
        order. If not, the steps in flight have changed nothing, or have been undone."""
        while len(self._launched) > left:
            position, metrics = self._launched.popleft()
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self._forget_launched()
                self._after_nonfinite(position, "loss" if not math.isfinite(loss) else "gradient norm", loss, norm)
                return False
            spike = self._limits.divergence.spike
            jumps = spike is not None and is_spike(loss, self._place.losses, spike)
            self._place = self._place.updated(loss, keep_loss=spike is not None)
            self._progress.step(self._place.step, metrics)
            self._watch.doing("step", self._place.step)
            if jumps:
                self._forget_launched()
                what = f"the loss of step {self._place.step} is {loss:.4g}, a spike (--spike {spike:g})"
                self._record("spike", position, loss, norm, what)
                if self._limits.divergence.nonfinite == "raise":
                    raise Diverged(f"{what}. Lower --lr, or use --nonfinite rollback to continue from the checkpoint.")
                self._roll_back(what)
                return False
        return True

    def _forget_launched(self) -> None:
        self._launched.clear()
        self._skip = self._go

    def _after_nonfinite(self, position: int, name: str, loss: float, norm: float) -> None:
        """Skips the batch, rolls back or ends the run, as the configuration says."""
        policy, limit = self._limits.divergence.nonfinite, self._limits.divergence.nonfinite_in_a_row
        what = f"the {name} of step {self._place.step + 1} is {norm if name == 'gradient norm' else loss}"
        self._watch.doing("diagnose", self._place.step)
        self._job.check_batch(self._job.train.at(position))
        self._place = self._place.skipped()
        self._record("nonfinite", position, loss, norm, what)
        if policy == "raise" or (policy == "skip" and self._place.in_a_row >= limit):
            rows = f" {limit} in a row (--nonfinite-in-a-row)." if policy == "skip" else ""
            raise Diverged(f"{what}. Use a lower --lr or a longer --warmup.{rows}{self._diagnosis(position)}")
        if policy == "rollback" and self._place.in_a_row >= limit:
            self._roll_back(what)
        else:
            self._progress.say(f"{what}: its batch, number {position}, is skipped")
        self._watch.doing("step", self._place.step)

    def _diagnosis(self, position: int) -> str:
        """Returns a sentence that says why a step was not finite; an empty string for replicas of unequal degree."""
        try:
            found = self._job.diagnose(self._state, self._job.train.at(position))
        except Exception as error:  # must not hide the failure that it diagnoses
            found = f"no diagnosis: {error}".splitlines()[0]
        if not found:
            return ""
        self._watch.write("diagnosis", found, batch=position)
        return f" Batch {position}: {found}."

    def _roll_back(self, what: str) -> None:
        """Goes back to the last checkpoint, and continues with the data after what has been seen.

        Raises:
            Diverged: if the run has gone back too often, or there is no checkpoint.
        """
        limit = self._limits.divergence.max_rollbacks
        if self._place.rollbacks >= limit:
            raise Diverged(f"{what}, after the run has gone back {limit} times (--max-rollbacks). Use a lower --lr.")
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._state)
        source = self._watch.source(self._checkpoints, like)
        source.wait()
        if (step := source.latest()) is None:
            raise Diverged(f"{what}, and there is no checkpoint to go back to. Use a lower --lr, or save more often.")
        self._watch.doing("restore", step)
        self._state = None  # frees its memory
        self._state, extra = source.restore(like, step)
        before = self._place
        self._place = before.rolled_back(Place.of_extra(step, extra))
        self._saved = step
        self._progress.rewind(step)
        self._progress.say(f"{what}: back to step {step}; batches up to number {before.position - 1} are skipped")
        self._watch.doing("step", step)
        self._watch.write("rollback", step=step, from_step=before.step, position=before.position)

    def _record(self, event: str, position: int, loss: float, norm: float, what: str) -> None:
        found = {"loss": repr(loss), "grad_norm": repr(norm)}  # JSON has no NaN
        self._watch.write(event, what, step=self._place.step, batch=position, **found)

    def _evaluate(self) -> None:
        step = self._place.step
        self._watch.doing("evaluate", step)
        with self._progress.paused():
            if self._probe is not None:
                self._probe(self._watch)
            assert self._job.evaluate is not None
            state = evaluated_state(self._state)
            found = self._job.evaluate(state)
        self._progress.evaluated(step, found)
        self._losses[step] = found.loss
        if self._write is not None:
            with self._progress.paused():
                self._progress.say(block(self._written(state)))
        self._watch.doing("step", step)

    def _written(self, state: TrainState) -> str:
        """Returns a text that the model writes, or why it can write none from now on."""
        assert self._write is not None
        try:
            self._sample = self._write(state)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            self._write = None
            return "(no text: there is not enough memory next to the state; --sample-tokens 0 turns samples off)"
        return self._sample

    def _save(self, target: Checkpoints, activity: Activity, step: int | None = None) -> bool:
        """Saves the state, and returns whether it did.

        It does not if a step in flight turns out not to be finite, so that the state is not that of step `step`.
        """
        if not self._settle() or (step is not None and step != self._place.step):
            return False
        step = self._place.step
        self._watch.doing(activity, step)
        began = time.perf_counter()
        with self._progress.paused():
            if not state_is_finite((self._state.params, self._state.opt_state)):
                raise Diverged(
                    f"the state after step {step} is not finite and is not saved. Use a lower --lr or a longer "
                    "--warmup."
                )
            job, stored = self._job, self._job.stored(self._state, self._place.position)
            extra = {**stored, **self._place.extra(), **saved_evaluation(self._state.opt_state)}
            recipe = job.recipe
            if isinstance(recipe, Phases):
                recipe = recipe.at(max(0, int(self._state.step) - 1))
            target.save(step, self._state, extra, loss=self._losses.get(step), recipe=recipe, files=job.files)
        self._interrupt.saved(time.perf_counter() - began)
        self._watch.doing("step", step)
        return True
