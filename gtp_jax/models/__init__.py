"""Reference models."""

from ._llama import Llama as Llama
from ._llama import LlamaBlock as LlamaBlock
from ._llama import LlamaConfig as LlamaConfig
from ._llama import next_token_loss as next_token_loss
from ._presets import PRESETS as PRESETS
