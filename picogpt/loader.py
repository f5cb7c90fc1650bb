"""How a checkpoint becomes the parameter tree.

`params` is a nested dict whose keys are the arguments of the functions in `model.py`. All arrays
are float32:

    wte [n_vocab, n_embd]               token embeddings, and the output head
    wpe [n_ctx, n_embd]                 position embeddings
    blocks, a list of n_layer dicts
        ln_1    g, b [n_embd]
        attn    c_attn  w [n_embd, 3 * n_embd], b [3 * n_embd]      queries, keys, values
                c_proj  w [n_embd, n_embd],     b [n_embd]
        ln_2    g, b [n_embd]
        mlp     c_fc    w [n_embd, 4 * n_embd], b [4 * n_embd]
                c_proj  w [4 * n_embd, n_embd], b [n_embd]
    ln_f    g, b [n_embd]

and only where a checkpoint has them: lm_head [n_vocab, n_embd], an output head of its own; eps, a
number beside g and b, where it is not 1e-5; erf in mlp, an empty array, where the gelu is the exact
one; and another width than 4 * n_embd between c_fc and c_proj.

Sources: the release of openai/gpt-2, whose checkpoints name these model/wte, model/h0/attn/c_attn/w
and so on, and give the `w` a leading axis of length 1; transformers' GPT2LMHeadModel, which names
them transformer.wte.weight, transformer.h.0.attn.c_attn.weight and so on.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import download
from .adapter import merge_adapter
from .catalog import find_adapter, find_model
from .encoder import Encoder
from .errors import MAX_TOLD, PicogptError
from .formats.tensors import read_tensors
from .layouts import (
    MAX_PADDING,
    Source,
    open_model,
)

GELUS = ("tanh", "erf")
UNNAMED = {"eps", "erf"}  # of a tree's keys, those that stand for no tensor of a file


class Model(NamedTuple):
    """What `load` returns."""

    encoder: Encoder
    hparams: dict[str, int]
    params: dict[str, Any]


def load(
    model: str | Path,
    *,
    weights_dir: str | Path | None = None,
    verify: bool = True,
    adapter: str | Path | None = None,
    gelu: str | None = None,
) -> Model:
    """Loads a model: its encoder, its hyperparameters and its parameter tree.

    Args:
        model: "tales", which comes with picogpt; an official size, "124M", "355M", "774M" or
            "1558M", or "distilgpt2", fetched into the weights folder if it is not there yet;
            "owner/name" or "owner/name@revision" of the Hugging Face Hub, fetched into its cache;
            or a folder or a file in one of the formats of docs/models.md ("./124M", or a Path, is a
            folder; "124M" is the model), which is never written to.
        weights_dir: the weights folder; default: $PICOGPT_WEIGHTS, else `picogpt` in the user's
            cache folder.
        verify: compare the checksums of all tensors, where the format has them, which reads them
            once.
        adapter: the folder of a LoRA adapter that PEFT wrote, or "owner/name" of the Hub, to be
            merged into copies of the matrices that it changes; see `merge_adapter`.
        gelu: "tanh" or "erf" (the exact one), for a checkpoint of nanoGPT's, which does not say;
            None takes "erf", which nanoGPT has since mid-2023.

    Returns:
        (encoder, hparams, params), a named tuple. hparams has n_vocab, n_ctx, n_embd, n_head and
        n_layer. Arrays stored in float32 are mapped from the files, read-only; others are widened
        to it. Rows of wte that pad the vocabulary, fewer than 1,024, are cut off, since no text
        can come of them.

    Raises:
        PicogptError: there is no such model, or something is wrong with its files.
        OSError: a file cannot be read.

    >>> from picogpt import load
    >>> encoder, hparams, params = load("tales")
    >>> hparams["n_vocab"], hparams["n_ctx"], params["blocks"][0]["attn"]["c_attn"]["w"].shape
    (4096, 256, (256, 768))
    """
    if gelu not in (None, *GELUS):
        raise PicogptError(f"gelu: is {gelu!r:.40}; expected {' or '.join(GELUS)}")
    path = find_model(model, weights_dir)
    source = open_model(path, gelu)
    hparams = source.hparams
    wanted = {name: source.entries[name] for name in _tensor_shapes(source)}
    tensors = read_tensors(wanted, verify=verify)
    params = source.tree(lambda name, shape: tensors[name].reshape(shape))
    if source.has_head and np.array_equal(params["lm_head"], params["wte"]):
        del params["lm_head"]  # a copy
    if adapter is not None:
        params = merge_adapter(params, find_adapter(adapter))
    encoder = source.read_encoder()
    n_vocab = encoder.n_vocab
    if not n_vocab <= hparams["n_vocab"] < n_vocab + MAX_PADDING:
        found = f"{path}: the vocabulary has {n_vocab} tokens"
        said = f"{source.settings.name} and the weights have {hparams['n_vocab']}"
        raise PicogptError(f"{found}; {said}")
    for name in {"wte", "lm_head"} & params.keys():
        params[name] = params[name][:n_vocab]
    return Model(encoder, hparams | {"n_vocab": n_vocab}, params)


def verify(folder: Path, *, is_official: bool = False) -> str:
    """Reads all of a model's files, as `load` does, and looks for numbers that are not finite.

    Returns what was checked, in words.

    Raises:
        PicogptError: something is wrong.
        OSError: a file cannot be read.
    """
    if is_official:
        for name in sum(download.FILES.values(), ()):
            if (folder / name).is_file():
                download.check(folder / name)
    source = open_model(folder)
    _, _, params = load(folder)
    arrays = list(leaves(params, params))
    for path, _, array in arrays:
        if not np.isfinite(array).all():
            raise PicogptError(f"{folder}: {path} holds nan or infinity; fetch it again")
    has_checksums = any(entry.checksum for entry in source.entries.values())
    checksums = "checksums right" if has_checksums else "no checksums in this format"
    return f"{len(arrays)} tensors, {checksums}, all numbers finite"


def measure(path: Path) -> tuple[int, int]:
    """Returns the number of a model's parameters, and the size of its folder or file in bytes."""
    sizes = map(math.prod, _tensor_shapes(open_model(path)).values())
    files = path.iterdir() if path.is_dir() else [path]
    return sum(sizes), sum(file.stat().st_size for file in files if file.is_file())


def leaves(names: Any, params: Any, path: str = "params") -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, name, array) for each leaf of two trees that must have the same form."""
    if isinstance(names, dict):
        found = set(params) if isinstance(params, dict) else {type(params).__name__}
        if found - UNNAMED != set(names) - UNNAMED:
            wanted = ", ".join(names)
            holds = ", ".join(sorted(map(str, found))) or "nothing"
            raise PicogptError(f"{path}: holds {holds}; expected {wanted}")
        for key, name in names.items():
            if key not in UNNAMED:
                yield from leaves(name, params[key], f"{path}/{key}")
    elif isinstance(names, list):
        if len(params) != len(names):
            raise PicogptError(f"{path}: has {len(params)} layers; expected {len(names)}")
        for i, name in enumerate(names):
            yield from leaves(name, params[i], f"{path}/{i}")
    else:
        yield path, names, params


def _tensor_shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that the model needs, all of them in the index.

    What lies below another tensor (an optimizer's slots) is not the model's. A leading axis of
    length 1 of a weight is as good as none.

    Raises:
        PicogptError: names all that are missing, unexpected or of another shape; a layer that is
            missing or unexpected as a whole, and a shape that is wrong in many layers, count once.
    """
    hparams, index, settings = source.hparams, source.entries, source.settings.name
    if hparams["n_layer"] > len(index):
        found = f"n_layer={hparams['n_layer']}"
        raise PicogptError(f"{source.where}: {len(index)} tensors; {settings} says {found}")
    shapes: dict[str, tuple[int, ...]] = {}
    source.tree(shapes.__setitem__)

    def layer(name: str) -> str:
        return re.sub(r"\b(h[/.]?\d+)[/.].*", r"\1", name)

    def is_slot(name: str) -> bool:
        parts = name.split("/", 6)  # no tensor of a GPT-2 has more
        parents = ("/".join(parts[:n]) for n in range(1, len(parts)))
        return any(parent in index or parent in shapes for parent in parents)

    there, known = set(map(layer, index)), set(map(layer, shapes))
    missing = [name for name in shapes if name not in index]
    unexpected = [name for name in index if name not in shapes and not is_slot(name)]
    problems = [f"missing {name if layer(name) in there else layer(name)}" for name in missing]
    problems += [
        f"unexpected {name if layer(name) in known else layer(name)}" for name in unexpected
    ]
    wrong: dict[str, list[str]] = {}  # by the name and shapes in any layer: those in each layer
    turned = []
    for name, shape in shapes.items():
        stored = index[name].shape if name in index else shape
        has_leading = len(stored) == 3 and stored[0] == 1
        bare = stored[1:] if has_leading else stored
        if bare == shape:
            continue
        turned.append(bare == shape[::-1])
        what = f"{name} is {stored}, expected {(1, *shape) if has_leading else shape}"
        wrong.setdefault(re.sub(r"\bh([/.]?)\d+", r"h\1*", what), []).append(what)
    for anywhere, each in wrong.items():
        problems += [anywhere] if len(each) == hparams["n_layer"] else each
    if problems:
        sizes = ", ".join(f"{name}={value}" for name, value in hparams.items())
        problems = list(dict.fromkeys(problems))
        rest = [f"and {len(problems) - MAX_TOLD} more"] if len(problems) > MAX_TOLD else []
        what = "; ".join(problems[:MAX_TOLD] + rest)
        if turned and all(turned):
            what += "; the weights lie as in torch.nn.Linear: transpose each, the square ones too"
        raise PicogptError(f"{source.where}: does not fit {settings} ({sizes}): {what}")
    return shapes
