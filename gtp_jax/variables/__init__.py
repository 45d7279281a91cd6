"""Takes NNX nodes apart, and provides variables that store a padded array but are read in their logical shape."""

from ._padded import Padded as Padded
from ._padded import PaddedParam as PaddedParam
from ._padded import RefuseLinen as RefuseLinen
from ._padded import even_layout as even_layout
from ._padded import logical_shape as logical_shape
from ._padded import make_padded as make_padded
from ._padded import padded_by_state as padded_by_state
from ._padded import padded_layout as padded_layout
from ._padded import refuse_optimizer as refuse_optimizer
from ._padded import store_even as store_even
from ._padded import warn_optimizer as warn_optimizer
from ._template import Leaf as Leaf
from ._template import Template as Template
from ._template import is_same as is_same
from ._template import is_variable as is_variable
from ._template import leaves_of as leaves_of
from ._template import raw_value as raw_value
from ._template import split_nodes as split_nodes
from ._template import with_raw_value as with_raw_value
