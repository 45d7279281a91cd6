"""Mixtures of experts: routes tokens, sends them to the ranks of their experts, and multiplies them there."""

from ._exchange import check_chunks as check_chunks
from ._grouped import GroupedDense as GroupedDense
from ._moe import ExpertParallel as ExpertParallel
from ._moe import MoE as MoE
from ._moe import check_loss_reduction as check_loss_reduction
from ._moe import check_moe as check_moe
from ._moe import routed_into as routed_into
from ._routing import AuxLossOf as AuxLossOf
from ._routing import Routing as Routing
from ._routing import Score as Score
from ._token_exchange import TokenExchange as TokenExchange
from ._token_exchange import exchanges as exchanges
from ._tokens import Journey as Journey
from ._tokens import combine as combine
from ._tokens import dispatch as dispatch
from ._tokens import gather_choices as gather_choices
from ._tokens import plan_journey as plan_journey
from ._traffic import Traffic as Traffic
from ._traffic import traffic_of_layer as traffic_of_layer
from ._transports import TRANSPORTS as TRANSPORTS
from ._transports import Transport as Transport
from ._transports import check_transport as check_transport
from ._transports import choose_transport as choose_transport
from ._transports import transport_within as transport_within
