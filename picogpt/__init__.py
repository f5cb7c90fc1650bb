"""GPT-2 in plain NumPy: text in, text out.

>>> from picogpt import load, generate
>>> encoder, hparams, params = load("tales")
>>> ids = encoder.encode("Once upon a time")
>>> text = encoder.decode(generate(ids, params, hparams["n_head"], n_tokens_to_generate=8))
"""

from .backend import new_cache
from .encoder import Encoder
from .errors import PicogptError
from .generation import generate, generate_batch, stream
from .loader import load, save
from .model import gpt2

__version__ = "0.1.0"
__all__ = [
    "Encoder",
    "PicogptError",
    "generate",
    "generate_batch",
    "gpt2",
    "load",
    "new_cache",
    "save",
    "stream",
]
