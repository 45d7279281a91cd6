"""Lists the workloads of `gtp-jax bench suite`: steps, the contenders that run them, and gtp_jax's goals."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Sequence

from gtp_jax.models import preset_of
from gtp_jax.runner.flags import ExpertOptions, Parallelism

from ._contenders import (
    CONTENDERS,
    FSDP2,
    OURS,
    PARTITIONER,
    PARTITIONERS,
    POLICIES,
    STOCK,
    STOCK_MODELS,
    Contender,
    contender_named,
)
from ._workload import StepOptions
from .contenders.workload import Workload


@dataclasses.dataclass(frozen=True)
class Goal:
    """A goal for gtp_jax's speedup over a rival.

    Attributes:
        ours: the family and variant of gtp_jax's contender; the goal applies to each policy that takes part.
        rival: `partitioner` or `fsdp2`, whose fastest contender that does the same work counts; or the family and
            variant of another gtp_jax contender, which is compared under the same policy.
        ratio: the ratio of the rival's time to gtp_jax's that must be reached.
    """

    ours: str
    rival: str
    ratio: float


@dataclasses.dataclass(frozen=True)
class SuiteWorkload:
    """One step of the suite, and the contenders that run it.

    Attributes:
        name: the name for `--workloads`.
        title: a description of the step, for tables and pictures.
        step: the options of the step, with the degree of every axis.
        contenders: the names of the contenders that take part, the most important first.
        goals: the goals for gtp_jax.
        steps: the number of steps timed per round.
    """

    name: str
    title: str
    step: StepOptions
    contenders: tuple[str, ...]
    goals: tuple[Goal, ...] = ()
    steps: int = 12

    @property
    def devices(self) -> int:
        """The number of devices that the workload runs on."""
        parallelism = self.step.parallelism
        return (parallelism.gtp or 1) * parallelism.ep * (parallelism.tp or 1)

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered at all. If not, contenders of different gathering policies are comparable."""
        return (self.step.parallelism.gtp or 1) * self.step.parallelism.ep > 1

    def workload(self, platform: str, steps: int | None = None) -> Workload:
        """Returns the step for GPUs, or a tiny step with the same degrees for virtual CPU devices.

        Args:
            platform: `"gpu"` or `"cpu"`.
            steps: the number of steps timed per round; `None` for the number in the table.
        """
        step = self.step if platform == "gpu" else _tiny(self.step)
        return step.workload(platform, self.devices, steps=steps or self.steps, experts=ExpertOptions())

    def on(self, platform: str) -> SuiteWorkload:
        """Returns the workload with a title for the platform. The sizes in the table's titles are those on GPUs."""
        return self if platform == "gpu" else dataclasses.replace(self, title=f"{self.name} in small")

    def chosen(self, only: Sequence[str]) -> list[Contender]:
        """Returns the contenders that `only` selects; all that take part if it is empty. An entry that is a contender's
        full name selects that contender. Any other entry selects the contenders whose names contain all of its
        words."""
        every = [contender_named(name) for name in self.contenders]
        words = [set(asked.split()) for asked in only if asked not in _NAMES]
        return [c for c in every if not only or c.name in only or any(w <= set(c.name.split()) for w in words)]


def chosen_workloads(only: Sequence[str], contenders: Sequence[str], devices: Sequence[int]) -> list[SuiteWorkload]:
    """Returns the workloads that are asked for.

    Args:
        only: the names of workloads, or patterns such as `qwen3*`; all workloads if empty.
        contenders: entries that select contenders, as in `SuiteWorkload.chosen`. Workloads without a selected
            contender are omitted.
        devices: the numbers of devices that a workload may run on.

    Raises:
        ValueError: if no workload matches.
    """
    named = [w for w in WORKLOADS if not only or any(fnmatch.fnmatchcase(w.name, pattern) for pattern in only)]
    if not named:
        known = ", ".join(w.name for w in WORKLOADS)
        raise ValueError(f"no workload is called {' or '.join(only)}; there are {known}.")
    fitting = [w for w in named if w.devices in devices]
    if not fitting:
        needs = ", ".join(f"{w.name} {w.devices}" for w in named)
        raise ValueError(
            f"no workload runs on {' or '.join(map(str, devices))} devices; those chosen need: {needs}. "
            "Choose others with --workloads, or another --devices."
        )
    taking_part = [w for w in fitting if w.chosen(contenders)]
    if not taking_part:
        names = dict.fromkeys(name for w in fitting for name in w.contenders)
        raise ValueError(f"no contender is called {' or '.join(contenders)}; there are {', '.join(names)}.")
    return taking_part


def _tiny(step: StepOptions) -> StepOptions:
    preset = "tiny-moe" if getattr(preset_of(step.preset or ""), "num_experts", 0) else "tiny"
    return dataclasses.replace(step, preset=preset, num_layers=1, vocab_size=None, seq=32, tokens=None)


_NAMES = {contender.name for contender in (*CONTENDERS, *PARTITIONERS, *STOCK_MODELS)}


def _each(family: str, *variants: str, policies: Sequence[str] = POLICIES) -> tuple[str, ...]:
    return tuple(f"{family} {variant} {policy}" for variant in variants for policy in policies)


_BF16 = _each(OURS, "bf16")
_BF16_ONCE = _each(OURS, "bf16", policies=("regather",))  # without gathers, policies make no difference
_FP8_ONCE = _each(OURS, "fp8-matmuls", policies=("regather",))
_NVFP4_ONCE = _each(OURS, "nvfp4", policies=("regather",))
_STOCK = _each(STOCK, "bf16", "bf16 local", policies=("regather",))
_FSDP2 = _each(FSDP2, "bf16")
# without collectives there is nothing to combine; the variant without extras shows what the norm and the guard cost
_ALONE = (
    *_each(PARTITIONER, "unrolled grad-norm-cond", "unrolled grad-norm"),
    *_each(
        PARTITIONER,
        "unrolled gtp-options grad-norm-cond",
        "unrolled gtp-options grad-norm",
        "unrolled",
        policies=("regather",),
    ),
)
_AT_BEST = _each(
    PARTITIONER,
    "combined grad-norm-cond",  # a guard with `where` made the step up to twice as long on H100s
    "combined gtp-options grad-norm-cond",
    "unrolled grad-norm-cond",
    "unrolled gtp-options grad-norm-cond",
    "combined grad-norm",
    "combined gtp-options grad-norm",
    "unrolled grad-norm",
    "unrolled gtp-options grad-norm",
    "combined",
)


def _options(
    preset: str,
    seq: int,
    tokens: int | None = None,
    *,
    layers: int | None = None,
    vocab: int | None = None,
    microbatches: int = 1,
    gtp: int = 1,
    ep: int = 1,
    tp: int = 1,
) -> StepOptions:
    return StepOptions(
        preset=preset,
        num_layers=layers,
        vocab_size=vocab,
        seq=seq,
        tokens=tokens,
        microbatches=microbatches,
        parallelism=Parallelism(gtp=gtp, ep=ep, tp=tp),
    )


def _experts(preset: str, layers: int, **degrees: int) -> StepOptions:
    return _options(preset, 4096, 16384, layers=layers, vocab=32768, **degrees)


def _goal(ratio: float) -> tuple[Goal, ...]:
    return (Goal(f"{OURS} bf16", PARTITIONER, ratio),)


_OF_FP8 = f"{OURS} fp8-matmuls"

WORKLOADS: tuple[SuiteWorkload, ...] = (
    SuiteWorkload(
        "100m",
        "100 M, 32,768 tokens, 1 GPU",
        _options("100m", 2048, 32768),
        (*_BF16_ONCE, *_ALONE, *_FSDP2),
        _goal(1.00),
        steps=24,
    ),
    SuiteWorkload(
        "1b", "1 B, 8,192 tokens, 1 GPU", _options("1b", 4096, 8192), (*_BF16_ONCE, *_ALONE, *_FSDP2), _goal(1.00)
    ),
    SuiteWorkload(
        "reference-6",
        "reference width, 6 layers, 1 GPU",
        _options("reference", 8192, layers=6),
        (*_BF16_ONCE, *_ALONE, *_FSDP2),
        _goal(1.00),
    ),
    SuiteWorkload(
        "qwen3-4",
        "Qwen3-30B-A3B, 4 layers, 1 GPU",
        _experts("qwen3-30b-a3b", 4),
        (*_BF16_ONCE, *_FP8_ONCE, *_ALONE, *_FSDP2, *_each(FSDP2, "float8 rowwise")),
        _goal(1.00),
    ),
    SuiteWorkload(
        "mixtral-2",
        "Mixtral, 2 layers, 1 GPU",
        _experts("mixtral", 2),  # three layers do not fit in 80 GB
        (*_BF16_ONCE, *_FP8_ONCE, *_ALONE, *_FSDP2, *_each(FSDP2, "float8 rowwise")),
        (*_goal(1.00), Goal(_OF_FP8, f"{OURS} bf16", 1.40)),
        steps=8,
    ),
    SuiteWorkload(
        "reference-gtp2",
        "reference, gtp 2",
        _options("reference", 8192, gtp=2),
        (*_BF16, *_NVFP4_ONCE, *_STOCK, *_each(STOCK, "nvfp4", policies=("regather",)), *_AT_BEST, *_FSDP2),
        _goal(1.03),
        steps=8,
    ),
    SuiteWorkload(
        "reference-gtp2-2048",
        "reference, gtp 2, 2,048 tokens per GPU",
        _options("reference", 2048, gtp=2),
        (*_BF16, *_STOCK, *_AT_BEST, *_FSDP2),
        _goal(1.10),
    ),
    SuiteWorkload(
        "reference-gtp2-microbatches",
        "reference width, 8 layers, gtp 2, 8 microbatches",
        _options("reference", 8192, layers=8, microbatches=8, gtp=2),
        (*_BF16, *_STOCK, *_AT_BEST, *_FSDP2),
        _goal(1.03),
        steps=3,
    ),
    SuiteWorkload(
        "reference-gtp2-fp8",
        "reference, gtp 2, FP8 matmuls",
        _options("reference", 8192, gtp=2),
        (*_each(OURS, "fp8-matmuls", "fp8-attention"), *_each(FSDP2, "float8 tensorwise", "float8 rowwise")),
        (Goal(_OF_FP8, FSDP2, 1.35),),
        steps=8,
    ),
    SuiteWorkload(
        "reference-tp2",
        "reference width, 8 layers, tp 2",
        _options("reference", 8192, layers=8, tp=2),
        (*_BF16_ONCE, *_FP8_ONCE, *_AT_BEST, *_FSDP2, *_each(FSDP2, "bf16 async-tp")),
        (*_goal(1.03), Goal(_OF_FP8, f"{OURS} bf16", 1.35)),
    ),
    SuiteWorkload(
        "qwen3-8-gtp2",
        "Qwen3-30B-A3B, 8 layers, gtp 2",
        _experts("qwen3-30b-a3b", 8, gtp=2),
        (*_BF16, *_AT_BEST, *_FSDP2),
        _goal(1.00),
        steps=8,
    ),
    SuiteWorkload(
        "qwen3-8-ep2",
        "Qwen3-30B-A3B, 8 layers, ep 2",
        _experts("qwen3-30b-a3b", 8, ep=2),
        (*_BF16, *_FP8_ONCE, *_AT_BEST, *_FSDP2, *_each(FSDP2, "float8 rowwise")),
        (*_goal(1.00), Goal(_OF_FP8, f"{OURS} bf16", 1.15)),
        steps=8,
    ),
    SuiteWorkload(
        "mixtral-4-ep2",
        "Mixtral, 4 layers, ep 2",
        _experts("mixtral", 4, ep=2),
        (*_BF16, *_FP8_ONCE, *_AT_BEST, *_FSDP2, *_each(FSDP2, "float8 rowwise")),
        (*_goal(1.00), Goal(_OF_FP8, f"{OURS} bf16", 1.40)),
        steps=6,
    ),
)
