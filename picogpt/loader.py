"""How a checkpoint becomes the parameter tree, and how a parameter tree is saved.

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
number beside g and b, where it is not 1e-5; and another width than 4 * n_embd between c_fc and
c_proj.

Sources: the release of openai/gpt-2, whose checkpoints name these model/wte, model/h0/attn/c_attn/w
and so on, and give the `w` a leading axis of length 1; transformers' GPT2LMHeadModel, which names
them transformer.wte.weight, transformer.h.0.attn.c_attn.weight and so on.
"""

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import download
from .adapter import ADAPTER_FILES, BODY, ENDS, HEAD, merge_adapter
from .catalog import find_model
from .encoder import GPT2_N_VOCAB, SAVED_FILES, VOCABULARY_FILES, Encoder
from .errors import MAX_TOLD, PicogptError, find_files, read_json, refuse_pickle
from .formats import safetensors, tensorflow
from .formats.tensors import Entry, read_tensors

TENSORFLOW_FILES = ("hparams.json", "checkpoint or *.index")
SAFETENSORS_FILES = ("config.json", "model.safetensors or model.safetensors.index.json")
HPARAMS = dict(zip(*download.SETTINGS.values(), strict=True))  # and their names in config.json
ALIASES = {  # transformers takes these for the same settings
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
# What config.json may say, first what it means to leave it out. Three more names of the same gelu
# are allowed. `reorder_and_upcast_attn` is not listed, since it changes nothing in float32.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}
LAYER_NORMS = ("ln_1", "ln_2")  # of a block
EPS = 1e-5  # of layer_norm, unless the settings say otherwise
OWN = re.compile(r"(wte|wpe|h|ln_f|lm_head)\.")  # other names are of heads for other purposes
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # constants, stored by older versions
MAX_PADDING = 1024  # rows of wte beyond the vocabulary; more, and it is another model's
HEADS = {768: 12, 1024: 16, 1280: 20, 1600: 25}  # of the official models, by n_embd


class Model(NamedTuple):
    """What `load` returns."""

    encoder: Encoder
    hparams: dict[str, int]
    params: dict[str, Any]


class _Checkpoint(NamedTuple):
    """A folder's weights, not yet read."""

    settings: Path
    hparams: dict[str, int]
    where: Path  # lists the tensors
    entries: dict[str, Entry]  # the model's tensors by their names there
    rename: Callable[[str], str]  # from their names in OpenAI's release
    has_head: bool = False
    eps: float = EPS
    n_inner: int | None = None  # as the settings say, if they do

    def tree(self, leaf: Callable[[str, tuple[int, ...]], Any]) -> dict[str, Any]:
        """The parameter tree, with leaf(name there, shape) for each array."""
        n_embd = self.hparams["n_embd"]
        c_fc = self.entries.get(self.rename("model/h0/mlp/c_fc/w"))
        is_fit = c_fc is not None and len(c_fc.shape) > 1 and c_fc.shape[-2] == n_embd
        n_inner = self.n_inner or (c_fc.shape[-1] if c_fc and is_fit else None)
        renamed = lambda name, shape: leaf(self.rename(name), shape)  # noqa: E731
        return _parameter_tree(self.hparams, renamed, n_inner, self.has_head, self.eps)


def load(
    model: str | Path,
    *,
    weights_dir: str | Path | None = None,
    verify: bool = True,
    adapter: str | Path | None = None,
) -> Model:
    """Loads a model: its encoder, its hyperparameters and its parameter tree.

    Args:
        model: "tales", which comes with picogpt; an official size, "124M", "355M", "774M" or
            "1558M", or "distilgpt2", fetched into the weights folder if it is not there yet; or a
            folder in OpenAI's or Hugging Face's layout ("./124M", or a Path, is a folder; "124M"
            is the model), which is never written to.
        weights_dir: the weights folder; default: $PICOGPT_WEIGHTS, else `picogpt` in the user's
            cache folder.
        verify: compare the checksums of all tensors, where the format has them, which reads them
            once.
        adapter: the folder of a LoRA adapter that PEFT wrote, to be merged into copies of the
            matrices that it changes; see `merge_adapter`.

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
    folder = find_model(model, weights_dir)
    source = _open(folder)
    hparams = source.hparams
    wanted = {name: source.entries[name] for name in _tensor_shapes(source)}
    tensors = read_tensors(wanted, verify=verify)
    params = source.tree(lambda name, shape: tensors[name].reshape(shape))
    if source.has_head and np.array_equal(params["lm_head"], params["wte"]):
        del params["lm_head"]  # a copy
    if adapter is not None:
        params = merge_adapter(params, adapter)
    encoder = load_encoder(folder)
    n_vocab = encoder.n_vocab
    if not n_vocab <= hparams["n_vocab"] < n_vocab + MAX_PADDING:
        found = f"{folder}: the vocabulary has {n_vocab} tokens"
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
    source = _open(folder)
    _, _, params = load(folder)
    arrays = list(_leaves(params, params))
    for path, _, array in arrays:
        if not np.isfinite(array).all():
            raise PicogptError(f"{folder}: {path} holds nan or infinity; fetch it again")
    has_checksums = any(entry.crc is not None for entry in source.entries.values())
    checksums = "checksums right" if has_checksums else "no checksums in this format"
    return f"{len(arrays)} tensors, {checksums}, all numbers finite"


def measure(folder: Path) -> tuple[int, int]:
    """Returns the number of a model's parameters, and the size of its folder in bytes."""
    sizes = map(math.prod, _tensor_shapes(_open(folder)).values())
    return sum(sizes), sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def load_encoder(folder: Path) -> Encoder:
    """Reads a folder's vocabulary; where it has none and the model has 50,257 tokens, GPT-2's.

    Raises:
        PicogptError: it has none and the model has another number of tokens, or a file is damaged.
    """
    return Encoder.gpt2() if _borrows_vocabulary(folder) else Encoder.from_folder(folder)


def _borrows_vocabulary(folder: Path) -> bool:
    names = " or ".join(VOCABULARY_FILES).split(" or ")
    if any((folder / name).is_file() for name in names):
        return False
    settings = {"hparams.json": "n_vocab", "config.json": "vocab_size"}
    found = [folder / name for name in settings if (folder / name).is_file()]
    return any(read_json(path).get(settings[path.name]) == GPT2_N_VOCAB for path in found)


def save(
    folder: str | Path, encoder: Encoder, hparams: dict[str, int], params: dict[str, Any]
) -> None:
    """Writes a model in Hugging Face's layout, for `load` and for transformers.

    Args:
        folder: where to; must not exist yet, or be empty. It is a model only when all is written.
        encoder, hparams, params: as `load` returns them.

    Raises:
        PicogptError: the folder holds something, the three do not fit each other, or safetensors
            is not installed.
        OSError: a file cannot be written.

    >>> from picogpt import load, save
    >>> encoder, hparams, params = load("tales")
    >>> shallow = params | {"blocks": params["blocks"][:3]}
    >>> save("half-of-tales", encoder, hparams | {"n_layer": 3}, shallow)
    >>> load("half-of-tales").hparams["n_layer"]
    3
    """
    try:
        from safetensors.numpy import save_file
    except ImportError:
        raise PicogptError('safetensors: is not installed; run "pip install safetensors"') from None
    folder = Path(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PicogptError(f"{folder}: holds something already; choose a new folder")
    whole = {n: int(x) if isinstance(x, Integral) else x for n, x in hparams.items()}
    hparams = _check_hparams(whole, {name: name for name in HPARAMS}, "hparams")
    if encoder.n_vocab != hparams["n_vocab"]:
        found = f"encoder: has {encoder.n_vocab} tokens"
        raise PicogptError(f"{found}; hparams have {hparams['n_vocab']}")
    params = {name: value for name, value in params.items() if value is not None}
    try:
        n_inner = np.shape(params["blocks"][0]["mlp"]["c_fc"]["b"])[-1]
    except (IndexError, KeyError, TypeError):
        n_inner = None  # what is wrong is told below
    has_head = "lm_head" in params
    names = _parameter_tree(hparams, lambda name, shape: (name, shape), n_inner, has_head)
    tensors = {}
    for path, (name, shape), value in _leaves(names, params):
        tensor = np.asarray(value)
        if tensor.shape != shape or tensor.dtype.kind != "f":
            found = f"is {tensor.dtype} {tensor.shape}"
            raise PicogptError(f"{path}: {found}; expected floating-point {shape} by hparams")
        name = _hugging_face_name(name)
        name = name if name == HEAD else BODY + name
        tensors[name] = np.ascontiguousarray(tensor, np.float32)
    norms = [params["ln_f"], *(block[name] for block in params["blocks"] for name in LAYER_NORMS)]
    if len(all_eps := {float(norm.get("eps", EPS)) for norm in norms}) > 1:
        raise PicogptError(f"params: have the eps {sorted(all_eps)}; Hugging Face's layout has one")
    config = {
        "architectures": ["GPT2LMHeadModel"],
        **{name: allowed[0] for name, allowed in SETTINGS.items() if allowed[0] is not None},
        **{theirs: hparams[name] for name, theirs in HPARAMS.items()},
        "n_inner": n_inner,
        "layer_norm_epsilon": all_eps.pop(),
        "tie_word_embeddings": not has_head,
        "bos_token_id": encoder.end_of_text,
        "eos_token_id": encoder.end_of_text,
        "dtype": "float32",
    }
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        encoder.save(folder)
        part = folder / "config.json.part"
        part.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shutil.copymode(part, folder / "model.safetensors")  # which was made for its owner only
        part.replace(folder / "config.json")
    except BaseException:
        for name in ("model.safetensors", "config.json.part", *SAVED_FILES):
            (folder / name).unlink(missing_ok=True)
        if is_new:
            folder.rmdir()
        raise


def _leaves(names: Any, params: Any, path: str = "params") -> Iterator[tuple[str, Any, Any]]:
    """Yields (path, name, array) for each leaf of two trees that must have the same form."""
    if isinstance(names, dict):
        found = set(params) if isinstance(params, dict) else {type(params).__name__}
        if found - {"eps"} != set(names) - {"eps"}:
            wanted = ", ".join(names)
            holds = ", ".join(sorted(map(str, found))) or "nothing"
            raise PicogptError(f"{path}: holds {holds}; expected {wanted}")
        for key, name in names.items():
            if key != "eps":
                yield from _leaves(name, params[key], f"{path}/{key}")
    elif isinstance(names, list):
        if len(params) != len(names):
            raise PicogptError(f"{path}: has {len(params)} layers; expected {len(names)}")
        for i, name in enumerate(names):
            yield from _leaves(name, params[i], f"{path}/{i}")
    else:
        yield path, names, params


def _open(folder: Path) -> _Checkpoint:
    """Finds out which layout a folder has, and reads its settings and the list of its tensors."""
    has_index = any(path.is_file() for path in folder.glob("*.index"))
    safetensors = [folder / name for name in SAFETENSORS_FILES[1].split(" or ")]
    has_safetensors = any(path.is_file() for path in safetensors)
    is_openais = (folder / "hparams.json").is_file() and (has_index or not has_safetensors)
    is_hugging_faces = (folder / "config.json").is_file() and (has_safetensors or not has_index)
    vocabulary = () if _borrows_vocabulary(folder) else VOCABULARY_FILES
    if is_openais and is_hugging_faces and has_index and has_safetensors:
        raise PicogptError(
            f"{folder}: holds two models, hparams.json with *.index and config.json with "
            "*.safetensors; expected one; move the other elsewhere"
        )
    if not (is_openais or is_hugging_faces) and (folder / ADAPTER_FILES[0]).is_file():
        raise PicogptError(
            f"{folder}: holds an adapter; expected a model; load the one that it was made for, "
            "with this as its adapter"
        )
    if is_openais:
        find_files(folder, *TENSORFLOW_FILES, *vocabulary)
        return _open_tensorflow(folder)
    if not is_hugging_faces:
        both = zip(TENSORFLOW_FILES, SAFETENSORS_FILES, strict=True)
        find_files(folder, *map(" or ".join, both), *vocabulary)
    if not has_safetensors:
        for path in sorted(folder.glob("*.bin")):
            refuse_pickle(path, "model.safetensors", "transformers")
    found = find_files(folder, *SAFETENSORS_FILES, *vocabulary)
    return _open_safetensors(found[0], found[1])


def _open_tensorflow(folder: Path) -> _Checkpoint:
    settings = folder / "hparams.json"
    hparams = _check_hparams(read_json(settings), {name: name for name in HPARAMS}, settings)
    where = tensorflow.find_checkpoint(folder)
    index = {
        name: entry
        for name, entry in tensorflow.list_tensors(where).items()
        if name.startswith("model/")
    }
    return _Checkpoint(settings, hparams, where, index, lambda name: name)


def _open_safetensors(settings: Path, where: Path) -> _Checkpoint:
    config = read_json(settings)
    for name, allowed in SETTINGS.items():
        if (value := config.get(name, allowed[0])) not in allowed:
            raise PicogptError(f"{settings}: {name} is {value!r:.60}; expected {allowed[0]!r}")
    for name, alias in ALIASES.items():
        if config.setdefault(name, config.get(alias)) != config.get(alias, config[name]):
            both = f"{name} is {config[name]!r:.40} and {alias} is {config[alias]!r:.40}"
            raise PicogptError(f"{settings}: {both}; expected one")
    hparams = _check_hparams(config, HPARAMS, settings)
    eps = config.get("layer_norm_epsilon", EPS)
    if not isinstance(eps, float | int) or not 0 < eps < 1:
        raise PicogptError(f"{settings}: layer_norm_epsilon is {eps!r:.40}; expected 1e-5 or so")
    n_inner = config.get("n_inner")
    if n_inner is not None and not (type(n_inner) is int and 0 < n_inner < 1 << 31):
        raise PicogptError(f"{settings}: n_inner is {n_inner!r:.40}; expected a positive integer")
    everything = safetensors.list_tensors(where)
    prefix = BODY if any(name.startswith(BODY) for name in everything) else ""
    index = {
        name: entry
        for name, entry in everything.items()
        if OWN.match(name.removeprefix(prefix)) and not MASK.fullmatch(name.removeprefix(prefix))
    }

    def rename(name: str) -> str:
        name = _hugging_face_name(name)
        return name if name == HEAD else prefix + name

    is_tied = config.get("tie_word_embeddings", True) is not False
    if is_tied and HEAD in index and rename("model/wte") not in index:
        index[rename("model/wte")] = index.pop(HEAD)
    return _Checkpoint(
        settings, hparams, where, index, rename, HEAD in index or not is_tied, float(eps), n_inner
    )


def _hugging_face_name(name: str) -> str:
    """model/h0/attn/c_attn/w is h.0.attn.c_attn.weight there."""
    if name == "model/lm_head":
        return HEAD
    *path, last = re.sub(r"/h(\d+)/", r"/h/\1/", name).split("/")[1:]
    return ".".join([*path, ENDS.get(last, f"{last}.weight")])


def _check_hparams(
    values: dict[str, Any], names: dict[str, str], path: Path | str
) -> dict[str, int]:
    for name in names.values():
        value = values.get(name)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise PicogptError(f"{path}: {name} is {value!r:.40}; expected a positive integer")
    hparams = {name: values[theirs] for name, theirs in names.items()}
    n_embd, n_head = hparams["n_embd"], hparams["n_head"]
    if n_embd % n_head:
        raise PicogptError(f"{path}: n_head={n_head} does not divide n_embd={n_embd}")
    if n_head != HEADS.get(n_embd, n_head):
        warnings.warn(
            f"{path}: n_head={n_head} is unusual for n_embd={n_embd}, "
            f"official models have {HEADS[n_embd]}; shapes cannot tell which is right",
            stacklevel=5,
        )
    return hparams


def _parameter_tree(
    hparams: dict[str, int],
    leaf: Callable[[str, tuple[int, ...]], Any],
    n_inner: int | None = None,
    has_head: bool = False,
    eps: float = EPS,
) -> dict[str, Any]:
    """Builds the tree, with leaf(name in OpenAI's release, shape) for each array."""
    n_embd = hparams["n_embd"]
    n_inner = n_inner or 4 * n_embd

    def norm(name: str) -> dict[str, Any]:
        arrays = {"g": leaf(f"{name}/g", (n_embd,)), "b": leaf(f"{name}/b", (n_embd,))}
        return arrays if eps == EPS else arrays | {"eps": eps}

    def conv(name: str, n_in: int, n_out: int) -> dict[str, Any]:
        return {"w": leaf(f"{name}/w", (n_in, n_out)), "b": leaf(f"{name}/b", (n_out,))}

    def block(name: str) -> dict[str, Any]:
        return {
            "ln_1": norm(f"{name}/ln_1"),
            "attn": {
                "c_attn": conv(f"{name}/attn/c_attn", n_embd, 3 * n_embd),
                "c_proj": conv(f"{name}/attn/c_proj", n_embd, n_embd),
            },
            "ln_2": norm(f"{name}/ln_2"),
            "mlp": {
                "c_fc": conv(f"{name}/mlp/c_fc", n_embd, n_inner),
                "c_proj": conv(f"{name}/mlp/c_proj", n_inner, n_embd),
            },
        }

    params = {
        "wte": leaf("model/wte", (hparams["n_vocab"], n_embd)),
        "wpe": leaf("model/wpe", (hparams["n_ctx"], n_embd)),
        "blocks": [block(f"model/h{i}") for i in range(hparams["n_layer"])],
        "ln_f": norm("model/ln_f"),
    }
    if has_head:
        params["lm_head"] = leaf("model/lm_head", (hparams["n_vocab"], n_embd))
    return params


def _tensor_shapes(source: _Checkpoint) -> dict[str, tuple[int, ...]]:
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
