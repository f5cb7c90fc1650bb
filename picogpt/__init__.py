"""GPT-2 in plain NumPy: text in, text out.

Models: `load` reads one, `save` writes one, `merge_adapter` adds a LoRA adapter, and `to_backend`
moves the parameters to another array library. `Encoder` turns text into token ids and back.

Texts: `generate` continues one, `stream` does so id by id, `generate_batch` several side by side.

The forward pass: `gpt2`, with `new_cache` to run it step by step; `lm_loss` is for training.

What the model expects: `next_tokens`, `token_logprobs`, and `score`, which gives a `Score`.

Looking inside: `trace` gives a `Trace`, `logit_lens` what each layer would say; `attention_plot`
and `lens_plot` draw pictures, `attention_view` makes a page, an `AttentionView`.

Mistakes in what a user gives, and bad files, raise `PicogptError`. Only `gpt2` and the functions of
`picogpt.model` trust their arguments, to stay short: there NumPy says what it cannot do.

>>> from picogpt import generate, load
>>> encoder, hparams, params = load("tales")
>>> ids = encoder.encode("Once upon a time")
>>> encoder.decode(generate(ids, params, hparams["n_head"], n_tokens_to_generate=8))
' there was a great many children, and'
"""

from .adapter import merge_adapter
from .backend import new_cache, to_backend
from .encoder import Encoder
from .errors import PicogptError
from .generation import generate, generate_batch, next_tokens, stream
from .loader import load
from .model import gpt2
from .pictures import AttentionView, attention_plot, attention_view, lens_plot
from .saving import save
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
