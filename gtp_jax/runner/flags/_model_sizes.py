"""Sizes of a model, as command lines and files of settings have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from ...models import OF_ROUTING, LlamaConfig, ModelConfig
from ...ops import RopeScaling
from ._expert_options import ROUTER, ExpertOptions
from ._knobs import check_knobs, flag_of, knob

_GROUP = "sizes"
_SCALING = "rope_scaling_"
_NO_SCALING = "none"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes that differ from the preset's; `None` leaves one as it is there. Fields that begin with `rope_scaling_` are
    those of `RopeScaling`, the others those of `LlamaConfig`.

    Raises:
        ValueError: if a value is out of range.
    """

    vocab_size: int | None = knob(
        None,
        _GROUP,
        "tokens that the model knows (default: the preset's, or more if the text has more)",
        metavar="N",
    )
    hidden_size: int | None = knob(None, _GROUP, "width of the residual stream", metavar="N")
    num_layers: int | None = knob(None, _GROUP, "blocks", metavar="N")
    num_heads: int | None = knob(None, _GROUP, "query heads", metavar="N")
    num_kv_heads: int | None = knob(None, _GROUP, "key-value heads", metavar="N")
    head_dim: int | None = knob(None, _GROUP, "width of a head", metavar="N")
    intermediate_size: int | None = knob(None, _GROUP, "hidden width of the MLP, or of each expert", metavar="N")
    num_experts: int | None = knob(None, _GROUP, "experts in place of each MLP; 0 for an MLP", least=0, metavar="N")
    qk_norm: bool | None = knob(
        None, _GROUP, "normalise each head of queries and keys by RMSNorm, as Qwen3 does", kind=bool
    )
    qkv_bias: bool | None = knob(None, _GROUP, "add biases to queries, keys and values, as Qwen2 does", kind=bool)
    window: int | None = knob(
        None, _GROUP, "tokens that a token attends to, itself included; 0 for all before it", least=0, metavar="N"
    )
    tie_embeddings: bool | None = knob(None, _GROUP, "let the head use the embedding's table", kind=bool)
    epsilon: float | None = knob(None, _GROUP, "what norms add to the mean square", kind=float, metavar="X")
    rope_theta: float | None = knob(None, _GROUP, "base of the rotary wavelengths", kind=float, above=0, metavar="BASE")
    rope_scaling_kind: Literal["none", "linear", "llama3", "yarn"] | None = knob(
        None,
        _GROUP,
        "how rotary frequencies are scaled: by a linear factor, as in Llama 3.1, or by YaRN",
        kind=str,
        choices=(_NO_SCALING, "linear", "llama3", "yarn"),
    )
    rope_scaling_factor: float | None = knob(
        None, _GROUP, "how many times longer sequences may become", kind=float, above=0, metavar="X"
    )
    rope_scaling_low_freq_factor: float | None = knob(
        None, _GROUP, "of llama3: turns below which a frequency is divided", kind=float, above=0, metavar="X"
    )
    rope_scaling_high_freq_factor: float | None = knob(
        None, _GROUP, "of llama3: turns above which a frequency is kept", kind=float, above=0, metavar="X"
    )
    rope_scaling_original_length: int | None = knob(
        None, _GROUP, "of llama3 and yarn: positions that the model was trained on before", metavar="N"
    )
    rope_scaling_beta_fast: float | None = knob(
        None, _GROUP, "of yarn: turns above which a frequency is kept", kind=float, above=0, metavar="X"
    )
    rope_scaling_beta_slow: float | None = knob(
        None, _GROUP, "of yarn: turns below which a frequency is divided", kind=float, above=0, metavar="X"
    )
    rope_scaling_truncate: bool | None = knob(
        None, _GROUP, "of yarn: interpolate between whole numbers of frequencies", kind=bool
    )
    rope_scaling_attention_factor: float | None = knob(
        None,
        _GROUP,
        "of yarn: what queries and keys are multiplied by (default: from the factor)",
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
        """The flags that say the same."""
        fields = {field.name: flag_of(field) for field in dataclasses.fields(self)}
        return tuple(
            f"--{'' if value else 'no-'}{fields[name][2:]}" if isinstance(value, bool) else f"{fields[name]}={value}"
            for name, value in self.given.items()
        )

    def of(self, config: ModelConfig, preset: str | None, experts: ExpertOptions) -> ModelConfig:
        """Returns a configuration with these sizes and experts.

        Args:
            config: what the sizes that are not given are taken from.
            preset: its name, for messages; `None` if it is of no preset.
            experts: how they differ from the configuration's.

        Raises:
            ValueError: if the sizes do not fit one another, or there are no experts that options are given for.
        """
        given = self.given
        try:
            scaling = {name: given.pop(name) for name in list(given) if name.startswith(_SCALING)}
            if scaling:
                assert isinstance(config, LlamaConfig)
                given["rope_scaling"] = _scaling(config.rope_scaling, scaling)
            if given.get("window") == 0:
                given["window"] = None
            return experts.of(config, preset, **given)
        except ValueError as error:
            if not self.given or preset is None:
                raise
            raise ValueError(f"{error} Sizes that are not given are those of the preset {preset!r}.") from error


def _scaling(before: RopeScaling | None, given: Mapping[str, Any]) -> RopeScaling | None:
    """Returns a scaling in which given fields are replaced.

    Raises:
        ValueError: if fields are given of a scaling that there is not.
    """
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
    """Returns the sizes and the experts of a model as the fields of `ModelSizes` and `ExpertOptions` that say the same.

    What is not in a model's architecture, because it says how the model is trained, is left out.
    """
    assert isinstance(config, LlamaConfig)
    fields = config.architecture()
    fields.pop("routing", None)
    fields.pop("rope_scaling", None)
    scaling = {"kind": _NO_SCALING} if config.rope_scaling is None else dataclasses.asdict(config.rope_scaling)
    usual = {"num_experts": 0, "qk_norm": False, "qkv_bias": False, "window": 0}
    found = {**usual, **fields, **{f"{_SCALING}{k}": v for k, v in scaling.items()}}
    if config.num_experts:
        found["shared_hidden"] = config.shared_hidden
        found |= {f"{ROUTER}{name}": getattr(config.routing, name) for name in OF_ROUTING}
        if config.routing.bias_rate is not None:
            found[f"{ROUTER}bias_rate"] = 0.0  # that there is a bias; its rate is one of training
    return found
