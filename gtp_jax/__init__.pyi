# see [Note: names above] in _names_above.py
from ._public import *  # noqa: F403
from .inspect import explain as explain

__version__: str
