"""Defines what a family of models consists of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import jax
from flax import nnx

from ._hf_tensor import Tensor


class ModelConfig(Protocol):
    """The configuration of a model, a frozen dataclass, as trainer, inspection and conversion use it."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def vocab_size(self) -> int:
        """The number of tokens in the vocabulary."""
        ...

    @property
    def hidden_size(self) -> int:
        """The width of the residual stream."""
        ...

    @property
    def num_layers(self) -> int:
        """The number of blocks."""
        ...

    @property
    def num_heads(self) -> int:
        """The number of query heads."""
        ...

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        ...

    @property
    def dtype(self) -> str:
        """The name of the compute dtype."""
        ...

    @property
    def loss_chunk(self) -> int:
        """The fewest tokens whose logits the loss computes at once; 0 for the logits of all tokens."""
        ...

    def check_mesh(self, *, tp: int, seq: int, cp: int = 1) -> None:
        """Raises a ValueError if the model and its sequences cannot be divided over tp."""
        ...

    def architecture(self) -> dict[str, Any]:
        """Returns the fields that determine which model the weights belong to, for checkpoints."""
        ...

    def matmul_params(self) -> int:
        """Returns the number of parameters that each token is multiplied with."""
        ...

    def param_count(self) -> int:
        """Returns the number of all parameters."""
        ...


@dataclasses.dataclass(frozen=True)
class HuggingFace:
    """A layout in which a family's models are stored in Hugging Face's files.

    Attributes:
        model_type: the `model_type` in config.json.
        architecture: the entry of `architectures` in config.json.
        tensors: returns a model's tensors, layer after layer.
        copies: returns the tensors that files may hold in addition, with the tensor that each of them must equal.
        to_json: returns the fields of config.json that the model determines.
        from_json: returns the configuration of a config.json; the second argument names the file in messages.
        fits: returns whether a model can be stored in this layout.
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
        name: the name in messages and checkpoints.
        config: the class of its configurations.
        model: builds a model from `(config, rngs=)`.
        block: builds one layer from `(config, rngs=)`, for measurements.
        loss: returns the weighted sum of token losses and the sum of the weights from `(model, batch)`.
        presets: configurations by name.
        hugging_face: the layouts in which Hugging Face stores its models; several, one or none may fit a model.
    """

    name: str
    config: type[Any]
    model: Callable[..., nnx.Module]
    block: Callable[..., nnx.Module]
    loss: Callable[[Any, Mapping[str, jax.Array]], tuple[jax.Array, jax.Array]]
    presets: Mapping[str, Any]
    hugging_face: tuple[HuggingFace, ...]
