"""Variables that store a padded array, but are read and set in their logical shape."""

from ._padded import Padded as Padded
from ._padded import PaddedParam as PaddedParam
from ._padded import RefuseLinen as RefuseLinen
from ._padded import logical_shape as logical_shape
from ._padded import make_padded as make_padded
from ._padded import padded_layout as padded_layout
from ._padded import refuse_optimizer as refuse_optimizer
