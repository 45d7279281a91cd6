"""The configuration of a training run: every setting, its default and its limits."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

from ..._words import (
    CP,
    DOCUMENTS,
    MOMENTS,
    PACKINGS,
    PRESET_NAMES,
    STREAM,
    TOKEN_DTYPES,
    TP,
    Moments,
    SequenceExchange,
)
from ..flags import (
    AdapterOptions,
    Execution,
    ExpertOptions,
    Faults,
    ModelSizes,
    Parallelism,
    Quantization,
    as_tuple,
    begin_of_phase,
    check_knobs,
    flag_of,
    from_settings,
    knob,
    knobs,
    piece,
    settings_of,
)
from ._config_file import PROGRAM, not_of_a_run, read_config, write_config
from ._divergence import Divergence
from ._tracker import TRACKERS

if TYPE_CHECKING:
    from flax import nnx

    from ...models import Adapters, ModelConfig
    from ...nonuniform import FaultPlan
    from ...recipes import Phases, Recipe

# The default number of devices without a GPU, unless the degrees require another.
VIRTUAL_DEVICES = 8

_VOCAB_MULTIPLE = 128

# The preset of a run that names none and starts from no checkpoint.
_PRESET = "tiny"

# The value of `tokenizer` if every byte is a token; the default without --from.
BYTE_TOKENS = "bytes"

# The optimizer that averages weights instead of decaying the learning rate.
_SCHEDULE_FREE = "schedule-free"

# The optimizers whose state is moments, which need not be stored in float32.
_WITH_MOMENTS = ("adamw", "lion", "muon")
_FLOAT32 = "float32"

# The factor of the default learning rate for each optimizer: Lion's updates are signs, which are larger than Adam's.
_LR_FACTORS = {"adamw": 1.0, "lion": 0.2, "adafactor": 1.0, "muon": 1.0, _SCHEDULE_FREE: 1.0}

# The optimizers whose updates read a whole array, not one element at a time, which `offload` requires.
_NOT_ELEMENTWISE = ("adafactor", "muon")

# The default learning rate of a model of others.
_LR = 0.001

# Settings that apply only with --model, only to models of ours, and only to text.
_OF_ANY_MODEL = ("loss", "dataset", "eval_dataset")
_OF_FAMILIES = (
    *("preset", "from_", "dtype"),
    *(field.name for kind in (ModelSizes, ExpertOptions, AdapterOptions, Faults) for field in knobs(kind)),
    *(field.name for field in knobs(Execution) if field.name not in ("microbatches", "offload")),
    "pregathered_layers",
)
_OF_TEXT = ("data", "tokenizer", "follow_links", "text_field", "token_dtype", "packing", "chat_template", "loss_on")
_OF_TEXT += ("seq", "batch", "eval_data")

# The parts of a conversation that the loss may count.
ANSWERS, ALL = "answers", "all"

SCHEDULES = ("cosine", "linear", "wsd", "constant")

# With float64, which needs JAX_ENABLE_X64, runs on different meshes are comparable to 1e-12.
DTYPES = ("float32", "bfloat16", "float64")


def names_file(tokenizer: str | None) -> TypeGuard[str]:
    """Returns whether the `tokenizer` of a configuration is a path."""
    return tokenizer not in (None, BYTE_TOKENS)


def padded_seq(seq: int, degrees: Mapping[str, int]) -> int:
    """Returns the number of places of a row: `seq`, or with cp the next number that the ranks which share a sequence
    divide."""
    ranks = degrees[CP] * degrees[TP] if degrees.get(CP, 1) > 1 else 1
    return -(-seq // ranks) * ranks


def default_lr(hidden_size: int) -> float:
    """Returns the default peak learning rate for a model of this width."""
    return 0.003 * math.sqrt(128 / hidden_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a training run. `gtp-jax train --help` shows the help of each field.

    Raises:
        ValueError: if a value is out of range, or values contradict each other.
    """

    preset: str | None = knob(
        None,
        "model",
        f"the model, one of {', '.join(PRESET_NAMES)}; sizes that are given override its own (default: {_PRESET}, or "
        "the model of --from)",
        kind=str,
        metavar="NAME",
    )
    from_: str | None = knob(
        None,
        "model",
        "start from the model in a directory of checkpoints, of an import or another run: from its parameters, with "
        "its sizes and its tokenizer (default: random parameters)",
        kind=str,
        metavar="DIR",
        per_process=True,
    )
    model_: str | None = knob(
        None,
        "model",
        "train any NNX model instead: a class, or a function of `nnx.Rngs`, as package.module:name; `gtp_jax.shard` "
        "shards it",
        kind=str,
        metavar="NAME",
    )
    loss: str | None = knob(
        None,
        "model",
        "with --model: a function (model, batch) -> loss, as package.module:name (default: the cross entropy of "
        "model(tokens) with the targets)",
        kind=str,
        metavar="NAME",
    )
    dataset: str | None = knob(
        None,
        "model",
        "with --model: the batches, or a function that returns or yields them, as package.module:name, instead of "
        "--data",
        kind=str,
        metavar="NAME",
    )
    eval_dataset: str | None = knob(
        None, "model", "with --dataset: batches to evaluate on, in the same form", kind=str, metavar="NAME"
    )
    dtype: str | None = knob(
        None, "model", "compute dtype (default: bfloat16 on GPUs, float32 on CPUs)", kind=str, choices=DTYPES
    )
    sizes: ModelSizes = piece(ModelSizes)
    experts: ExpertOptions = piece(ExpertOptions)
    adapted: AdapterOptions = piece(AdapterOptions)
    quantization: Quantization = piece(Quantization)
    recipe_from: tuple[str, ...] = knob(
        (),
        "recipe",
        "change --recipe at steps, such as 9000=bf16 for the last part of a run; all programs are compiled before the "
        "first step",
        kind=str,
        metavar="STEP=RECIPE",
        nargs="+",
    )
    data: tuple[str, ...] = knob(
        (),
        "text",
        "files, and directories with everything in them: text, JSON lines (.jsonl), token ids (.npy, .bin), "
        "parquet; with PATH:WEIGHT for each, their rows are mixed by weight (default: the source of the Python "
        "standard library)",
        kind=str,
        metavar="PATH",
        nargs="+",
        per_process=True,
    )
    tokenizer: str | None = knob(
        None,
        "text",
        f"a Hugging Face tokenizer.json, or {BYTE_TOKENS!r} if every byte is a token (default: that of --from, "
        "otherwise bytes)",
        kind=str,
        metavar="FILE",
        per_process=True,
    )
    follow_links: bool = knob(False, "text", "follow links that lead outside a directory of texts", kind=bool)
    text_field: str = knob("text", "text", "the field of a record that contains its text", kind=str, metavar="NAME")
    token_dtype: str | None = knob(
        None, "text", "dtype of .bin files of token ids that do not state their own", kind=str, choices=TOKEN_DTYPES
    )
    packing: str | None = knob(
        None,
        "text",
        f"how rows are made: cut from a {STREAM} of all documents without gaps, or packed with whole {DOCUMENTS} "
        f"that do not attend to each other (default: {DOCUMENTS} for records, otherwise {STREAM})",
        kind=str,
        choices=PACKINGS,
    )
    chat_template: str | None = knob(
        None,
        "text",
        "how conversations (JSON lines with `messages`) are written as text: a chat_template.jinja or "
        "tokenizer_config.json (default: that of --from)",
        kind=str,
        metavar="FILE",
        per_process=True,
    )
    loss_on: str = knob(
        ANSWERS,
        "text",
        f"the part of a conversation that the loss counts: {ANSWERS}, or {ALL} of its text",
        kind=str,
        choices=(ANSWERS, ALL),
    )
    seq: int = knob(128, "text", "tokens per sequence", metavar="N")

    steps: int = knob(200, "training", "total number of optimizer steps", metavar="N")
    batch: int = knob(16, "training", "sequences per step, over all devices", metavar="N")
    optimizer: str = knob(
        "adamw",
        "training",
        "the optimizer; muon updates the matrices of each layer, and AdamW the rest; schedule-free averages AdamW's "
        "weights instead of using a schedule",
        kind=str,
        choices=tuple(_LR_FACTORS),
    )
    optimizer_state: Literal["float32"] | Moments = knob(
        _FLOAT32,
        "training",
        "how the moments of adamw, lion and muon are stored: bfloat16 takes half the memory, and float8, in blocks "
        "with a scale each, a quarter; both are rounded stochastically",
        kind=str,
        choices=(_FLOAT32, *MOMENTS),
    )
    schedule: str | None = knob(
        None,
        "training",
        "the learning rate after the warm-up: it decays to a tenth along a cosine or a line, stays constant and "
        "decays over the last fifth of the steps (wsd: warm-up, stable, decay), or is constant (default: cosine; "
        "with schedule-free, constant)",
        kind=str,
        choices=SCHEDULES,
    )
    average: float | None = knob(
        None,
        "training",
        "evaluate an exponential moving average of the weights with this decay per step, such as 0.999; samples, "
        "exports and `gtp-jax generate` use it too (default: the weights themselves)",
        kind=float,
        above=0,
        metavar="DECAY",
    )
    lr: float | None = knob(
        None,
        "training",
        "highest learning rate (default: 0.003 * sqrt(128 / hidden size), with --model 0.001; with lion, a fifth of "
        "that)",
        kind=float,
        above=0,
        metavar="RATE",
    )
    warmup: int | None = knob(
        None,
        "training",
        "steps of linear warm-up before the schedule (default: a tenth of all steps, at most 200)",
        least=0,
        metavar="N",
    )
    weight_decay: float = knob(0.1, "training", "weight decay, applied to matrices only", kind=float, metavar="RATE")
    max_grad_norm: float = knob(1.0, "training", "clip gradients to this norm", kind=float, above=0, metavar="NORM")
    seed: int = knob(
        0,
        "training",
        "seed of the initial weights and of the order of the text",
        least=0,
        most=(1 << 32) - 1,
        metavar="N",
    )

    execution: Execution = piece(Execution)
    divergence: Divergence = piece(Divergence)
    parallelism: Parallelism = piece(Parallelism)
    faults: Faults = piece(Faults)

    out: str = knob(
        "gtp-run",
        "output",
        "directory of checkpoints, log, curve and report",
        kind=str,
        metavar="DIR",
        per_process=True,
    )
    eval_every: int = knob(25, "output", "steps between evaluations on held-out text; 0 for none", least=0, metavar="N")
    eval_batches: int = knob(4, "output", "batches per evaluation of each text", metavar="N")
    eval_data: tuple[str, ...] = knob(
        (),
        "output",
        "files and directories to evaluate on in addition to the held-out text, each a text with a loss of its own; "
        "with no path, a resumed run stops evaluating on them",
        kind=str,
        metavar="PATH",
        nargs="*",
        per_process=True,
    )
    sample_tokens: int = knob(
        96,
        "output",
        "number of tokens of the sample that the model writes at each evaluation; 0 for none",
        least=0,
        metavar="N",
    )
    log_to: tuple[str, ...] = knob(
        (),
        "output",
        "also write the values of log.jsonl for TensorBoard (to tensorboard/ in --out) or Weights & Biases (to "
        "wandb/, offline unless WANDB_MODE says otherwise); with no name, a resumed run stops writing them",
        kind=str,
        choices=TRACKERS,
        nargs="*",
    )
    save_every: int = knob(50, "output", "steps between checkpoints", metavar="N")
    keep: int = knob(3, "output", "number of latest checkpoints to keep", metavar="N")
    keep_best: int = knob(
        1, "output", "number of checkpoints with the lowest held-out loss to keep in addition", least=0, metavar="N"
    )

    grace: float | None = knob(
        None,
        "output",
        "seconds from a signal until the process is ended by force; a state that cannot be saved in time is not "
        "saved (default: no limit)",
        kind=float,
        above=0,
        metavar="S",
    )
    recorder: bool = knob(
        True, "output", "if a step hangs, say which process the others wait for, and in which layer", kind=bool
    )

    def __post_init__(self) -> None:
        as_tuple(self, "data", "eval_data", "log_to", "recipe_from")
        check_knobs(self)
        object.__setattr__(self, "log_to", tuple(dict.fromkeys(self.log_to)))
        if self.eval_data and not self.eval_every:
            raise ValueError(
                "`eval_every` is 0, so nothing is evaluated. Remove --eval-data, or set another --eval-every."
            )
        self._check_model()
        if self.preset is None and self.from_ is None and self.model_ is None:
            object.__setattr__(self, "preset", _PRESET)
        if self.adapters is not None:
            self._check_adapters()
        if self.recipe_from:
            self._check_phases()
        if self.average is not None and self.average >= 1:
            raise ValueError(f"`average` is {self.average}; it must be a number between 0 and 1, such as 0.999.")
        if self.optimizer == _SCHEDULE_FREE and self.schedule not in (None, "constant"):
            raise ValueError(
                f"`schedule` is {self.schedule!r}, but `optimizer` is schedule-free, which averages weights instead "
                "of using a schedule. Remove --schedule, or use another --optimizer."
            )
        if self.optimizer == _SCHEDULE_FREE and self.average is not None:
            raise ValueError(
                f"`average` is {self.average}, but `optimizer` is schedule-free, which averages weights itself. "
                "Remove --average, or use another --optimizer."
            )
        if self.optimizer_state != _FLOAT32 and self.optimizer not in _WITH_MOMENTS:
            raise ValueError(
                f"`optimizer_state` is {self.optimizer_state!r}, but `optimizer` is {self.optimizer}, whose state is "
                f"not moments: adafactor's is small, and schedule-free's are weights. Use one of "
                f"{', '.join(_WITH_MOMENTS)}, or remove --optimizer-state."
            )
        if self.execution.offloaded is not None:
            self._check_offload()
        if self.weight_decay < 0:
            raise ValueError(f"`weight_decay` is {self.weight_decay}; it must be a number of at least 0.")
        if self.warmup is not None and self.warmup >= self.steps:
            raise ValueError(f"`warmup` is {self.warmup}; it must be at least 0 and less than `steps`, {self.steps}.")
        if (degrees := self.parallelism.of_batch) is not None and not self.faults.any:
            self.execution.check_batch(self.batch, degrees)
        if self.model_ is None:  # imports JAX, and therefore comes last
            self.base  # noqa: B018  checks that sizes and experts fit each other

    def _check_model(self) -> None:
        """Refuses flags that apply only to models of ours, to any other model, or to text."""
        values = settings_of(self)
        given = [field for field in knobs(self) if values[field.name] != field.default]
        if self.model_ is None:
            wrong, why = _OF_ANY_MODEL, "applies only with --model. Add --model, or remove it"
        else:
            wrong, why = _OF_FAMILIES, "applies only to models of gtp_jax. Remove it, or --model"
        if refused := [flag_of(field) for field in given if field.name in wrong]:
            raise ValueError(f"{', '.join(refused)}: this {why}.")
        if self.dataset is None and self.eval_dataset is not None:
            raise ValueError("--eval-dataset: this applies only with --dataset. Use --eval-data for text.")
        if self.dataset is not None and (refused := [flag_of(f) for f in given if f.name in _OF_TEXT]):
            raise ValueError(f"{', '.join(refused)}: this applies only to text. Remove it, or --dataset.")

    def _check_offload(self) -> None:
        """Refuses optimizers that do not update each element by itself."""
        usable = ", ".join(name for name in _LR_FACTORS if name not in _NOT_ELEMENTWISE)
        for wrong, what, remedy in (
            (self.optimizer in _NOT_ELEMENTWISE, f"`optimizer` is {self.optimizer}", f"Use --optimizer {usable}"),
            (self.optimizer_state != _FLOAT32, f"`optimizer_state` is {self.optimizer_state}", "Use float32 moments"),
        ):
            if wrong:
                raise ValueError(
                    f"`offload` is {self.execution.offload!r}, but {what}, which needs whole arrays, and arrays in the "
                    f"host's memory are updated in blocks. {remedy}, or remove --offload."
                )

    def _check_phases(self) -> None:
        """Refuses recipes that change where something else decides the recipe, or that make no phases."""
        for wrong, what, remedy in (
            (self.adapters is not None, "a frozen base keeps the codes that --recipe gives it", "--lora"),
            (self.faults.any, "replicas of unequal degree run one recipe", "the flags of failures"),
        ):
            if wrong:
                raise ValueError(f"`recipe_from` changes the recipe, but {what}. Remove --recipe-from, or {remedy}.")
        last = begin_of_phase(self.recipe_from[-1])[0]
        if last >= self.steps:
            raise ValueError(
                f"`recipe_from` has {self.recipe_from[-1]!r}, but `steps` is {self.steps}. Choose an earlier step."
            )
        self.recipe  # noqa: B018  checks that the steps ascend

    def _check_adapters(self) -> None:
        if self.from_ is None:
            raise ValueError(
                f"`lora` is {self.adapted.lora}, but adapters require a trained model. Give one with --from, from "
                "`gtp-jax convert import` or `gtp-jax train`, or remove --lora."
            )
        for name in ("pregathered_layers", "grad_wire"):
            if value := getattr(self.quantization, name):
                raise ValueError(
                    f"`{name}` is {value!r}, but with --lora the sharded weights are frozen: they are quantized once "
                    f"and have no gradients. Remove --{name.replace('_', '-')}."
                )

        if self.quantization.to_recipe().delays:
            raise ValueError(
                f"`recipe` is {self.quantization.summary}, which scales by amaxes of earlier steps, of which a frozen "
                "model has none. With --lora, use another recipe, such as fp8-matmuls."
            )
        if any(kind.operands is not None and kind.operands.stochastic for kind in self.quantization.to_recipe().kinds):
            raise ValueError(
                f"`recipe` is {self.quantization.summary}, which rounds gradients stochastically, but a frozen "
                "weight has no random key for that. With --lora, use a recipe without matmuls, such as nvfp4, or "
                "mxfp8-matmuls."
            )

    @property
    def adapters(self) -> Adapters | None:
        """The adapters to train; `None` if the model itself is trained."""
        return self.adapted.adapters

    @property
    def recipe(self) -> Recipe | Phases:
        """The recipe, or those that follow one another."""
        return self.quantization.with_phases(self.recipe_from) if self.recipe_from else self.quantization.to_recipe()

    @property
    def recipe_in_words(self) -> str:
        """The recipe and its options, in one line."""
        return ", ".join([self.quantization.summary, *(f"from step {text}" for text in self.recipe_from)])

    @property
    def step_recipe(self) -> Recipe | Phases | None:
        """The recipe of the training step; `None` with adapters, whose frozen model is quantized only once."""
        return self.recipe if self.adapters is None else None

    def adapt[M: nnx.Module](self, model: M, rngs: nnx.Rngs) -> M:
        """Returns the model to train: with adapters, and frozen as the recipe says, if the run trains adapters."""
        if self.adapters is None:
            return model
        recipe = self.quantization.to_recipe()
        try:
            return self.adapters.on(model, rngs, recipe if any(kind.wire for kind in recipe.kinds) else None)
        except ValueError as error:
            raise ValueError(str(error).replace("`targets`", "`lora_targets`")) from error

    def virtual_devices(self, processes: int) -> int:
        """Returns how many virtual CPU devices the degrees need. If gtp is not given: 8, or the next number that fits.

        After failures, a single process also counts the failed devices; several count only the devices that compute.
        """
        if self.faults.any:
            plan = self.fault_plan(self._healthy())
            return plan.slots if processes == 1 else len(plan.active)
        return self.parallelism.virtual_devices(VIRTUAL_DEVICES)

    def degrees(self, devices: int, *, virtual: bool) -> dict[str, int]:
        """Returns the degrees of the mesh: those that are given, and the others from the devices that remain.

        Args:
            devices: the number of devices.
            virtual: whether they are virtual CPU devices. If so, tp is 2 by default where it fits, to show both axes.

        Raises:
            ValueError: if the product of the degrees is not the number of devices, or the degrees do not divide the
                model or the batch.
        """
        from ...mesh import check_degrees

        asked, exchange = self.parallelism, self.execution.sequence_exchange
        if self.model_ is not None:
            degrees = asked.degrees(devices)
            check_degrees(degrees, devices)
            if self.dataset is None:
                self.execution.check_batch(self.batch, degrees)
            return degrees
        if self.faults.any:
            degrees = self._healthy()
            self.fault_plan(degrees).devices_of(range(devices))
            self.base.check_mesh(tp=degrees["tp"], seq=self.seq)
            return degrees
        if virtual and asked.tp is None and asked.gtp is None and devices % (2 * asked.dp * asked.cp * asked.ep) == 0:
            with contextlib.suppress(ValueError):  # 2 may not divide the heads or the sequence
                self._check_mesh({CP: asked.cp, TP: 2}, exchange or "heads")
                asked = dataclasses.replace(asked, tp=2)
        degrees = asked.degrees(devices)
        check_degrees(degrees, devices)
        self._check_mesh(degrees, exchange)
        self.execution.check_batch(self.batch, degrees)
        return degrees

    def _check_mesh(self, degrees: Mapping[str, int], exchange: SequenceExchange | None) -> None:
        """Checks that the model and its rows, which are padded for cp, can be divided over a mesh.

        Raises:
            ValueError: if they cannot, or if rows of a model with experts would be padded.
        """
        from ...models import LlamaConfig

        base: Any = dataclasses.replace(self.base, sequence_exchange=exchange)
        seq = padded_seq(self.seq, degrees)
        if seq != self.seq and isinstance(base, LlamaConfig) and base.num_experts:
            raise ValueError(
                f"`seq` is {self.seq}, which cp {degrees[CP]} x tp {degrees[TP]} does not divide. Rows of a model with "
                f"experts are not padded, because the statistics of experts count every token. Pass a multiple of "
                f"{degrees[CP] * degrees[TP]}, such as {seq}."
            )
        base.check_mesh(tp=degrees[TP], seq=seq, cp=degrees.get(CP, 1))

    def _healthy(self) -> dict[str, int]:
        """Returns the degrees before devices failed, which must be given: the number of devices no longer tells."""
        asked = self.parallelism
        if asked.gtp is None and asked.tp is None:
            name = "failed_devices" if self.faults.failed_devices else "replica_batches"
            raise ValueError(
                f"`{name}` is {list(getattr(self.faults, name))}, which refers to replicas in a grid dp x gtp x tp, "
                "but neither --gtp nor --tp is given. Give the degrees that the run had with all its devices; a "
                "degree that is not given is 1."
            )
        return {"dp": asked.dp, "gtp": asked.gtp or 1, "tp": asked.tp or 1}

    def fault_plan(self, degrees: dict[str, int]) -> FaultPlan:
        """Returns the plan for continuing the run without its failed devices.

        Args:
            degrees: the degrees of the run before the failures.

        Raises:
            ValueError: for the same reasons as `plan_faults`, or if tokens are divided over cp or experts over ep.
        """
        for name in ("cp", "ep"):
            if (size := getattr(self.parallelism, name)) > 1:
                raise ValueError(
                    f"`{name}` is {size} and devices have failed, but replicas of unequal degree have no ranks to "
                    f"exchange tokens with. Remove --{name}."
                )
        return self.faults.plan(**degrees, batch=self.batch, microbatches=self.execution.microbatches)

    @property
    def base(self) -> ModelConfig:
        """The configuration of the model, without what depends on the text: the vocabulary size may.

        Raises:
            ValueError: if sizes and experts do not fit each other.
        """
        from ...models import preset_of

        return self.sizes.of(preset_of(self.preset or _PRESET), self.preset, self.experts)

    @property
    def title(self) -> str:
        """The name of the model in headings."""
        if self.model_ is not None:
            return self.model_
        if self.from_ is not None:
            return f"from {Path(self.from_).expanduser().absolute().name}"
        return " ".join([str(self.preset), *self.sizes.flags])

    def model(self, vocab_size: int, *, dtype: str) -> ModelConfig:
        """Returns the configuration of the model, with a larger vocabulary if the text needs it.

        Args:
            vocab_size: the number of different tokens. Unless the configuration gives the model's vocabulary size, it
                is at least this number rounded up to a multiple of 128, so that tp degrees divide it.
            dtype: the default compute dtype.
        """
        base = self.base
        if self.sizes.vocab_size is None:
            needed = -(-vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
            base = dataclasses.replace(base, vocab_size=max(needed, base.vocab_size))
        return dataclasses.replace(base, dtype=self.dtype or dtype, **self.execution.of_model)

    @property
    def peak_lr(self) -> float:
        """The peak learning rate."""
        if self.lr is not None:
            return self.lr
        usual = default_lr(self.base.hidden_size) if self.model_ is None else _LR
        return _LR_FACTORS[self.optimizer] * usual

    @property
    def schedule_by_name(self) -> str:
        """The name of the learning-rate schedule."""
        return self.schedule or ("constant" if self.optimizer == _SCHEDULE_FREE else "cosine")

    @property
    def warmup_steps(self) -> int:
        """The number of steps of linear warm-up."""
        return self.warmup if self.warmup is not None else min(200, self.steps // 10)

    def changes(self, before: TrainConfig) -> list[str]:
        """Returns the changes from an earlier configuration, except those of output settings, a phrase for each."""
        old_settings, new_settings = settings_of(before), settings_of(self)
        names = (field.name for field in knobs(self) if field.metadata["group"] != "output")
        pairs = ((name, old_settings[name], new_settings[name]) for name in names)
        return [f"{name} from {old} to {new}" for name, old, new in pairs if old != new]

    def save(self, path: Path) -> None:
        """Writes the configuration as JSON."""
        write_config(path, settings_of(self))

    @classmethod
    def load(cls, path: Path) -> TrainConfig:
        """Reads a configuration.

        Raises:
            ValueError: if the file is not one that `save` wrote.
        """
        settings = read_config(path)
        if (program := settings.get(PROGRAM)) is not None:
            raise ValueError(
                f"{path} is of a run of `gtp_jax.Trainer`, which only its program can continue: `run(resume=True)` in "
                f"{program}."
            )
        try:
            return from_settings(cls, settings)
        except (TypeError, AttributeError, ValueError) as error:
            raise not_of_a_run(path, error) from error
