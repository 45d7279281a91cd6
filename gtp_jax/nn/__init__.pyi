# see [Note: names above] in ../_names_above.py
from ..experts import AuxLossOf as AuxLossOf
from ..experts import ExpertParallel as ExpertParallel
from ..experts import GroupedDense as GroupedDense
from ..experts import MoE as MoE
from ..experts import Routing as Routing
from ..experts import Score as Score
from ..inspect import AttentionFact as AttentionFact
from ..inspect import Explanation as Explanation
from ..inspect import WireFact as WireFact
from ..inspect import explain as explain
from ._public import *  # noqa: F403
