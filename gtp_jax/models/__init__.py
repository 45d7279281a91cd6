"""Reference models, a folder a family."""

from ._families import FAMILIES as FAMILIES
from ._families import PRESETS as PRESETS
from ._families import build as build
from ._families import family_of as family_of
from ._families import preset_of as preset_of
from ._families import saved as saved
from ._families import saved_config as saved_config
from ._family import Family as Family
from ._family import HuggingFace as HuggingFace
from ._family import ModelConfig as ModelConfig
from ._tensor import Tensor as Tensor
from ._tensor import array_shapes as array_shapes
from .llama import Llama as Llama
from .llama import LlamaBlock as LlamaBlock
from .llama import LlamaConfig as LlamaConfig
from .llama import next_token_loss as next_token_loss
