"""Llama, and Mixtral, which has experts instead of the MLP."""

from ._config import OF_ROUTING as OF_ROUTING
from ._config import LlamaConfig as LlamaConfig
from ._family import LLAMA as LLAMA
from ._model import Llama as Llama
from ._model import LlamaBlock as LlamaBlock
from ._model import next_token_loss as next_token_loss
