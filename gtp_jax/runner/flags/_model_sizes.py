"""Sizes of a model, for command lines and settings files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ._expert_options import ROUTER, ExpertOptions
from ._knobs import check_knobs, flag_of, knob

if TYPE_CHECKING:
    from ...models import ModelConfig
    from ...ops import RopeScaling

_GROUP = "sizes"
_SCALING = "rope_scaling_"
_NO_SCALING = "none"
# Fields whose `None` is a 0 on command lines.
_NONE_AS_0 = ("window", "full_every", "window_rope_theta", "rotary_dim", "query_pre_attn_scalar", "swiglu_limit")
# Fields that an architecture leaves out if they have their default.
_LEFT_OUT = (
    *("num_experts", "qk_norm", "qkv_bias", "norm", "branch_norms", "activation", "scale_embedding", "out_bias"),
    *("sinks", "expert_biases", "swiglu_alpha", *_NONE_AS_0),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes that differ from the preset's; `None` keeps the preset's.

    Fields that begin with `rope_scaling_` are fields of `RopeScaling`; the others are fields of `LlamaConfig`.

    Raises:
        ValueError: if a value is out of range.
    """

    vocab_size: int | None = knob(
        None,
        _GROUP,
        "number of tokens in the vocabulary (default: the preset's, or more if the text has more)",
        metavar="N",
    )
    hidden_size: int | None = knob(None, _GROUP, "width of the residual stream", metavar="N")
    num_layers: int | None = knob(None, _GROUP, "blocks", metavar="N")
    num_heads: int | None = knob(None, _GROUP, "number of query heads", metavar="N")
    num_kv_heads: int | None = knob(None, _GROUP, "number of key-value heads", metavar="N")
    head_dim: int | None = knob(None, _GROUP, "width of a head", metavar="N")
    intermediate_size: int | None = knob(None, _GROUP, "hidden width of the MLP, or of each expert", metavar="N")
    num_experts: int | None = knob(
        None, _GROUP, "number of experts that replace each MLP; 0 for an MLP", least=0, metavar="N"
    )
    qk_norm: bool | None = knob(
        None, _GROUP, "normalize each head of queries and keys with RMSNorm, like Qwen3", kind=bool
    )
    qkv_bias: bool | None = knob(None, _GROUP, "add biases to queries, keys and values, like Qwen2", kind=bool)
    window: int | None = knob(
        None, _GROUP, "number of tokens that a token attends to, including itself; 0 for all", least=0, metavar="N"
    )
    full_every: int | None = knob(
        None, _GROUP, "every n-th layer has no window, like Gemma 3; 0 if all have one", least=0, metavar="N"
    )
    window_rope_theta: float | None = knob(
        None,
        _GROUP,
        "base of the rotary wavelengths of layers with a window, which are then not scaled; 0 for the others'",
        kind=float,
        metavar="BASE",
    )
    rotary_dim: int | None = knob(
        None, _GROUP, "leading dimensions of a head that are rotated, like Phi-3; 0 for all", least=0, metavar="N"
    )
    query_pre_attn_scalar: int | None = knob(
        None, _GROUP, "divide scores by the square root of this number; 0 for the width of a head", least=0, metavar="N"
    )
    norm: Literal["rms", "zero_centered_rms"] | None = knob(
        None,
        _GROUP,
        "RMSNorm that multiplies by its scale, or by 1 + scale, like Gemma",
        kind=str,
        choices=("rms", "zero_centered_rms"),
    )
    branch_norms: bool | None = knob(
        None, _GROUP, "normalize the outputs of attention and MLP too, like Gemma", kind=bool
    )
    activation: Literal["silu", "gelu_tanh"] | None = knob(
        None, _GROUP, "function of the MLP's gate", kind=str, choices=("silu", "gelu_tanh")
    )
    scale_embedding: bool | None = knob(
        None, _GROUP, "multiply embeddings by the square root of the width, like Gemma", kind=bool
    )
    out_bias: bool | None = knob(None, _GROUP, "add a bias to the output of attention, like gpt-oss", kind=bool)
    sinks: bool | None = knob(
        None, _GROUP, "add a learned logit without a value to the softmax of each head, like gpt-oss", kind=bool
    )
    expert_biases: bool | None = knob(None, _GROUP, "add biases to routers and experts, like gpt-oss", kind=bool)
    swiglu_limit: float | None = knob(
        None, _GROUP, "limit of the experts' gates, like gpt-oss; 0 for none", kind=float, metavar="X"
    )
    swiglu_alpha: float | None = knob(
        None, _GROUP, "slope in the sigmoid of the experts' gates with a limit", kind=float, above=0, metavar="X"
    )
    tie_embeddings: bool | None = knob(None, _GROUP, "share the embedding's table with the head", kind=bool)
    epsilon: float | None = knob(None, _GROUP, "epsilon that norms add to the mean square", kind=float, metavar="X")
    rope_theta: float | None = knob(None, _GROUP, "base of the rotary wavelengths", kind=float, above=0, metavar="BASE")
    rope_scaling_kind: Literal["none", "linear", "llama3", "yarn"] | None = knob(
        None,
        _GROUP,
        "how rotary frequencies are scaled: not at all, by a linear factor, as in Llama 3.1, or by YaRN",
        kind=str,
        choices=(_NO_SCALING, "linear", "llama3", "yarn"),
    )
    rope_scaling_factor: float | None = knob(
        None, _GROUP, "factor by which sequences may exceed the original length", kind=float, above=0, metavar="X"
    )
    rope_scaling_low_freq_factor: float | None = knob(
        None, _GROUP, "llama3: number of turns below which a frequency is divided", kind=float, above=0, metavar="X"
    )
    rope_scaling_high_freq_factor: float | None = knob(
        None, _GROUP, "llama3: number of turns above which a frequency is kept", kind=float, above=0, metavar="X"
    )
    rope_scaling_original_length: int | None = knob(
        None, _GROUP, "llama3 and yarn: number of positions that the model was first trained on", metavar="N"
    )
    rope_scaling_beta_fast: float | None = knob(
        None, _GROUP, "yarn: number of turns above which a frequency is kept", kind=float, above=0, metavar="X"
    )
    rope_scaling_beta_slow: float | None = knob(
        None, _GROUP, "yarn: number of turns below which a frequency is divided", kind=float, above=0, metavar="X"
    )
    rope_scaling_truncate: bool | None = knob(
        None, _GROUP, "yarn: round the ends of the interpolated range to whole frequencies", kind=bool
    )
    rope_scaling_attention_factor: float | None = knob(
        None,
        _GROUP,
        "yarn: the number by which queries and keys are multiplied (default: computed from the factor)",
        kind=float,
        above=0,
        metavar="X",
    )

    def __post_init__(self) -> None:
        check_knobs(self)

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not `None`."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags that give these sizes."""
        fields = {field.name: flag_of(field) for field in dataclasses.fields(self)}
        return tuple(
            f"--{'' if value else 'no-'}{fields[name][2:]}" if isinstance(value, bool) else f"{fields[name]}={value}"
            for name, value in self.given.items()
        )

    def of(self, config: ModelConfig, preset: str | None, experts: ExpertOptions) -> ModelConfig:
        """Returns a configuration with these sizes and experts.

        Args:
            config: the configuration that provides the sizes that are not given.
            preset: the name of the preset of `config`, for messages; `None` if there is none.
            experts: the options of experts that differ from those of `config`.

        Raises:
            ValueError: if the sizes do not fit together, or options of experts are given for a model without experts.
        """
        from ...models import LlamaConfig

        given = self.given
        try:
            scaling = {name: given.pop(name) for name in list(given) if name.startswith(_SCALING)}
            if scaling:
                assert isinstance(config, LlamaConfig)
                given["rope_scaling"] = _scaling(config.rope_scaling, scaling)
            given |= {name: None for name in _NONE_AS_0 if given.get(name) == 0}
            return experts.of(config, preset, **given)
        except ValueError as error:
            if not self.given or preset is None:
                raise
            raise ValueError(f"{error} Sizes that are not given come from the preset {preset!r}.") from error


def _scaling(before: RopeScaling | None, given: Mapping[str, Any]) -> RopeScaling | None:
    """Returns a scaling with the given fields replaced.

    Raises:
        ValueError: if fields are given although frequencies are not scaled, or a new kind has no factor.
    """
    from ...ops import RopeScaling

    fields = {name.removeprefix(_SCALING): value for name, value in given.items()}
    kind = fields.pop("kind", None if before is None else before.kind)
    if kind is None or kind == _NO_SCALING:
        if fields:
            name, value = next((name, given[name]) for name in given if name != f"{_SCALING}kind")
            raise ValueError(
                f"`{name}` is {value}, but rotary frequencies are not scaled. Give --rope-scaling-kind linear, "
                "llama3 or yarn, or leave it out."
            )
        return None
    if before is not None and before.kind == kind:
        return dataclasses.replace(before, **fields)
    if "factor" not in fields:
        raise ValueError(f"`rope_scaling_kind` is {kind!r}, which needs a factor. Give --rope-scaling-factor too.")
    return RopeScaling(kind=kind, **fields)


def sizes_of(config: ModelConfig) -> dict[str, Any]:
    """Returns a model's sizes and experts, as fields of `ModelSizes` and `ExpertOptions`.

    Leaves out what is not part of the architecture because it only determines how the model is trained.
    """
    from ...models import OF_ROUTING, LlamaConfig

    assert isinstance(config, LlamaConfig)
    fields = config.architecture()
    fields.pop("routing", None)
    fields.pop("rope_scaling", None)
    scaling = {"kind": _NO_SCALING} if config.rope_scaling is None else dataclasses.asdict(config.rope_scaling)
    usual = {name: 0 if name in _NONE_AS_0 else getattr(LlamaConfig, name) for name in _LEFT_OUT}
    found = {**usual, **fields, **{f"{_SCALING}{k}": v for k, v in scaling.items()}}
    if config.num_experts:
        found["shared_hidden"] = config.shared_hidden
        found |= {f"{ROUTER}{name}": getattr(config.routing, name) for name in OF_ROUTING}
        if config.routing.bias_rate is not None:
            found[f"{ROUTER}bias_rate"] = 0.0  # means that there is a bias; its rate only matters in training
    return found
