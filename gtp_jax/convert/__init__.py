"""Llamas from and to Hugging Face's files, a tensor in memory at a time."""

from .._words import EXPORT_DTYPES as EXPORT_DTYPES
from ._converted import Converted as Converted
from ._export import export_llama as export_llama
from ._import import import_llama as import_llama
from ._merge import Merged as Merged
from ._merge import merge_adapters as merge_adapters
from ._peft import Exported as Exported
from ._peft import export_peft as export_peft
