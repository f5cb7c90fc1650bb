"""What the forward pass computes on its way: activations, attention, each layer's guess.

There is no second forward pass: `trace` looks on while `gpt2` runs, through its argument `tap`.
Sources: nostalgebraist, "interpreting GPT: the logit lens" (2020).
"""

import fnmatch
import html
from collections.abc import Iterable
from typing import Any

import numpy as np

from .backend import to_numpy
from .errors import PicogptError
from .generation import check_finite, check_head, window_ids
from .model import gpt2, layer_norm, linear, softmax


class Trace(dict[str, Any]):
    """Arrays by their names, in the order in which they were computed.

    >>> from picogpt import load, trace
    >>> encoder, hparams, params = load("tales")
    >>> traced = trace(encoder.encode("Once upon a time"), params, hparams["n_head"])
    >>> len(traced), traced["h5.attn.weights"].shape
    (39, (8, 4, 4))
    """

    def _rows(self) -> list[tuple[str, str, str]]:
        return [(name, str(list(x.shape)), str(x.dtype)) for name, x in self.items()]

    def __repr__(self) -> str:
        """A line for each: its name, shape and type."""
        return "\n".join(f"{name:18} {shape:18} {dtype}" for name, shape, dtype in self._rows())

    def _repr_html_(self) -> str:
        """The same as a table, for notebooks."""
        rows = (map(html.escape, row) for row in [("name", "shape", "dtype"), *self._rows()])
        cells = ("".join(f"<td>{text}</td>" for text in row) for row in rows)
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def trace(inputs: Iterable[int], params: dict[str, Any], n_head: int, *, keep: str = "*") -> Trace:
    """Runs the model once and returns what it computes on the way.

    Args:
        inputs: ids, at least one, at most n_ctx.
        params: the parameter tree of `load`.
        n_head: number of attention heads, `hparams["n_head"]`.
        keep: names to keep, with * and ? and [seq] as in file names. All of them can take much
            memory: the attention of a full window of 124M has 600 MB.

    Returns:
        A mapping; for each layer, h0 and so on: h0.attn.weights [n_head, n_seq, n_seq],
        h0.attn.heads [n_head, n_seq, d_head], h0.attn.out [n_seq, n_embd], h0.mlp.act
        [n_seq, 4 * n_embd], h0.mlp.out and h0.out [n_seq, n_embd]; before them embed, after them
        ln_f [n_seq, n_embd] and logits [n_seq, n_vocab].

    Raises:
        PicogptError: ids do not fit the model, or `keep` matches no name.

    >>> from picogpt import load, trace
    >>> encoder, hparams, params = load("tales")
    >>> trace(encoder.encode("Once upon a time"), params, hparams["n_head"], keep="h5.*")
    h5.attn.weights    [8, 4, 4]          float32
    h5.attn.heads      [8, 4, 32]         float32
    h5.attn.out        [4, 256]           float32
    h5.mlp.act         [4, 1024]          float32
    h5.mlp.out         [4, 256]           float32
    h5.out             [4, 256]           float32
    """
    kept = Trace()

    def tap(name: str, x: Any) -> Any:
        if fnmatch.fnmatchcase(name, keep):
            kept[name] = x
        return x

    gpt2(window_ids(inputs, params), **params, n_head=check_head(params, n_head), tap=tap)
    if not kept:
        raise PicogptError(f"keep: no name matches {keep!r}; names are h0.attn.weights and so on")
    return kept


def logit_lens(
    inputs: Iterable[int], params: dict[str, Any], n_head: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what each layer would say next, if it were the last.

    Its residual stream is led through ln_f and the output head, as that of the last layer is.

    Args:
        inputs, params, n_head: as for `trace`.

    Returns:
        The likeliest id after each position [n_layer + 1, n_seq], of the embedding first; and its
        probability, in the same shape.

    Raises:
        PicogptError: ids do not fit the model.

    >>> from picogpt import load, logit_lens
    >>> encoder, hparams, params = load("tales")
    >>> ids, _ = logit_lens(encoder.encode("Once upon a"), params, hparams["n_head"])
    >>> [encoder.decode([token]) for token in ids[:, -1]]
    [' a', ' great', ' time', ' time', ' time', ' time', ' time']
    """
    head = params["wte"] if params.get("lm_head") is None else params["lm_head"]
    best, likely = [], []

    def tap(name: str, x: Any) -> Any:
        if name == "embed" or (name.endswith(".out") and name.count(".") == 1):
            logits = linear(layer_norm(x, **params["ln_f"]), head.T)
            best.append(logits.argmax(-1))
            likely.append(softmax(logits).max(-1))
        return x

    n_head = check_head(params, n_head)
    gpt2(window_ids(inputs, params), **params, n_head=n_head, last=True, tap=tap)
    probabilities = check_finite(np.stack([to_numpy(x) for x in likely]))
    return np.stack([to_numpy(x) for x in best]), probabilities
