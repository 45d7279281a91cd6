"""Llamas from and to Hugging Face's files, a tensor in memory at a time."""

from ._converted import Converted as Converted
from ._encoding import EXPORT_DTYPES as EXPORT_DTYPES
from ._export import export_llama as export_llama
from ._import import import_llama as import_llama
