"""Flags that make a run of the model of a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..._foreign import brief
from ...experts import Routing
from ...models import PRESETS
from ..flags import ExpertOptions
from ._train_flags import VOCAB_MULTIPLE, vocab_size_with

# Fields of an architecture that flags other than --preset decide.
_OF_OTHER_FLAGS = {"vocab_size", "top_k", "shared_hidden", "routing"}
_OWN_PROGRAM = (
    "Train it in a program of your own: `gtp_jax.models.saved_config` makes its configuration of the manifest's "
    "`extra`, and `Checkpoints.restore_params` reads its parameters."
)


def flags_for(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Returns which flags make a run of a model of this architecture, or that none do.

    Args:
        theirs: the architecture.
        ours: that of the run as it was asked for; only what differs from it is named.
    """
    fitting = {name: preset for name, preset in PRESETS.items() if _sizes(preset.architecture()) == _sizes(theirs)}
    if not fitting:
        return f"No --preset has the sizes of the checkpoint's, and `gtp-jax train` trains no others. {_OWN_PROGRAM}"
    name, preset = next(iter(fitting.items()))
    vocab_size = theirs.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size_with(preset, vocab_size) != vocab_size:
        return (
            f"--preset {name} has its other sizes, but no --tokenizer gives it {brief(vocab_size)} tokens: `gtp-jax "
            f"train` takes {preset.vocab_size}, or a larger multiple of {VOCAB_MULTIPLE}. {_OWN_PROGRAM}"
        )
    try:
        theirs_of_experts = _of_experts(theirs)
        others = (_of_experts(ours) or theirs_of_experts, _of_experts(preset.architecture()))
        differing = {k: v for k, v in theirs_of_experts.items() if any(other[k] != v for other in others)}
        options = ExpertOptions(**differing)
        made = dataclasses.replace(options.of(preset, name), vocab_size=vocab_size).architecture()
    except (TypeError, ValueError, KeyError):
        made, options, differing = None, ExpertOptions(), {}
    if made != theirs:
        return f"--preset {name} has its sizes, but no flags choose experts as its router does. {_OWN_PROGRAM}"
    other_preset = _sizes(ours) != _sizes(theirs)
    chosen = [" ".join([*([f"--preset {name}"] if other_preset else []), *options.flags()])]
    if other_preset or ours.get("vocab_size") != vocab_size:
        least = vocab_size - VOCAB_MULTIPLE + 1 if vocab_size > preset.vocab_size else 1
        chosen.append(
            f"the --tokenizer that belongs to it; of its kind are those with {least} to {vocab_size} tokens, their "
            "separator included"
        )
    choose = ", and ".join(filter(None, chosen))
    leave_out = " ".join(_flag(field) for field, value in differing.items() if value is None)
    return " ".join([*([f"Choose {choose}."] if choose else []), *([f"Leave out {leave_out}."] if leave_out else [])])


def _sizes(architecture: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in architecture.items() if name not in _OF_OTHER_FLAGS}


def _of_experts(architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `ExpertOptions` that say the same as an architecture; none if it has no experts."""
    if not architecture.get("num_experts"):
        return {}
    routing = {**dataclasses.asdict(Routing()), **architecture.get("routing", {})}
    sizes = {"top_k": architecture["top_k"], "shared_hidden": architecture.get("shared_hidden", 0)}
    return {**sizes, **{f"router_{name}": value for name, value in routing.items()}}


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"
