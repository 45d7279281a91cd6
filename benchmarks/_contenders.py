"""Who takes part in `gtp-jax bench step`: a table of scripts and their flags."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from gtp_jax.recipes import RECIPES, Recipe
from gtp_jax.runner.flags import Quantization

from ._choice import by_words

SCRIPTS = Path(__file__).with_name("contenders")

OURS, STOCK, PARTITIONER, FSDP2, BOUND = "gtp_jax", "stock", "partitioner", "fsdp2", "bound"

# Weights gathered again in backward, or kept for it: never compared with one another.
POLICIES = ("regather", "keep")
_FLAGS_OF_POLICY = {"regather": (), "keep": ("--keep-gathered",)}


@dataclasses.dataclass(frozen=True)
class Contender:
    """A program that runs the step.

    Attributes:
        family: `gtp_jax`, `stock`, `partitioner`, `fsdp2` or `bound`.
        variant: a recipe, a way to write the program, a precision.
        policy: `regather` or `keep`; empty for a bound, which gathers nothing.
        script: file in the folder `contenders`.
        flags: beside those of the workload.
        tp: tensor-parallel degrees that it takes part at.
        matmuls: formats in which layers multiply, such as `bf16` or `fp8`; ratios compare equal ones only.
        refused: why it does not run what the other flags ask for; empty if it does.
        guards: whether the step computes the norm of all gradients and updates only if it is finite, as a step of
            gtp_jax does.
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
        """Returns the command line of its process; with PyTorch, of one process a device."""
        torchrun = [torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
        launch = torchrun if self.family == FSDP2 else [sys.executable]
        return [*launch, str(SCRIPTS / self.script), *workload_flags, *self.flags]


def _contenders() -> tuple[Contender, ...]:
    # async TP differs only where tp is above 1; torchao's FP8 all-gather shards over one axis
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
    """Names the formats in which dense layers multiply under a recipe and its overrides, each once."""
    assert isinstance(recipe.override, tuple)
    recipes = (recipe, *(override for _, override in recipe.override))
    names = ("bf16" if r.operands is None else type(r).__name__.lower() for r in recipes)
    return "+".join(dict.fromkeys(names))


# In the order in which they run: the most compared first, so that a short run leaves out what matters least.
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


# The partitioner at its best: with collectives joined or not, with XLA's default options or gtp_jax's, and with or
# without the norm and the guard of a gtp_jax step. `gtp-jax bench suite` picks from these.
PARTITIONERS: tuple[Contender, ...] = _partitioners()

# The model of stock Flax layers that `gtp_jax.shard` shards, in global view, its default, and in local view. Beside
# `gtp_jax bf16` it shows what gtp_jax's own layers bring. `gtp-jax bench suite` runs it.
STOCK_MODELS: tuple[Contender, ...] = tuple(
    Contender(STOCK, variant, "regather", "stock.py", flags, tp="1", guards=True)
    for variant, flags in (("bf16", ()), ("bf16 local", ("--view=local",)))
)


def contender_named(name: str) -> Contender:
    """Returns the contender of `CONTENDERS`, `PARTITIONERS` or `STOCK_MODELS` with this name.

    Raises:
        KeyError: if there is none.
    """
    return {c.name: c for c in (*STOCK_MODELS, *PARTITIONERS, *CONTENDERS)}[name]


def chosen_contenders(only: Sequence[str], *, tp: int = 1) -> list[Contender]:
    """Returns those of `CONTENDERS` that a tp degree has, and whose name has all the words of one of `only`, if there
    are any.

    Raises:
        ValueError: if none has.
    """
    return by_words([c for c in CONTENDERS if c.tp in ("any", "above 1" if tp > 1 else "1")], only, "contender")


def with_remat_policies(contenders: Sequence[Contender], policies: Sequence[str]) -> list[Contender]:
    """Returns the contenders, those of gtp_jax once for each policy of what a layer keeps, whose name they have beside
    theirs.

    With the default alone they are as they were.
    """
    return _once_for_each(contenders, policies, "matmuls", "--remat", "{}")


def with_grad_reductions(contenders: Sequence[Contender], names: Sequence[str]) -> list[Contender]:
    """Returns the contenders, those of gtp_jax once for each way to sum weight gradients, whose name they have beside
    theirs.

    With `bf16` alone, in which the others sum too, they are as they were.
    """
    return _once_for_each(contenders, names, "bf16", "--grad-reduce", "grads {}")


def with_experts(contenders: Sequence[Contender], flags: Sequence[str], transports: Sequence[str]) -> list[Contender]:
    """Returns the contenders, those of gtp_jax with flags about experts, and once for each way that tokens travel.

    FSDP2 and the partitioner have the default router alone, and say so where flags ask for another.

    Args:
        contenders: to begin with.
        flags: as `ExpertOptions.flags` has them; those of the workload may be among them.
        transports: names; none for the one that suits the devices.
    """
    router = " ".join(flag for flag in flags if flag.startswith(("--router-", "--no-router-")))
    refused = f"has the default router alone, not {router}" if router else ""

    def adapted(contender: Contender) -> Contender:
        if contender.family == OURS:
            return dataclasses.replace(contender, flags=(*contender.flags, *flags))
        return contender if contender.family == BOUND else dataclasses.replace(contender, refused=refused)

    every = [adapted(contender) for contender in contenders]
    return _once_for_each(every, transports, None, "--transport", "{}") if transports else every


def _once_for_each(
    contenders: Sequence[Contender], values: Sequence[str], usual: str | None, flag: str, word: str
) -> list[Contender]:
    """Returns the contenders, those of gtp_jax once for each value of a flag, with `word` beside their names; as they
    were for the usual value alone."""
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
    """Returns the contenders, of which those of gtp_jax follow what is said beside their recipe.

    Raises:
        ValueError: if it does not go with one of them.
    """
    adapted = []
    for contender in contenders:
        if contender.family == OURS:
            own = dataclasses.replace(options, recipe=contender.variant)
            if all(kind.wire is None for kind in own.to_recipe().kinds):
                own = dataclasses.replace(own, pregathered_layers=0)  # there are no codes to hold
            flags = tuple(dict.fromkeys((*contender.flags, *own.flags)))
            contender = dataclasses.replace(contender, flags=flags, matmuls=_matmuls(own.to_recipe()))
        adapted.append(contender)
    return adapted
