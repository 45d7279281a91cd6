"""What a training run is: every knob, its default and its limits."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from pathlib import Path
from typing import Any, Literal

from .. import __version__
from .._flags import count_or, knob
from ..chain import REMAT, Remat, Schedule
from ..models import PRESETS, LlamaConfig
from ..nn import check_heads
from ..recipes import RecipeOptions

# Without a GPU, and without degrees that ask for another number.
VIRTUAL_DEVICES = 8

# The key of config.json that says who wrote it.
_MARK = "gtp_jax"

_VOCAB_MULTIPLE = 128

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(RecipeOptions):
    """A training run. The help of each field is what `gtp-jax train --help` shows.

    Raises:
        ValueError: if a value is out of range, or values do not fit one another.
    """

    preset: str = knob("tiny", "model", f"size of the model: {', '.join(PRESETS)}", kind=str, metavar="NAME")
    from_: str | None = knob(
        None,
        "model",
        "start from the parameters in a directory of checkpoints: imported, or of another run (default: random ones)",
        kind=str,
        metavar="DIR",
    )
    dtype: str | None = knob(
        None, "model", "compute dtype (default: bfloat16 on GPUs, float32 on CPUs)", kind=str, choices=DTYPES
    )
    prefetch: bool = knob(True, "model", "gather the next layer's weights under this layer's compute", kind=bool)
    unroll: int | Literal["full"] = knob(
        "full", "model", "layers in one loop body, or 'full'", kind=count_or("full"), metavar="N"
    )
    kept: int | Literal["all"] = knob(
        1,
        "model",
        "layers, from the last, that keep gathered weights for backward, or 'all'",
        kind=count_or("all"),
        metavar="N",
    )
    remat: Remat = knob("matmuls", "model", "what a layer keeps for backward", kind=str, choices=REMAT)
    data: tuple[str, ...] = knob(
        (),
        "text",
        "files, and directories with all they hold (default: the source of the Python standard library)",
        kind=str,
        metavar="PATH",
        nargs="+",
    )
    tokenizer: str | None = knob(
        None, "text", "a Hugging Face tokenizer.json (default: every byte is a token)", kind=str, metavar="FILE"
    )
    seq: int = knob(128, "text", "tokens of a sequence", metavar="N")

    steps: int = knob(200, "training", "optimizer steps in all", metavar="N")
    batch: int = knob(16, "training", "sequences of a step, over all devices", metavar="N")
    microbatches: int = knob(1, "training", "parts that a device's sequences are taken in", metavar="N")
    lr: float | None = knob(
        None, "training", "highest learning rate (default: 0.003 * sqrt(128 / dim))", kind=float, metavar="RATE"
    )
    warmup: int | None = knob(
        None, "training", "steps of linear warm-up, before the cosine (default: a tenth, at most 200)", metavar="N"
    )
    weight_decay: float = knob(0.1, "training", "of AdamW, on matrices only", kind=float, metavar="RATE")
    max_grad_norm: float = knob(1.0, "training", "scale gradients down to this norm", kind=float, metavar="NORM")
    seed: int = knob(0, "training", "of initial weights and of the order of the text", metavar="N")

    dp: int = knob(1, "mesh", "replicas of the sliced weights", metavar="N")
    gtp: int | None = knob(
        None, "mesh", "slices a weight is cut into (default: what dp and tp leave over)", metavar="N"
    )
    tp: int | None = knob(
        None,
        "mesh",
        "tensor-parallel degree (default: 1; 2 on virtual CPU devices, unless --gtp is given)",
        metavar="N",
    )

    out: str = knob("gtp-run", "output", "directory of checkpoints, log, curve and report", kind=str, metavar="DIR")
    eval_every: int = knob(25, "output", "steps between evaluations on held-out text", metavar="N")
    eval_batches: int = knob(4, "output", "batches of an evaluation", metavar="N")
    save_every: int = knob(50, "output", "steps between checkpoints", metavar="N")
    keep: int = knob(3, "output", "checkpoints to keep, the latest ones", metavar="N")
    keep_best: int = knob(1, "output", "checkpoints of the lowest held-out loss to keep beside them", metavar="N")

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", tuple(self.data))  # a list, out of JSON or argparse
        if self.preset not in PRESETS:
            near = difflib.get_close_matches(self.preset.lower(), PRESETS, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown `preset` {self.preset!r}; known are {', '.join(PRESETS)}.{hint}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` is {value}; it is a whole number of at least 1.")
        if not (isinstance(self.seed, int) and 0 <= self.seed < 1 << 32):
            raise ValueError(f"`seed` is {self.seed}; it is a whole number from 0 to {(1 << 32) - 1}.")
        for name in ("lr", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"`{name}` is {value}; it is a number above 0.")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"`weight_decay` is {self.weight_decay}; it is a number of at least 0.")
        if self.warmup is not None and not 0 <= self.warmup < self.steps:
            raise ValueError(f"`warmup` is {self.warmup}; it is at least 0 and less than `steps`, {self.steps}.")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"`dtype` is {self.dtype!r}; it is one of {', '.join(DTYPES)}.")
        if not (isinstance(self.keep_best, int) and self.keep_best >= 0):
            raise ValueError(f"`keep_best` is {self.keep_best}; it is a whole number of at least 0.")
        if self.remat not in REMAT:
            raise ValueError(f"`remat` is {self.remat!r}; it is one of {', '.join(REMAT)}.")
        super().__post_init__()
        Schedule(prefetch=self.prefetch, unroll=self.unroll, kept=self.kept)

    @property
    def virtual_devices(self) -> int:
        """Virtual CPU devices that the degrees need; where they leave gtp open, 8 or the next that fits."""
        others = self.dp * (self.tp or 1)
        return others * (self.gtp or max(1, VIRTUAL_DEVICES // others))

    def degrees(self, devices: int, *, virtual: bool) -> dict[str, int]:
        """The degrees of the mesh on this many devices: those asked for, the others from what is left over.

        Args:
            devices: how many there are.
            virtual: whether they are virtual CPU devices, where tp is 2 by default, to show both axes at work.

        Raises:
            ValueError: if the degrees do not multiply to the devices.
        """
        tp = self.tp or (2 if virtual and self.gtp is None and devices % (2 * self.dp) == 0 else 1)
        gtp = self.gtp or max(1, devices // (self.dp * tp))
        if self.dp * gtp * tp != devices:
            raise ValueError(
                f"dp {self.dp} x gtp {gtp} x tp {tp} = {self.dp * gtp * tp}, but there are {devices} devices. Choose "
                "degrees whose product is the number of devices."
            )
        return {"dp": self.dp, "gtp": gtp, "tp": tp}

    def check_degrees(self, *, dp: int, gtp: int, tp: int) -> None:
        """Checks that model and batch can be cut so.

        Raises:
            ValueError: if tp does not divide the heads or the sequence, or the ranks do not divide the batch.
        """
        model = PRESETS[self.preset]
        check_heads(model.heads, model.kv_heads, tp)
        if model.sequence_parallel and self.seq % tp:
            raise ValueError(f"`seq` is {self.seq}, which tp {tp} does not divide; the sequence is cut over tp.")
        parts = dp * gtp * self.microbatches
        if self.batch % parts:
            raise ValueError(
                f"`batch` is {self.batch}, which is not divisible by dp * gtp * microbatches = {dp} * {gtp} * "
                f"{self.microbatches} = {parts}. Take {max(1, self.batch // parts) * parts}, for instance."
            )

    def model(self, vocab: int, *, dtype: str) -> LlamaConfig:
        """The preset, computing in `dtype` by default; with a larger vocabulary if the text needs it.

        Args:
            vocab: number of different tokens; rounded up, so that every tp degree divides the model's.
            dtype: compute dtype.
        """
        preset = PRESETS[self.preset]
        vocab = -(-vocab // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
        chosen: Any = {name: getattr(self, name) for name in ("prefetch", "unroll", "kept", "remat")}
        chosen["dtype"] = self.dtype or dtype
        return dataclasses.replace(preset, vocab=max(vocab, preset.vocab), **chosen)

    @property
    def peak_lr(self) -> float:
        """The highest learning rate."""
        return self.lr if self.lr is not None else 0.003 * math.sqrt(128 / PRESETS[self.preset].dim)

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return self.warmup if self.warmup is not None else min(200, self.steps // 10)

    def changes(self, before: TrainConfig) -> list[str]:
        """How this differs from an earlier configuration in what a run computes."""
        names = (field.name for field in dataclasses.fields(self) if field.metadata["group"] != "output")
        pairs = ((name, getattr(before, name), getattr(self, name)) for name in names)
        return [f"{name} from {old} to {new}" for name, old, new in pairs if old != new]

    def save(self, path: Path) -> None:
        """Writes the configuration as JSON."""
        path.write_text(json.dumps({_MARK: __version__, **dataclasses.asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Reads a configuration.

        Raises:
            ValueError: if the file is not one that `save` wrote.
        """
        try:
            found = json.loads(path.read_text())
            found.pop(_MARK)
            return cls(**found)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} is not the configuration of a run of gtp-jax ({error}). Choose another --out, or move what is "
                "there."
            ) from error


_COUNTS = (
    *("seq", "steps", "batch", "microbatches", "dp", "gtp", "tp"),
    *("eval_every", "eval_batches", "save_every", "keep"),
)
