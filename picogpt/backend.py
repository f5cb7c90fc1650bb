"""Which array library an array belongs to, a cache in its arrays, and moving to another library.

The only module that knows that there are others than NumPy: CuPy, whose arrays lie on a GPU, and
JAX, whose arrays never change and whose functions can be compiled and differentiated. A caller who
has an array of theirs has imported them; nothing else here does, but for `to_backend`.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import PicogptError

BACKENDS = ("numpy", "cupy", "jax")
ERF = [-0.046107755, 0.2228206151, -0.3642683122, 0.1461051306, 0.055413532]
ERF += [0.1733404122, 0.2486844971, 0.2819147514, 0.2820971246]


def array_module(*arrays: Any) -> Any:
    """Returns the namespace of arrays: numpy for NumPy's, jax.numpy for JAX's, and so on.

    Numbers, lists, None and NumPy's integers (such as ids) go with any library.

    Raises:
        TypeError: the arrays are of several libraries, or there is none.

    >>> import numpy
    >>> array_module(numpy.zeros(3), None, 2.0) is numpy
    True
    """
    found: dict[str, Any] = {}
    for x in arrays:
        if hasattr(x, "__array_namespace__"):
            module = x.__array_namespace__()
        elif hasattr(x, "shape"):  # CuPy's have no such method
            module = sys.modules[type(x).__module__.partition(".")[0]]
        else:
            continue
        if module is not np or x.dtype.kind not in "iu":
            found[module.__name__] = module
    if len(found) > 1:
        names = ", ".join(sorted(found))
        raise TypeError(f"arrays of several libraries: {names}; move them with to_backend")
    if not found and not any(isinstance(x, np.ndarray | np.generic) for x in arrays):
        raise TypeError(f"no array: {', '.join(type(x).__name__ for x in arrays)}")
    return next(iter(found.values()), np)


def to_backend(params: Any, name: str) -> Any:
    """Returns a copy of a parameter tree, or of any dicts and lists of arrays, in another library.

    Numbers such as `eps` stay as they are, and so do types, shapes and the order of keys. Nothing
    of the old arrays is shared with the new.

    Args:
        params: the tree, in any of the three libraries.
        name: "numpy", "cupy" (a GPU) or "jax".

    Raises:
        PicogptError: there is no such library, it is not installed, or finds no GPU.

    >>> from picogpt import load, to_backend
    >>> params = to_backend(load("tales").params, "numpy")
    >>> params["wte"].flags.owndata  # no longer mapped from the file
    True
    """
    if name not in BACKENDS:
        raise PicogptError(f"backend: is {name!r:.40}; expected {', '.join(BACKENDS)}")
    try:
        library = importlib.import_module(name)
    except ImportError:
        package = {"cupy": "cupy-cuda12x"}.get(name, name)
        raise PicogptError(f'{name}: is not installed; run "pip install {package}"') from None
    if name == "cupy":
        try:
            library.cuda.runtime.getDeviceCount()
        except library.cuda.runtime.CUDARuntimeError as error:
            raise PicogptError(f"cupy: finds no GPU ({error}); use another backend") from None
    xp = library.numpy if name == "jax" else library

    def move(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: move(value) for key, value in x.items()}
        if isinstance(x, list | tuple):
            return [move(value) for value in x]
        if not hasattr(x, "shape"):
            return x
        copy = np.array(to_numpy(x))  # a library may go on reading it after the call has returned
        y = copy if xp is np else xp.asarray(copy)
        if y.dtype != x.dtype:
            raise PicogptError(f"{name}: makes {y.dtype} of {x.dtype}; set jax_enable_x64 before")
        return y

    return move(params)


def to_numpy(x: Any) -> np.ndarray:
    """Returns an array of any library as NumPy's; the one place where it is fetched from a GPU."""
    return np.asarray(x.get() if hasattr(x, "get") else x)


def erf(x: Any) -> Any:
    """The error function, 2 / sqrt(pi) times the integral of exp(-t**2) from 0 to x.

    NumPy has none. Here it is 1 - t * p(t) * exp(-x**2) for x from 0 on, with t = 1 / (1 + x / 2)
    and a polynomial p fitted to it; off by 4e-9 at most, and in float32 by its rounding.

    >>> import numpy
    >>> erf(numpy.array([-1.0, 0.0, 0.5])).round(6)
    array([-0.842701,  0.      ,  0.5205  ])
    """
    xp = array_module(x)
    if xp is not np:
        library = "jax" if is_compiled(x) else "cupyx"
        return importlib.import_module(f"{library}.scipy.special").erf(x)
    t = 1.0 / (1.0 + 0.5 * abs(x))
    y = ERF[0] * t
    for coefficient in ERF[1:]:
        y += coefficient
        y *= t
    y *= np.exp(-x * x)
    return np.copysign(1.0 - y, x)


def is_compiled(x: Any) -> bool:
    """Whether functions on such arrays are compiled for each new shape, as JAX's are."""
    return bool(array_module(x).__name__ == "jax.numpy")


def compiled(function: Callable[..., Any], x: Any) -> Callable[..., Any]:
    """Returns the function as it is best run on arrays such as x.

    Its arguments `n_head` and `last` are constants, `cache` is used up.
    """
    return _jit(function) if is_compiled(x) else function


@functools.cache
def _jit(function: Callable[..., Any]) -> Callable[..., Any]:
    jax = sys.modules["jax"]
    made: Callable[..., Any] = jax.jit(
        function, static_argnames=("n_head", "last"), donate_argnames="cache"
    )
    return made


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

    >>> from picogpt import gpt2, load, new_cache
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


def span(cache: dict[str, Any] | None, n_q: int) -> tuple[Any, int]:
    """Returns how many tokens are in a cache, and how many keys there will be with n_q more.

    Where functions are compiled these are all that it has room for, so that no shape changes; those
    to come are hidden as all later keys are.
    """
    if not cache:
        return 0, n_q
    n_past, k = cache["n_past"], cache["blocks"][0]["k"]
    return n_past, k.shape[-2] if is_compiled(k) else n_past + n_q


def remember(past: tuple[dict[str, Any], Any], k: Any, v: Any) -> tuple[Any, Any]:
    """Adds keys and values [..., n_q, d_head] to (one layer's cache, the number of tokens in it).

    Returns as many as `span` says.
    """
    layer, n_past = past
    array_module(layer["k"], k)  # are they of one library?
    if is_compiled(k):
        start = (*[0] * (k.ndim - 2), n_past, 0)
        update = sys.modules["jax"].lax.dynamic_update_slice
        layer["k"], layer["v"] = update(layer["k"], k, start), update(layer["v"], v, start)
        return layer["k"], layer["v"]
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
