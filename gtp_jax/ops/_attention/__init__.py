"""Dot-product attention: of whole sequences, of packed documents, of parts of the keys, and in FP8."""

from ._attention import attention as attention
from ._blocks import MOST_MASKED as MOST_MASKED
from ._blocks import MOST_SCORES as MOST_SCORES
from ._checks import check_choices as check_choices
from ._checks import check_mask as check_mask
from ._cudnn import cudnn_lacks as cudnn_lacks
from ._fp8 import attention_fp8 as attention_fp8
from ._fp8 import attention_fp8_lacks as attention_fp8_lacks
from ._packed import packed_lacks as packed_lacks
from ._parts import attention_backward as attention_backward
from ._parts import attention_with_lse as attention_with_lse
