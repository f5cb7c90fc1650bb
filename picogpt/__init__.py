"""GPT-2 in plain NumPy: text in, text out.

>>> from picogpt import load, generate
>>> encoder, hparams, params = load("tales")
>>> ids = encoder.encode("Once upon a time")
>>> text = encoder.decode(generate(ids, params, hparams["n_head"], n_tokens_to_generate=8))
"""

from .adapter import merge_adapter
from .backend import new_cache, to_backend
from .encoder import Encoder
from .errors import PicogptError
from .generation import generate, generate_batch, next_tokens, stream
from .loader import load, save
from .model import gpt2
from .pictures import AttentionView, attention_plot, attention_view, lens_plot
from .scoring import Score, lm_loss, score, token_logprobs
from .tracing import Trace, logit_lens, trace

__version__ = "0.1.0"
__all__ = [
    "AttentionView",
    "Encoder",
    "PicogptError",
    "Score",
    "Trace",
    "attention_plot",
    "attention_view",
    "generate",
    "generate_batch",
    "gpt2",
    "lens_plot",
    "lm_loss",
    "load",
    "logit_lens",
    "merge_adapter",
    "new_cache",
    "next_tokens",
    "save",
    "score",
    "stream",
    "to_backend",
    "token_logprobs",
    "trace",
]
