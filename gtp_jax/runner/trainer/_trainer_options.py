"""The settings of `gtp_jax.Trainer` that are no objects."""

from __future__ import annotations

import dataclasses

from ..._words import OFFLOADED, Offloaded
from ..flags import as_tuple, check_knobs, knob, piece
from ._divergence import Divergence
from ._tracker import TRACKERS, check_trackers

_TRAINING, OUTPUT = "training", "output"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerOptions:
    """The settings of a run of `gtp_jax.Trainer`, which describes them.

    Raises:
        ValueError: if a value is out of range.
    """

    steps: int = knob(1000, _TRAINING, "number of optimizer steps")
    microbatches: int = knob(1, _TRAINING, "number of parts of a batch")
    max_grad_norm: float | None = knob(None, _TRAINING, "norm to clip gradients to", kind=float, above=0)
    offload: Offloaded | None = knob(None, _TRAINING, "what the host's memory holds", kind=str, choices=OFFLOADED)
    seed: int = knob(0, _TRAINING, "seed", least=0, most=(1 << 32) - 1)
    divergence: Divergence = piece(Divergence)
    out: str = knob("gtp-run", OUTPUT, "directory", kind=str)
    eval_every: int = knob(100, OUTPUT, "steps between evaluations", least=0)
    eval_batches: int | None = knob(None, OUTPUT, "batches per evaluation")
    save_every: int = knob(100, OUTPUT, "steps between checkpoints")
    keep: int = knob(3, OUTPUT, "number of latest checkpoints to keep")
    keep_best: int = knob(1, OUTPUT, "number of best checkpoints to keep", least=0)
    log_to: tuple[str, ...] = knob((), OUTPUT, "trackers", kind=str, choices=TRACKERS, nargs="*")
    recorder: bool = knob(True, OUTPUT, "whether to say who holds up a step that hangs", kind=bool)
    grace: float | None = knob(None, OUTPUT, "seconds from a signal to the end", kind=float, above=0)

    def __post_init__(self) -> None:
        as_tuple(self, "log_to")
        check_knobs(self)
        object.__setattr__(self, "log_to", tuple(dict.fromkeys(self.log_to)))
        check_trackers(self.log_to)
