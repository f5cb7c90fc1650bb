"""From logits to new tokens, one after the other."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from .encoder import check_ids
from .errors import PicogptError
from .model import gpt2


def generate(
    inputs: Iterable[int],
    params: dict[str, Any],
    n_head: int,
    n_tokens_to_generate: int,
    *,
    stop_ids: Iterable[int] = (),
) -> list[int]:
    """Returns the ids that the model finds most likely to follow, each given all before it.

    Args:
        inputs: ids of the prompt, at least one.
        params: the parameter tree of `load`.
        n_head: number of attention heads, `hparams["n_head"]`.
        n_tokens_to_generate: how many ids to return at most. The last one is never fed to the
            model, so the prompt and all but one of these must fit its window.
        stop_ids: ids that end the text; the one met is not returned.

    Raises:
        PicogptError: an id or a number is out of range, or the window is too short.

    >>> from picogpt import load
    >>> encoder, hparams, params = load("tales")
    >>> generate(encoder.encode("Once upon a time"), params, hparams["n_head"], 2)
    [...]
    """
    return list(stream(inputs, params, n_head, n_tokens_to_generate, stop_ids=stop_ids))


def stream(
    inputs: Iterable[int],
    params: dict[str, Any],
    n_head: int,
    n_tokens_to_generate: int,
    *,
    stop_ids: Iterable[int] = (),
) -> Iterator[int]:
    """Yields the ids that `generate` returns, each as soon as it is known.

    Raises:
        PicogptError: at once, not at the first id, for what is wrong with the arguments.
    """
    n_vocab, n_ctx = len(params["wte"]), len(params["wpe"])
    ids = check_ids(inputs, n_vocab)
    stops = set(check_ids(stop_ids, n_vocab))
    if not ids:
        raise PicogptError("inputs: no ids; expected one at least, such as the end-of-text id")
    if not isinstance(n_tokens_to_generate, int | np.integer) or n_tokens_to_generate < 0:
        found = f"n_tokens_to_generate: is {n_tokens_to_generate!r:.40}"
        raise PicogptError(f"{found}; expected a whole number, 0 or more")
    if n_tokens_to_generate and len(ids) + n_tokens_to_generate - 1 > n_ctx:
        raise PicogptError(
            f"prompt is {len(ids)} tokens and {n_tokens_to_generate} more are asked for; "
            f"the model's window of {n_ctx} leaves room for {max(0, n_ctx + 1 - len(ids))}"
        )
    return _decode(ids, params, n_head, n_tokens_to_generate, stops)


def _decode(
    ids: list[int], params: dict[str, Any], n_head: int, n_tokens: int, stops: set[int]
) -> Iterator[int]:
    for _ in range(n_tokens):
        token = _pick(gpt2(ids, **params, n_head=n_head)[-1])
        if token in stops:
            return
        yield token
        ids.append(token)


def _pick(logits: np.ndarray) -> int:
    """The id with the highest logit, the lowest id among equals."""
    token = int(logits.argmax())
    if np.isnan(logits[token]):
        raise PicogptError("logits: are not numbers (nan); the weights are damaged")
    return token
