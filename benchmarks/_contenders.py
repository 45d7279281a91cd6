"""Lists the contenders of `gtp-jax bench`, each a script with flags, and selects and adapts them."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gtp_jax.recipes import RECIPES, Recipe
from gtp_jax.runner.flags import Quantization

from ._choice import by_words

SCRIPTS = Path(__file__).with_name("contenders")

OURS, STOCK, PARTITIONER, FSDP2, TE, BOUND = "gtp_jax", "stock", "partitioner", "fsdp2", "te", "bound"

# Weights are gathered again in backward, or kept for it. Contenders with different policies are compared only by
# `gtp-jax bench suite`, and only if no weights are gathered.
POLICIES = ("regather", "keep")
_FLAGS_OF_POLICY = {"regather": (), "keep": ("--keep-gathered",)}


@dataclasses.dataclass(frozen=True)
class Contender:
    """A program that runs the step.

    Attributes:
        family: `gtp_jax`, `stock`, `partitioner`, `fsdp2`, `te` or `bound`.
        variant: a recipe, a way of writing the program, or a precision.
        policy: `regather` or `keep`; empty for a bound, which gathers nothing.
        script: the name of the script in the folder `contenders`.
        flags: the flags added to those of the workload.
        tp: the tensor-parallel degrees at which it takes part.
        matmuls: the formats of the layers' matmuls, such as `bf16` or `fp8`. The rivals of a contender have the same.
        refused: why it cannot run what other flags ask for; empty if it can.
        guards: whether the step computes the norm of all gradients, and updates only if the loss and the norm are
            finite, as gtp_jax does.
    """

    family: str
    variant: str
    policy: str
    script: str
    flags: tuple[str, ...] = ()
    tp: Literal["any", "1", "above 1"] = "any"
    matmuls: str = "bf16"
    refused: str = ""
    guards: bool = False

    @property
    def name(self) -> str:
        """The name shown in tables."""
        return " ".join(filter(None, (self.family, self.variant, self.policy)))

    def command(self, workload_flags: Sequence[str], devices: int, torch_python: str) -> list[str]:
        """Returns the command line that starts its process or, with PyTorch, one process per device."""
        torchrun = [torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
        launch = torchrun if self.family == FSDP2 else [sys.executable]
        return [*launch, str(SCRIPTS / self.script), *workload_flags, *self.flags]


def _contenders() -> tuple[Contender, ...]:
    # async TP makes a difference only if tp is above 1; torchao's FP8 all-gather supports sharding over only one axis
    compiled = {
        "bf16": ((), "any", "bf16"),
        "bf16 async-tp": (("--async-tp",), "above 1", "bf16"),
        "float8 tensorwise": (("--float8=tensorwise",), "1", "fp8"),
        "float8 rowwise": (("--float8=rowwise",), "1", "fp8"),
    }
    written = {"combined": ("--combine",), "unrolled": (), "scan": ("--unroll=1",)}
    ours = [
        Contender(
            OURS,
            name,
            policy,
            "ours.py",
            (f"--recipe={name}", f"--keep-gathered={layers}"),
            matmuls=_matmuls(recipe()),
            guards=True,
        )
        for name, recipe in RECIPES.items()
        for policy, layers in (("regather", "auto"), ("keep", "all"))
    ]
    fsdp2 = [
        Contender(FSDP2, variant, policy, "fsdp2.py", (*flags, *_FLAGS_OF_POLICY[policy]), tp, matmuls)
        for variant, (flags, tp, matmuls) in compiled.items()
        for policy in POLICIES
    ]
    partitioner = [
        Contender(PARTITIONER, variant, policy, "partitioner.py", (*flags, *_FLAGS_OF_POLICY[policy]))
        for variant, flags in written.items()
        for policy in POLICIES
    ]
    bounds = [
        Contender(BOUND, form, "", "bound.py", (f"--precision={form}",), matmuls=form) for form in ("bf16", "fp8")
    ]
    return (*ours[:2], *fsdp2[:4], *partitioner[:2], bounds[0], *ours[2:], *fsdp2[4:], *partitioner[2:], bounds[1])


def _matmuls(recipe: Recipe) -> str:
    """Returns the formats of dense layers' matmuls under a recipe and its overrides, each named once, joined by `+`."""
    assert isinstance(recipe.override, tuple)
    recipes = (recipe, *(override for _, override in recipe.override))
    names = ("bf16" if r.operands is None else type(r).__name__.lower() for r in recipes)
    return "+".join(dict.fromkeys(names))


# The contenders in the order in which they run. The most important ones come first, so that a short run measures them.
CONTENDERS: tuple[Contender, ...] = _contenders()


def _partitioners() -> tuple[Contender, ...]:
    collectives = {"combined": ("--combine",), "unrolled": ()}
    options = {"": (), "gtp-options": ("--gtp-options",)}
    guards = {"": (), "grad-norm": ("--grad-norm=where",), "grad-norm-cond": ("--grad-norm=cond",)}
    chosen = itertools.product(collectives.items(), options.items(), guards.items(), POLICIES)
    return tuple(
        Contender(
            PARTITIONER,
            " ".join(filter(None, (joined, xla, guard))),
            policy,
            "partitioner.py",
            (*joined_flags, *xla_flags, *guard_flags, *_FLAGS_OF_POLICY[policy]),
            guards=bool(guard),
        )
        for (joined, joined_flags), (xla, xla_flags), (guard, guard_flags), policy in chosen
    )


# Variants among which to find the partitioner's best: with or without combined collectives; with XLA's default options
# or gtp_jax's; and without the norm and the guard of a gtp_jax step, or with them in two forms. `gtp-jax bench suite`
# selects from these.
PARTITIONERS: tuple[Contender, ...] = _partitioners()

# A model of stock Flax layers sharded by `gtp_jax.shard`: in global view (the default), in local view, and in global
# view with the recipe `nvfp4`. Compared with gtp_jax's contenders, it shows what gtp_jax's own layers gain.
# `gtp-jax bench suite` runs it.
STOCK_MODELS: tuple[Contender, ...] = tuple(
    Contender(STOCK, variant, "regather", "stock.py", flags, tp="1", guards=True)
    for variant, flags in (("bf16", ()), ("bf16 local", ("--view=local",)), ("nvfp4", ("--recipe=nvfp4",)))
)


# The partitioner's step with FP8 matmuls of TransformerEngine, and with the norm and the guard of a gtp_jax step. The
# guard either selects between old and new values, or branches around the optimizer.
ENGINES: tuple[Contender, ...] = tuple(
    Contender(
        TE,
        f"current {variant}",
        policy,
        "partitioner.py",
        ("--te=current", "--combine", f"--grad-norm={guard}", *_FLAGS_OF_POLICY[policy]),
        tp="1",
        matmuls="fp8",
        guards=True,
    )
    for variant, guard in (("grad-norm", "where"), ("grad-norm-cond", "cond"))
    for policy in POLICIES
)


def contender_named(name: str) -> Contender:
    """Returns the contender of `CONTENDERS`, `PARTITIONERS`, `STOCK_MODELS` or `ENGINES` with this name.

    Raises:
        KeyError: if no contender has this name.
    """
    return {c.name: c for c in (*STOCK_MODELS, *ENGINES, *PARTITIONERS, *CONTENDERS)}[name]


def chosen_contenders(only: Sequence[str], *, tp: int = 1) -> list[Contender]:
    """Returns the contenders that take part at a tp degree and whose names contain all the words of one entry of
    `only`; all that take part if `only` is empty.

    They are those of `CONTENDERS`, and those of `ENGINES` if TransformerEngine is installed or `only` names `te`.

    Raises:
        ValueError: if no contender matches.
    """
    with_engines = importlib.util.find_spec("transformer_engine") or any(TE in words.lower().split() for words in only)
    every = (*CONTENDERS, *ENGINES) if with_engines else CONTENDERS
    return by_words([c for c in every if c.tp in ("any", "above 1" if tp > 1 else "1")], only, "contender")


def with_remat_policies(contenders: Sequence[Contender], policies: Sequence[str]) -> list[Contender]:
    """Returns the contenders. Those of gtp_jax are repeated for each rematerialization policy, and named after it.

    If `policies` is only `matmuls`, the default, the contenders are unchanged.
    """
    return _once_for_each(contenders, policies, "matmuls", "--remat", "{}")


def with_grad_reductions(contenders: Sequence[Contender], names: Sequence[str]) -> list[Contender]:
    """Returns the contenders. Those of gtp_jax are repeated for each way of reducing weight gradients, and named after
    it.

    If `names` is only `bf16`, in which the other families also reduce, the contenders are unchanged.
    """
    return _once_for_each(contenders, names, "bf16", "--grad-reduce", "grads {}")


def with_command_buffers(contenders: Sequence[Contender], choices: Sequence[str]) -> list[Contender]:
    """Returns the contenders. Those of gtp_jax are repeated for each choice of `COMMAND_BUFFERS`, and named after it.

    If `choices` is only `default`, the contenders are unchanged.
    """
    return _once_for_each(contenders, choices, "default", "--command-buffers", "command buffers {}")


def with_xla_options(contenders: Sequence[Contender], choices: Sequence[str]) -> list[Contender]:
    """Returns the contenders. Those of gtp_jax are repeated for each choice of `XLA_OPTIONS`, and named after it.

    If `choices` is only `gtp_jax`, the contenders are unchanged.
    """
    return _once_for_each(contenders, choices, "gtp_jax", "--xla-options", "options {}")


def with_experts(contenders: Sequence[Contender], flags: Sequence[str], transports: Sequence[str]) -> list[Contender]:
    """Returns the contenders. Those of gtp_jax get the flags about experts, and are repeated for each token transport.

    Except for bounds, other contenders support only the default router, and refuse to run if the flags ask for another.

    Args:
        contenders: the contenders to adapt.
        flags: flags as in `ExpertOptions.flags`; may include flags of the workload.
        transports: the names of the transports; if empty, contenders use the default for their devices.
    """
    router = " ".join(flag for flag in flags if flag.startswith(("--router-", "--no-router-")))
    refused = f"supports only the default router, not {router}" if router else ""

    def adapted(contender: Contender) -> Contender:
        if contender.family == OURS:
            return dataclasses.replace(contender, flags=(*contender.flags, *flags))
        return contender if contender.family == BOUND else dataclasses.replace(contender, refused=refused)

    every = [adapted(contender) for contender in contenders]
    return _once_for_each(every, transports, None, "--transport", "{}") if transports else every


def _once_for_each(
    contenders: Sequence[Contender], values: Sequence[str], usual: str | None, flag: str, word: str
) -> list[Contender]:
    """Returns the contenders. Those of gtp_jax are repeated for each value of a flag, and `word` is appended to their
    names. If `values` is only the usual value, the contenders are unchanged."""
    chosen = list(dict.fromkeys(values))
    if chosen == [usual]:
        return list(contenders)
    adapted = []
    for contender in contenders:
        if contender.family != OURS:
            adapted.append(contender)
            continue
        for value in chosen:
            variant = f"{contender.variant} {word.format(value)}"
            adapted.append(dataclasses.replace(contender, variant=variant, flags=(*contender.flags, f"{flag}={value}")))
    return adapted


def with_recipe(contenders: Sequence[Contender], options: Quantization) -> list[Contender]:
    """Returns the contenders, with these quantization options applied to gtp_jax's recipes.

    Raises:
        ValueError: if the options are incompatible with one of the recipes.
    """
    adapted = []
    for contender in contenders:
        if contender.family == OURS:
            own = dataclasses.replace(options, recipe=contender.variant)
            if all(kind.wire is None for kind in own.to_recipe().kinds):
                own = dataclasses.replace(own, pregathered_layers=0)  # there are no quantized weights to hold
            flags = tuple(dict.fromkeys((*contender.flags, *own.flags)))
            contender = dataclasses.replace(contender, flags=flags, matmuls=_matmuls(own.to_recipe()))
        adapted.append(contender)
    return adapted
