"""Text in, batches of tokens out. A batch depends only on the text, the seed and the step."""

from ._corpus import Corpus as Corpus
from ._corpus import Evaluated as Evaluated
from ._corpus import load_corpus as load_corpus
from ._corpus import load_evaluated as load_evaluated
from ._loader import Loader as Loader
from ._loader import ahead as ahead
from ._stats import bits_per_byte as bits_per_byte
from ._stats import unigram_entropy as unigram_entropy
from ._stream import TextStream as TextStream
from ._text import Text as Text
from ._text import read_text as read_text
from ._text import standard_library as standard_library
from ._tokens import BYTES as BYTES
from ._tokens import Tokenizer as Tokenizer
from ._tokens import load_tokenizer as load_tokenizer
from ._tokens import read_tokenizer as read_tokenizer
from ._tokens import same_tokenizer as same_tokenizer
from ._windows import Windows as Windows
