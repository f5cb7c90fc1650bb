"""Which models there are, where they lie, and how a checkpoint becomes the parameter tree.

`params` is a nested dict whose keys are the arguments of the functions in `model.py`; h is
n_embd / n_head. All arrays are float32:

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

Source: the release of openai/gpt-2, whose checkpoints name these model/wte, model/h0/attn/c_attn/w
and so on, and give the `w` a leading axis of length 1.
"""

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import checkpoint
from .encoder import VOCABULARY_FILES, Encoder
from .errors import PicogptError, find_files, read_json

BUNDLED = ("tales",)
OFFICIAL = ("124M", "355M", "774M", "1558M")
OLD_NAMES = {"117M": "124M", "345M": "355M"}
OFFICIAL_FILES = (
    "checkpoint",
    "encoder.json",
    "hparams.json",
    "model.ckpt.data-00000-of-00001",
    "model.ckpt.index",
    "vocab.bpe",
)
HPARAMS = ("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer")
MAX_TOLD = 100  # of what is wrong with a checkpoint
GPT2_N_VOCAB = 50257  # a folder that has no vocabulary but this size gets GPT-2's
HEADS = {768: 12, 1024: 16, 1280: 20, 1600: 25}  # of the official models, by n_embd


class Model(NamedTuple):
    """What `load` returns."""

    encoder: Encoder
    hparams: dict[str, int]
    params: dict[str, Any]


def load(model: str | Path, *, weights_dir: str | Path | None = None, verify: bool = True) -> Model:
    """Loads a model: its encoder, its hyperparameters and its parameter tree.

    Args:
        model: "tales", which comes with picogpt; an official size, "124M", "355M", "774M" or
            "1558M", which must lie in the weights folder; or a folder ("./124M", or a Path, is a
            folder; "124M" is the model).
        weights_dir: the weights folder; default: $PICOGPT_WEIGHTS, else `picogpt` in the user's
            cache folder.
        verify: compare the checksums of all tensors, which reads them once.

    Returns:
        (encoder, hparams, params), a named tuple. hparams has n_vocab, n_ctx, n_embd, n_head and
        n_layer. The arrays are mapped from the files, read-only; float16 is widened to float32.

    Raises:
        PicogptError: there is no such model, or something is wrong with its files.
        OSError: a file cannot be read.

    >>> load("tales").hparams["n_ctx"]
    256
    """
    folder = find_model(model, weights_dir)
    vocabulary_files = () if _borrows_vocabulary(folder) else VOCABULARY_FILES
    find_files(folder, "hparams.json", "checkpoint or *.index", *vocabulary_files)
    hparams = _read_hparams(folder / "hparams.json")
    prefix = checkpoint.find_checkpoint(folder)
    index = checkpoint.read_index(prefix)
    shapes = _tensor_shapes(hparams, index, f"{prefix}.index")
    tensors = checkpoint.read_tensors(prefix, {name: index[name] for name in shapes}, verify=verify)
    params = _parameter_tree(hparams, lambda name, _: _to_float32(tensors[name], name))
    encoder = load_encoder(folder)
    if encoder.n_vocab != hparams["n_vocab"]:
        found = f"{folder}: the vocabulary has {encoder.n_vocab} tokens"
        raise PicogptError(f"{found}; hparams.json and the weights have {hparams['n_vocab']}")
    return Model(encoder, hparams, params)


def load_encoder(folder: Path) -> Encoder:
    """Reads a folder's vocabulary; where it has none and the model has 50,257 tokens, GPT-2's.

    Raises:
        PicogptError: it has none and the model has another number of tokens, or a file is damaged.
    """
    return Encoder.gpt2() if _borrows_vocabulary(folder) else Encoder.from_folder(folder)


def _borrows_vocabulary(folder: Path) -> bool:
    hparams, names = folder / "hparams.json", " or ".join(VOCABULARY_FILES).split(" or ")
    if not hparams.is_file() or any((folder / name).is_file() for name in names):
        return False
    return bool(read_json(hparams).get("n_vocab") == GPT2_N_VOCAB)


def default_model() -> str:
    """The model to run when none is named: $PICOGPT_MODEL, else 124M if it is there, else tales."""
    if model := os.environ.get("PICOGPT_MODEL"):
        return model
    folder = weights_folder() / "124M"
    return "124M" if all((folder / name).is_file() for name in OFFICIAL_FILES) else "tales"


def weights_folder(weights_dir: str | Path | None = None) -> Path:
    """The folder of the official models: as given, else $PICOGPT_WEIGHTS, else in the cache."""
    if weights_dir := weights_dir or os.environ.get("PICOGPT_WEIGHTS"):
        return Path(weights_dir).absolute()
    import platformdirs

    return platformdirs.user_cache_path("picogpt", appauthor=False)


def find_model(model: str | Path, weights_dir: str | Path | None = None) -> Path:
    """Returns the folder of a model, absolute.

    Raises:
        PicogptError: no model is called that, or the official one is not in the weights folder.
    """
    if model in BUNDLED:
        return _bundled_folder() / model
    if model in OFFICIAL:
        folder = weights_folder(weights_dir) / str(model)
        try:
            find_files(folder, *OFFICIAL_FILES)
        except PicogptError as error:
            raise PicogptError(f"{error}; put the files of OpenAI's release there") from None
        return folder
    if model in OLD_NAMES:
        raise PicogptError(f"{model}: was renamed; use {OLD_NAMES[str(model)]}")
    folder = Path(model).absolute()
    is_name = isinstance(model, str) and not re.search(r"[/\\]", model)
    if is_name and not (model and folder.is_dir()):
        names = ", ".join(BUNDLED + OFFICIAL)
        raise PicogptError(f"{model}: neither a model nor a folder; the models are {names}")
    return folder


def _bundled_folder() -> Path:
    from importlib import resources

    try:
        return Path(str(resources.files("picogpt.weights")))
    except ModuleNotFoundError:  # Python took picogpt from its source tree, the folder it runs in
        return Path(str(resources.files("picogpt"))).parent / "weights"


def _read_hparams(path: Path) -> dict[str, int]:
    values = read_json(path)
    for name in HPARAMS:
        value = values.get(name)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise PicogptError(f"{path}: {name} is {value!r:.40}; expected a positive integer")
    hparams = {name: values[name] for name in HPARAMS}
    n_embd, n_head = hparams["n_embd"], hparams["n_head"]
    if n_embd % n_head:
        raise PicogptError(f"{path}: n_head={n_head} does not divide n_embd={n_embd}")
    if n_head != HEADS.get(n_embd, n_head):
        warnings.warn(
            f"{path}: n_head={n_head} is unusual for n_embd={n_embd}, "
            f"official models have {HEADS[n_embd]}; shapes cannot tell which is right",
            stacklevel=3,
        )
    return hparams


def _parameter_tree(
    hparams: dict[str, int], leaf: Callable[[str, tuple[int, ...]], Any]
) -> dict[str, Any]:
    """Builds the tree, with leaf(tensor name, shape in the checkpoint) for each array."""
    n_embd = hparams["n_embd"]

    def norm(name: str) -> dict[str, Any]:
        return {"g": leaf(f"{name}/g", (n_embd,)), "b": leaf(f"{name}/b", (n_embd,))}

    def conv(name: str, n_in: int, n_out: int) -> dict[str, Any]:
        return {"w": leaf(f"{name}/w", (1, n_in, n_out)), "b": leaf(f"{name}/b", (n_out,))}

    def block(name: str) -> dict[str, Any]:
        return {
            "ln_1": norm(f"{name}/ln_1"),
            "attn": {
                "c_attn": conv(f"{name}/attn/c_attn", n_embd, 3 * n_embd),
                "c_proj": conv(f"{name}/attn/c_proj", n_embd, n_embd),
            },
            "ln_2": norm(f"{name}/ln_2"),
            "mlp": {
                "c_fc": conv(f"{name}/mlp/c_fc", n_embd, 4 * n_embd),
                "c_proj": conv(f"{name}/mlp/c_proj", 4 * n_embd, n_embd),
            },
        }

    return {
        "wte": leaf("model/wte", (hparams["n_vocab"], n_embd)),
        "wpe": leaf("model/wpe", (hparams["n_ctx"], n_embd)),
        "blocks": [block(f"model/h{i}") for i in range(hparams["n_layer"])],
        "ln_f": norm("model/ln_f"),
    }


def _tensor_shapes(
    hparams: dict[str, int], index: dict[str, checkpoint.Entry], where: str
) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors that the model needs, all of them in the index.

    What lies outside `model/`, or below another tensor (an optimizer's slots), is not the model's.

    Raises:
        PicogptError: names all that are missing, unexpected or of another shape; a layer that is
            missing or unexpected as a whole, and a shape that is wrong in many layers, count once.
    """
    if hparams["n_layer"] > len(index):
        found = f"n_layer={hparams['n_layer']}"
        raise PicogptError(f"{where}: {len(index)} tensors; hparams.json says {found}")
    shapes: dict[str, tuple[int, ...]] = {}
    _parameter_tree(hparams, shapes.__setitem__)

    def layer(name: str) -> str:
        return "/".join(name.split("/")[:2])

    def is_slot(name: str) -> bool:
        parts = name.split("/", 6)  # no tensor of a GPT-2 has more
        parents = ("/".join(parts[:n]) for n in range(1, len(parts)))
        return any(parent in index or parent in shapes for parent in parents)

    there, known = set(map(layer, index)), set(map(layer, shapes))
    missing = [name for name in shapes if name not in index]
    unexpected = [
        name
        for name in index
        if name.startswith("model/") and name not in shapes and not is_slot(name)
    ]
    problems = [f"missing {name if layer(name) in there else layer(name)}" for name in missing]
    problems += [
        f"unexpected {name if layer(name) in known else layer(name)}" for name in unexpected
    ]
    wrong: dict[str, list[str]] = {}  # by the name and shapes in any layer: those in each layer
    for name, shape in shapes.items():
        if name in index and index[name].shape != shape:
            what = f"{name} is {index[name].shape}, expected {shape}"
            wrong.setdefault(re.sub(r"/h\d+/", "/h*/", what), []).append(what)
    for anywhere, each in wrong.items():
        problems += [anywhere] if len(each) == hparams["n_layer"] else each
    if problems:
        sizes = ", ".join(f"{name}={value}" for name, value in hparams.items())
        problems = list(dict.fromkeys(problems))
        rest = [f"and {len(problems) - MAX_TOLD} more"] if len(problems) > MAX_TOLD else []
        what = "; ".join(problems[:MAX_TOLD] + rest)
        raise PicogptError(f"{where}: does not fit hparams.json ({sizes}): {what}")
    return shapes


def _to_float32(tensor: np.ndarray, name: str) -> np.ndarray:
    """The tensor as it is if it is float32, else a copy; without the leading 1 of a `w`."""
    if tensor.dtype.name not in ("float32", "float16", "float64", "bfloat16"):
        raise PicogptError(f"{name}: has the type {tensor.dtype}; expected a floating-point type")
    return (tensor[0] if tensor.ndim == 3 else tensor).astype(np.float32, copy=False)
