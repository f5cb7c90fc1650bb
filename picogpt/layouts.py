"""How each writer of GPT-2s lays a model down: its settings, its tensors' names, its vocabulary.

Names of tensors here are those of OpenAI's release: model/wte, model/h0/attn/c_attn/w and so on,
the `w` with a leading axis of length 1. A `Source` knows what each is called where it lies.

Sources: the release of openai/gpt-2; transformers' GPT2LMHeadModel, whose names are
transformer.wte.weight, transformer.h.0.attn.c_attn.weight and so on.
"""

import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import download
from .adapter import ADAPTER_FILES, BODY, ENDS, HEAD
from .encoder import (
    CHARACTERS_FILE,
    GPT2_N_VOCAB,
    VOCABULARY_FILES,
    CharacterEncoder,
    Encoder,
    in_characters,
)
from .errors import PicogptError, find_files, read_json
from .formats import pytorch, tensorflow
from .formats.files import find_format, list_tensors
from .formats.tensors import Entry, Listing

TENSORFLOW_FILES = ("hparams.json", "checkpoint or *.index")
WEIGHTS = [
    f"{name}{list_}"
    for name in ("model.safetensors", "pytorch_model.bin")
    for list_ in ("", ".index.json")
]
HUGGING_FACE_FILES = ("config.json", " or ".join(WEIGHTS))
HPARAMS = dict(zip(*download.SETTINGS.values(), strict=True))  # and their names in config.json
ALIASES = {  # transformers takes these for the same settings
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
NANOGPT_HPARAMS = HPARAMS | {"n_ctx": "block_size"}
LLMC_HPARAMS = {
    "n_vocab": "padded_vocab_size",
    "n_ctx": "max_seq_len",
    "n_embd": "channels",
    "n_head": "num_heads",
    "n_layer": "num_layers",
}
GGUF_HPARAMS = {
    "n_vocab": "vocab_size",  # that of the embedding
    "n_ctx": "context_length",
    "n_embd": "embedding_length",
    "n_head": "attention.head_count",
    "n_layer": "block_count",
}
GGUF_NAMES = {  # of modules, here and there
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
UNUSED, AS_TEXT = 5, (3, 4)  # types of tokens in GGUF: padding; not in the characters for bytes
EXACT = ("gelu", "gelu_python")  # names of the exact gelu
# What config.json may say, first what it means to leave it out. Three more names of the same gelu
# are allowed. `reorder_and_upcast_attn` is not listed, since it changes nothing in float32.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", *EXACT),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "quantization_config": (None,),
}
LAYER_NORMS = ("ln_1", "ln_2")  # of a block
EPS = 1e-5  # of layer_norm, unless the settings say otherwise
OWN = re.compile(r"(wte|wpe|h|ln_f|lm_head)\.")  # other names are of heads for other purposes
LINEAR = re.compile(r".*\.(c_attn|c_proj|c_fc)\.weight")  # lies the other way round in nn.Linear
MAX_PADDING = 1024  # rows of wte beyond the vocabulary; more, and it is another model's
MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # constants, stored by older versions
HEADS = {768: 12, 1024: 16, 1280: 20, 1600: 25}  # of the official models, by n_embd


class Source(NamedTuple):
    """A model's weights, not yet read."""

    settings: Path
    hparams: dict[str, int]
    where: Path  # lists the tensors
    entries: dict[str, Entry]  # the model's tensors by their names there
    rename: Callable[[str], str]  # from their names in OpenAI's release
    read_encoder: Callable[[], Encoder] = Encoder.gpt2
    has_head: bool = False
    eps: float = EPS
    n_inner: int | None = None  # as the settings say, if they do
    has_erf: bool = False  # the exact gelu

    def tree(self, leaf: Callable[[str, tuple[int, ...]], Any]) -> dict[str, Any]:
        """The parameter tree, with leaf(name there, shape) for each array."""
        n_embd = self.hparams["n_embd"]
        c_fc = self.entries.get(self.rename("model/h0/mlp/c_fc/w"))
        is_fit = c_fc is not None and len(c_fc.shape) > 1 and c_fc.shape[-2] == n_embd
        n_inner = self.n_inner or (c_fc.shape[-1] if c_fc and is_fit else None)
        renamed = lambda name, shape: leaf(self.rename(name), shape)  # noqa: E731
        options = self.has_head, self.eps, self.has_erf
        return parameter_tree(self.hparams, renamed, n_inner, *options)


def open_model(path: Path, gelu: str | None = None) -> Source:
    """Finds out which layout a folder or a file has, and reads its settings and list of tensors.

    Args:
        path: of the folder or file.
        gelu: "tanh" or "erf", for a layout that does not say which.

    Raises:
        PicogptError: it is in none, or damaged, or holds several models.
        OSError: a file cannot be read.
    """
    source = _open_file(path, gelu) if path.is_file() else _open_folder(path, gelu)
    if gelu and source.has_erf != (gelu == "erf"):
        said = "erf" if source.has_erf else "tanh"
        raise PicogptError(f"{source.settings}: says that its gelu is {said}, not {gelu}")
    return source


def _open_folder(folder: Path, gelu: str | None) -> Source:
    has_index = any(path.is_file() for path in folder.glob("*.index"))
    named = [folder / name for name in WEIGHTS if (folder / name).is_file()]
    is_openais = (folder / "hparams.json").is_file() and (has_index or not named)
    is_hugging_faces = (folder / "config.json").is_file() and (bool(named) or not has_index)
    is_adapter = (folder / ADAPTER_FILES[0]).is_file()
    others = [] if named or is_adapter else _find_others(folder)
    if is_openais and has_index and ((is_hugging_faces and named) or others):
        other = f"config.json with {named[0].name}" if named else others[0].name
        raise PicogptError(
            f"{folder}: holds two models, hparams.json with *.index and {other}; "
            "expected one; move the other elsewhere"
        )
    if not (is_openais or is_hugging_faces) and is_adapter:
        raise PicogptError(
            f"{folder}: holds an adapter; expected a model; load the one that it was made for, "
            "with this as its adapter"
        )
    if len(others) > 1:
        names = ", ".join(path.name for path in others)
        raise PicogptError(f"{folder}: holds {names}; expected one; name the one that is meant")
    if others:
        return _open_file(others[0], gelu)
    vocabulary = () if _borrows_vocabulary(folder) else VOCABULARY_FILES
    vocabulary = () if (folder / CHARACTERS_FILE).is_file() else vocabulary
    if is_openais:
        find_files(folder, *TENSORFLOW_FILES, *vocabulary)
        return _open_tensorflow(folder / "hparams.json")
    if not is_hugging_faces:
        both = zip(TENSORFLOW_FILES, HUGGING_FACE_FILES, strict=True)
        find_files(folder, *map(" or ".join, both), *vocabulary)
    found = find_files(folder, *HUGGING_FACE_FILES, *vocabulary)
    return _open_hugging_face(found[0], found[1], list_tensors(found[1]))


def _find_others(folder: Path) -> list[Path]:
    """The files of a folder that hold tensors, whatever they are called, but for TensorFlow's."""
    files = sorted(path for path in folder.glob("*") if path.is_file() and path.suffix != ".part")
    return [path for path in files if find_format(path) not in (None, tensorflow)]


def _open_file(path: Path, gelu: str | None) -> Source:
    if find_format(path) is tensorflow:
        return _open_tensorflow(path.with_name("hparams.json"), path)
    listing = list_tensors(path)
    if isinstance(listing.metadata.get("model_args"), dict):
        return _open_nanogpt(path, listing, gelu)
    if "general.architecture" in listing.metadata:
        return _open_gguf(path, listing)
    if "padded_vocab_size" in listing.metadata:
        hparams = check_hparams(listing.metadata, LLMC_HPARAMS, path)
        return _open_linear(path, hparams, listing, has_erf=False, has_bias=True)
    if not path.with_name("config.json").is_file():
        raise PicogptError(f"{path}: has no settings; expected config.json beside it")
    return _open_hugging_face(path.with_name("config.json"), path, listing)


def _open_tensorflow(settings: Path, where: Path | None = None) -> Source:
    hparams = check_hparams(read_json(settings), {name: name for name in HPARAMS}, settings)
    where = where or tensorflow.find_checkpoint(settings.parent)
    index = {
        name: entry
        for name, entry in tensorflow.list_tensors(where).items()
        if name.startswith("model/")
    }
    read_encoder = functools.partial(load_encoder, settings.parent)
    return Source(settings, hparams, where, index, lambda name: name, read_encoder)


def _open_hugging_face(settings: Path, where: Path, listing: Listing) -> Source:
    config = read_json(settings)
    for name, allowed in SETTINGS.items():
        if (value := config.get(name, allowed[0])) not in allowed:
            raise PicogptError(f"{settings}: {name} is {value!r:.60}; expected {allowed[0]!r}")
    for name, alias in ALIASES.items():
        if config.setdefault(name, config.get(alias)) != config.get(alias, config[name]):
            both = f"{name} is {config[name]!r:.40} and {alias} is {config[alias]!r:.40}"
            raise PicogptError(f"{settings}: {both}; expected one")
    hparams = check_hparams(config, HPARAMS, settings)
    eps = config.get("layer_norm_epsilon", EPS)
    if not isinstance(eps, float | int) or not 0 < eps < 1:
        raise PicogptError(f"{settings}: layer_norm_epsilon is {eps!r:.40}; expected 1e-5 or so")
    n_inner = config.get("n_inner")
    if n_inner is not None and not (type(n_inner) is int and 0 < n_inner < 1 << 31):
        raise PicogptError(f"{settings}: n_inner is {n_inner!r:.40}; expected a positive integer")
    prefix, index = _own_tensors(listing)

    def rename(name: str) -> str:
        name = hugging_face_name(name)
        return name if name == HEAD else prefix + name

    is_tied = config.get("tie_word_embeddings", True) is not False
    if is_tied and HEAD in index and rename("model/wte") not in index:
        index[rename("model/wte")] = index.pop(HEAD)
    return Source(
        settings,
        hparams,
        where,
        index,
        rename,
        functools.partial(load_encoder, settings.parent),
        has_head=_drop_copy(index, rename("model/wte")) or not is_tied,
        eps=float(eps),
        n_inner=n_inner,
        has_erf=config.get("activation_function") in EXACT,
    )


def _own_tensors(listing: Mapping[str, Entry]) -> tuple[str, dict[str, Entry]]:
    """What comes before the names of all but the head, and the tensors of a GPT-2 alone."""
    prefix = BODY if any(name.startswith(BODY) for name in listing) else ""
    bare = {name: name.removeprefix(prefix) for name in listing}
    own = {n: e for n, e in listing.items() if OWN.match(bare[n]) and not MASK.fullmatch(bare[n])}
    return prefix, own


def _drop_copy(index: dict[str, Entry], wte: str) -> bool:
    """Whether there is a head of its own; one at the same place as the embedding is none."""
    if HEAD in index and index[HEAD] == index.get(wte):
        del index[HEAD]
    return HEAD in index


def _open_nanogpt(path: Path, listing: Listing, gelu: str | None) -> Source:
    """A checkpoint of nanoGPT's train.py: {"model": names as transformers', "model_args": ...}."""
    args = listing.metadata["model_args"]
    hparams = check_hparams(args, NANOGPT_HPARAMS, path)
    tensors = {
        re.sub(r"^model/((_orig_mod|module)\.)*", "", name): entry
        for name, entry in listing.items()
        if name.startswith("model/")
    }
    return _open_linear(path, hparams, tensors, gelu != "tanh", args.get("bias", True) is not False)


def _open_linear(
    path: Path, hparams: dict[str, int], tensors: dict[str, Entry], has_erf: bool, has_bias: bool
) -> Source:
    """A file that says all itself, with transformers' names and the matrices of nn.Linear."""
    prefix, index = _own_tensors(tensors)
    for name, entry in index.items():
        if LINEAR.fullmatch(name) and len(entry.shape) == 2:
            index[name] = entry.transposed()

    def rename(name: str) -> str:
        name = hugging_face_name(name)
        return name if name == HEAD else prefix + name

    def add_zeros(name: str, shape: tuple[int, ...]) -> None:
        if name.endswith("/b"):
            index.setdefault(rename(name), Entry("float32", shape, path, 0, 0, read=_read_zeros))

    if not has_bias and hparams["n_layer"] <= len(index):  # else it is refused with all that lacks
        parameter_tree(hparams, add_zeros)
    has_head = _drop_copy(index, rename("model/wte"))
    read_encoder = functools.partial(_read_encoder_beside, path, hparams["n_vocab"])
    return Source(
        path, hparams, path, index, rename, read_encoder, has_head=has_head, has_erf=has_erf
    )


def _open_gguf(path: Path, listing: Listing) -> Source:
    metadata = listing.metadata
    wanted: dict[str, str | int] = {"general.architecture": "gpt2"}
    wanted |= {"tokenizer.ggml.model": "gpt2"}
    wanted |= {"tokenizer.ggml.pre": "gpt-2", "split.count": 1}
    for name, value in wanted.items():
        found = metadata.get(name, 1 if name == "split.count" else "nothing")
        if not (isinstance(found, str | int) and found == value):
            raise PicogptError(f"{path}: {name} is {found!r:.60}; expected {value!r}")
    settings = {
        name.removeprefix("gpt2."): value
        for name, value in metadata.items()
        if name.startswith("gpt2.")
    }
    wte = listing.get(gguf_name("model/wte"))
    settings["vocab_size"] = wte.shape[0] if wte and wte.shape else 0
    hparams = check_hparams(settings, GGUF_HPARAMS, path)
    eps = settings.get("attention.layer_norm_epsilon", EPS)
    if not isinstance(eps, float) or not 0 < eps < 1:
        raise PicogptError(f"{path}: layer_norm_epsilon is {eps!r:.40}; expected 1e-5 or so")
    n_inner = settings.get("feed_forward_length")
    if n_inner is not None and not (type(n_inner) is int and 0 < n_inner < 1 << 31):
        found = f"feed_forward_length is {n_inner!r:.40}"
        raise PicogptError(f"{path}: {found}; expected a positive integer")
    index = dict(listing)
    for name, entry in listing.items():
        module = name.split(".", 2)[-1].removesuffix(".weight")
        is_matrix = module.startswith(("attn_qkv", "attn_output", "ffn_")) and "norm" not in module
        if is_matrix and len(entry.shape) == 2:
            index[name] = entry.transposed()  # they lie as in nn.Linear
    return Source(
        path,
        hparams,
        path,
        index,
        gguf_name,
        functools.partial(_read_gguf_encoder, path, metadata),
        has_head=gguf_name("model/lm_head") in index,
        eps=float(f"{eps:.6g}"),  # it was stored in float32
        n_inner=n_inner,
    )


def gguf_name(name: str) -> str:
    """model/h0/attn/c_attn/w is blk.0.attn_qkv.weight there."""
    block, *path = re.sub(r"^model/(?:h(\d+)/)?", r"\1/", name).split("/")
    end = ENDS[path.pop()] if path[-1] in ENDS else "weight"
    module = f"{GGUF_NAMES['.'.join(path)]}.{end}"
    return f"blk.{block}.{module}" if block else module


def _read_gguf_encoder(path: Path, metadata: dict[str, Any]) -> Encoder:
    tokens, merges = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise PicogptError(f"{path}: lacks its vocabulary, tokenizer.ggml.tokens and merges")
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = types.tolist() if isinstance(types, np.ndarray) else []
    kinds = kinds if len(kinds) == len(tokens) else [0] * len(tokens)
    n_tokens = len(tokens)
    while n_tokens and kinds[n_tokens - 1] == UNUSED:
        n_tokens -= 1
    try:
        texts = (
            in_characters(token) if kind in AS_TEXT else token
            for token, kind in zip(tokens[:n_tokens], kinds, strict=False)
        )
        encoder = {token: i for i, token in enumerate(texts)}
        if len(encoder) < n_tokens:
            raise PicogptError("a token comes twice; expected each once")
        return Encoder(encoder, merges)
    except PicogptError as error:
        raise PicogptError(f"{path}: tokenizer.ggml.tokens: {error}") from None


def _read_zeros(name: str, entry: Entry) -> np.ndarray:
    return np.zeros(entry.shape, np.float32)


def _read_encoder_beside(path: Path, n_vocab: int) -> Encoder:
    """The vocabulary in the folder of a file that holds none; where there is none, GPT-2's."""
    if _has_vocabulary(path.parent):
        return load_encoder(path.parent)
    if GPT2_N_VOCAB <= n_vocab < GPT2_N_VOCAB + MAX_PADDING:
        return Encoder.gpt2()
    raise PicogptError(
        f"{path}: has {n_vocab} tokens, so its vocabulary is not GPT-2's; expected "
        f"{CHARACTERS_FILE} or another vocabulary beside it"
    )


def hugging_face_name(name: str) -> str:
    """model/h0/attn/c_attn/w is h.0.attn.c_attn.weight there."""
    if name == "model/lm_head":
        return HEAD
    *path, last = re.sub(r"/h(\d+)/", r"/h/\1/", name).split("/")[1:]
    return ".".join([*path, ENDS.get(last, f"{last}.weight")])


def check_hparams(
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


def parameter_tree(
    hparams: dict[str, int],
    leaf: Callable[[str, tuple[int, ...]], Any],
    n_inner: int | None = None,
    has_head: bool = False,
    eps: float = EPS,
    has_erf: bool = False,
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
                **({"erf": np.zeros(0, np.float32)} if has_erf else {}),
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


def load_encoder(path: Path) -> Encoder:
    """Reads the vocabulary of a folder or file; where there is none and the model has as many
    tokens as GPT-2's, that one.

    Raises:
        PicogptError: it has none and the model has another number of tokens, or a file is damaged.
    """
    settings = any((path / name).is_file() for name in ("config.json", "hparams.json"))
    if path.is_file() or not (settings or _has_vocabulary(path) or not path.is_dir()):
        return open_model(path).read_encoder()
    if _borrows_vocabulary(path):
        return Encoder.gpt2()
    if _has_vocabulary(path, VOCABULARY_FILES) or not (path / CHARACTERS_FILE).is_file():
        return Encoder.from_folder(path)
    return _read_characters(path / CHARACTERS_FILE)


def _read_characters(path: Path) -> Encoder:
    meta = pytorch.read_pickle(path)
    characters = meta.get("stoi") if isinstance(meta, dict) else None
    if not characters or not isinstance(characters, dict):
        raise PicogptError(f"{path}: has no stoi; expected the id of each character")
    try:
        return CharacterEncoder(characters)
    except PicogptError as error:
        raise PicogptError(f"{path}: {error}") from None


def _has_vocabulary(
    folder: Path, files: Iterable[str] = (*VOCABULARY_FILES, CHARACTERS_FILE)
) -> bool:
    return any((folder / name).is_file() for name in " or ".join(files).split(" or "))


def _borrows_vocabulary(folder: Path) -> bool:
    if _has_vocabulary(folder):
        return False
    settings = {"hparams.json": "n_vocab", "config.json": "vocab_size"}
    found = [folder / name for name in settings if (folder / name).is_file()]
    return any(read_json(path).get(settings[path.name]) == GPT2_N_VOCAB for path in found)
