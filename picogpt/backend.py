"""Which array library an array belongs to, and how a cache is kept in its arrays.

The only module that knows there is more than one such library.
"""

import sys
from typing import Any


def array_module(x: Any) -> Any:
    """Returns the namespace of array `x`: numpy for NumPy's arrays, and so on for others.

    Never imports a library: an array exists, so its library is loaded already.
    """
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    return sys.modules[type(x).__module__.partition(".")[0]]


def new_cache(
    params: dict[str, Any], n_head: int, *, n_rows: int | None = None, n_ctx: int | None = None
) -> dict[str, Any]:
    """Returns an empty cache for `gpt2(..., cache=cache)`, with all its room from the start.

    The cache holds the keys and values of the tokens that `gpt2` has seen, so that the next call
    needs only the tokens that follow; `n_past` says how many it has seen. Each call changes it.

    Args:
        params: the parameter tree of `load`.
        n_head: number of attention heads, `hparams["n_head"]`.
        n_rows: for inputs [n_rows, n_seq]; None for inputs [n_seq].
        n_ctx: number of tokens to have room for; None for the model's window.

    >>> from picogpt import gpt2, load
    >>> _, hparams, params = load("tales")
    >>> cache = new_cache(params, hparams["n_head"])
    >>> for ids in ([72, 301, 64], [255], [1001]):
    ...     logits = gpt2(ids, **params, n_head=hparams["n_head"], cache=cache)
    >>> cache["n_past"], logits.shape
    (5, (1, 4096))
    """
    wte, (window, n_embd) = params["wte"], params["wpe"].shape
    room = window if n_ctx is None else n_ctx
    shape = (*([] if n_rows is None else [n_rows]), n_head, room, n_embd // n_head)
    zeros = array_module(wte).zeros
    layers = [{name: zeros(shape, wte.dtype) for name in "kv"} for _ in params["blocks"]]
    return {"n_past": 0, "blocks": layers}


def remember(past: tuple[dict[str, Any], int], k: Any, v: Any) -> tuple[Any, Any]:
    """Adds keys and values [..., n_q, d_head] to (one layer's cache, the number of tokens in it).

    Returns all that it holds by now.
    """
    layer, n_past = past
    n = n_past + k.shape[-2]
    layer["k"][..., n_past:n, :] = k
    layer["v"][..., n_past:n, :] = v
    return layer["k"][..., :n, :], layer["v"][..., :n, :]


def keep_rows(cache: dict[str, Any], rows: list[int]) -> None:
    """Drops the rows of a cache that are not listed; rows are in ascending order."""
    n = cache["n_past"]
    for past in cache["blocks"]:
        for name, array in past.items():
            array[: len(rows), :, :n] = array[rows, :, :n]
            past[name] = array[: len(rows)]
