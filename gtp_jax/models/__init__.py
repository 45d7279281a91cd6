"""Reference models."""

from ._presets import preset_of as preset_of
from .llama import PRESETS as PRESETS
from .llama import Llama as Llama
from .llama import LlamaBlock as LlamaBlock
from .llama import LlamaConfig as LlamaConfig
from .llama import next_token_loss as next_token_loss
