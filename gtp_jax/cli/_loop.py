"""The training loop: step, evaluate, save, and stop when asked."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Iterator

import jax
from tqdm import tqdm

from ..checkpoint import Checkpoints
from ..data import bits_per_byte
from ..train import TrainState
from ._directory import RunDirectory
from ._interrupt import Interrupt
from ._job import Job, Metrics
from ._log import Log
from ._watch import Watch


@dataclasses.dataclass
class Outcome:
    """How a loop ended.

    Attributes:
        step: updates made in all.
        held_out: last held-out loss, nats a token; `None` if there was no evaluation.
        tokens_per_s: over all devices, without evaluations, checkpoints and the first step; 0 if unknown.
        signal: the number of the signal that ended it, or `None`.
    """

    step: int
    held_out: float | None = None
    tokens_per_s: float = 0.0
    signal: int | None = None


class Diverged(Exception):
    """The loss is no number any more."""


def run_loop(
    job: Job,
    state: TrainState,
    *,
    directory: RunDirectory,
    checkpoints: Checkpoints,
    watch: Watch,
    unigram: float,
) -> Outcome:
    """Trains from the state's step to the last one, or until a signal comes. The state is consumed.

    Evaluates, saves and logs as the configuration says; at the end, and on a signal, the state is saved.

    Raises:
        Diverged: if the loss is not finite; the state is not saved then.
    """
    config, speaks = job.config, jax.process_index() == 0
    # One more step is launched before the last one's loss is looked at, so that GPUs never wait. Virtual CPU devices
    # share a thread pool, where two steps could block each other.
    ahead = 1 if jax.default_backend() == "gpu" else 0
    begin = int(state.step)
    outcome = Outcome(begin)
    launched: collections.deque[tuple[int, Metrics]] = collections.deque()
    pace = _Pace(config.batch * config.seq)
    shown = {"unigram": f"{unigram:.2f}"}

    with (
        Log(directory.log if speaks else None, begin) as log,
        Interrupt() as interrupt,
        tqdm(
            total=config.steps,
            initial=begin,
            unit="step",
            disable=not speaks,
            dynamic_ncols=True,
            mininterval=0.2 if sys.stderr.isatty() else 15,
        ) as bar,
    ):

        def settle(left: int = 0) -> None:
            """Logs steps that were launched, but for the last few."""
            while len(launched) > left:
                step, metrics = launched.popleft()
                loss = float(metrics["loss"])
                pace.step()
                watch.progress()
                rate = {"learning_rate": job.learning_rate(step - 1), "tokens_per_s": round(pace.tokens_per_s, 1)}
                log.write(step, loss=loss, grad_norm=float(metrics["grad_norm"]), **rate)
                shown.update({"loss": f"{loss:.3f}", "tokens/s": f"{pace.tokens_per_s:,.0f}"})
                bar.set_postfix(shown, refresh=False)
                bar.update(step - bar.n)
                if not math.isfinite(loss):
                    raise Diverged(f"the loss of step {step} is {loss}. Try a lower --lr or a longer --warmup.")

        def evaluate(step: int) -> None:
            settle()
            with pace.paused():
                outcome.held_out = job.held_out_loss(state)
            watch.progress()
            bits = bits_per_byte(outcome.held_out, job.corpus.bytes_per_token)
            log.write(step, held_out=outcome.held_out, bits_per_byte=bits)
            shown["held out"] = f"{outcome.held_out:.3f}"
            if speaks:
                bar.write(
                    f"step {step:>6}   held-out loss {outcome.held_out:.3f} nats a token ({bits:.2f} bits a byte)   "
                    f"unigram entropy {unigram:.3f}",
                    file=sys.stdout,
                )
                sys.stdout.flush()

        def save(step: int) -> None:
            settle()
            with pace.paused():
                checkpoints.save(step, state, {"text": job.corpus.fingerprint})
            watch.progress()

        if begin == 0:
            evaluate(0)
        saved = begin if begin else None
        for batch in job.train.steps(begin, config.steps):
            if interrupt.requested(outcome.step):
                break
            state, metrics = job.step(state, batch)
            outcome.step += 1
            launched.append((outcome.step, metrics))
            settle(left=ahead)
            if outcome.step % config.eval_every == 0 or outcome.step == config.steps:
                evaluate(outcome.step)
            if outcome.step % config.save_every == 0 or outcome.step == config.steps:
                save(outcome.step)
                saved = outcome.step
        if saved != outcome.step:
            save(outcome.step)
        with pace.paused():
            checkpoints.wait()
        outcome.tokens_per_s = pace.tokens_per_s
        outcome.signal = interrupt.signal
    return outcome


class _Pace:
    """Tokens a second of the steps alone."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = tokens_per_step
        self._began: float | None = None
        self._steps = 0

    @property
    def tokens_per_s(self) -> float:
        """From the end of the first step on, which also warms up; 0 before there is a second."""
        if self._began is None or not self._steps:
            return 0.0
        return self._steps * self._tokens_per_step / (self._last - self._began)

    def step(self) -> None:
        """Counts a step that has ended."""
        self._last = time.perf_counter()
        if self._began is None:
            self._began = self._last
        else:
            self._steps += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out what is done meanwhile."""
        began = time.perf_counter()
        yield
        if self._began is not None:
            pause = time.perf_counter() - began
            self._began += pause
            self._last += pause
