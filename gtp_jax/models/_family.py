"""A family of models: its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import jax
from flax import nnx

from ._hf_tensor import Tensor


class ModelConfig(Protocol):
    """Sizes and choices of a model, a frozen dataclass, as far as trainer, inspection and conversion know them."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads."""
        ...

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        ...

    @property
    def dtype(self) -> str:
        """Compute dtype, by name."""
        ...

    def check_mesh(self, *, tp: int, seq: int) -> None:
        """Raises ValueError if the model and its sequences cannot be divided over tp."""
        ...

    def architecture(self) -> dict[str, Any]:
        """Returns the fields that say which model the weights are of, for checkpoints."""
        ...

    def matmul_params(self) -> int:
        """Parameters that a token is multiplied with."""
        ...

    def param_count(self) -> int:
        """Returns all parameters."""
        ...


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """How a family's models are stored in Hugging Face's files.

    Attributes:
        model_type: of config.json.
        architecture: likewise.
        tensors: a model's tensors, in the order in which Hugging Face writes them.
        copies: tensors that files may hold in addition, and the tensor that each of them has to equal.
        to_json: the fields of config.json that the model decides.
        from_json: the model of a config.json; the second argument names the file in messages.
        fits: whether a model can be stored so.
    """

    model_type: str
    architecture: str
    tensors: Callable[[Any], list[Tensor]]
    copies: Callable[[Any], dict[str, str]]
    to_json: Callable[[Any], dict[str, Any]]
    from_json: Callable[[dict[str, Any], str], ModelConfig]
    fits: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: as messages and checkpoints have it.
        config: class of its configurations.
        model: `(config, rngs=)` to the module.
        block: `(config, rngs=)` to one layer, for measurements.
        loss: `(model, batch)` to the sum of token losses and the number of tokens.
        presets: sizes by name.
        hugging_face: the ways in which Hugging Face stores its models, of which one or none fits a model.
    """

    name: str
    config: type[Any]
    model: Callable[..., nnx.Module]
    block: Callable[..., nnx.Module]
    loss: Callable[[Any, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]
    presets: Mapping[str, Any]
    hugging_face: tuple[HuggingFace, ...]
