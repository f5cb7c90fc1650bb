"""How a model is saved: in Hugging Face's layout, or as a GGUF for llama.cpp.

What is half written has another name, or is removed: a model is there when all of it is.
"""

import contextlib
import json
import shutil
from collections.abc import Iterator
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from .adapter import BODY, HEAD
from .encoder import SAVED_FILES, CharacterEncoder, Encoder
from .errors import PicogptError
from .layouts import (
    EPS,
    EXACT,
    HPARAMS,
    LAYER_NORMS,
    SETTINGS,
    check_hparams,
    gguf_name,
    hugging_face_name,
    parameter_tree,
)
from .loader import leaves

PACKAGES = {"safetensors": "safetensors.numpy", "gguf": "gguf"}
FORMATS = tuple(PACKAGES)
DTYPES = ("float32", "float16")
GGUF_FILE = "model.gguf"


def save(
    path: str | Path,
    encoder: Encoder,
    hparams: dict[str, int],
    params: dict[str, Any],
    *,
    format: str | None = None,
    dtype: str = "float32",
) -> None:
    """Writes a model in Hugging Face's layout, for `load` and for transformers, or as a GGUF.

    Args:
        path: where to: a folder that does not exist yet, or is empty, or a new file where it ends
            in .gguf. It is a model only when all is written.
        encoder, hparams, params: as `load` returns them.
        format: "safetensors" or "gguf", which llama.cpp runs; None: by the end of the path.
        dtype: "float32", or "float16" for all but, in a GGUF, positions, biases and layer norms.

    Raises:
        PicogptError: there is something already, the three do not fit each other or the format, or
            the package safetensors or gguf is not installed.
        OSError: a file cannot be written.

    >>> from picogpt import load, save
    >>> encoder, hparams, params = load("tales")
    >>> shallow = params | {"blocks": params["blocks"][:3]}
    >>> save("half-of-tales", encoder, hparams | {"n_layer": 3}, shallow)
    >>> load("half-of-tales").hparams["n_layer"]
    3
    """
    path = Path(path).resolve()
    is_file = path.suffix == ".gguf"
    format = format or FORMATS[is_file]
    for name, value, allowed in (("format", format, FORMATS), ("dtype", dtype, DTYPES)):
        if value not in allowed:
            raise PicogptError(f"{name}: is {value!r:.40}; expected {' or '.join(allowed)}")
    if is_file and format != "gguf":
        raise PicogptError(f"{path}: ends in .gguf; expected a folder for {format}")
    if path.exists() and (is_file or not path.is_dir() or any(path.iterdir())):
        kind = "file" if is_file else "folder"
        raise PicogptError(f"{path}: holds something already; choose a new {kind}")
    _check_package(format)
    whole = {n: int(x) if isinstance(x, Integral) else x for n, x in hparams.items()}
    hparams = check_hparams(whole, {name: name for name in HPARAMS}, "hparams")
    if encoder.n_vocab != hparams["n_vocab"]:
        found = f"encoder: has {encoder.n_vocab} tokens"
        raise PicogptError(f"{found}; hparams have {hparams['n_vocab']}")
    params = {name: value for name, value in params.items() if value is not None}
    tensors = _collect(hparams, params)
    settings = _settings(params)
    if format == "gguf":
        _save_gguf(path, encoder, hparams, tensors, settings, dtype)
    else:
        _save_hugging_face(path, encoder, hparams, tensors, settings, dtype)


def _check_package(format_: str) -> None:
    import importlib

    try:
        importlib.import_module(PACKAGES[format_])
    except ImportError:
        raise PicogptError(f'{format_}: is not installed; run "pip install {format_}"') from None


def _collect(hparams: dict[str, int], params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of a tree, checked, by their names in OpenAI's release."""
    try:
        n_inner = np.shape(params["blocks"][0]["mlp"]["c_fc"]["b"])[-1]
    except (IndexError, KeyError, TypeError):
        n_inner = None  # what is wrong is told below
    names = parameter_tree(hparams, lambda name, shape: (name, shape), n_inner, "lm_head" in params)
    tensors = {}
    for path, (name, shape), value in leaves(names, params):
        tensor = np.asarray(value)
        if tensor.shape != shape or tensor.dtype.kind != "f":
            found = f"is {tensor.dtype} {tensor.shape}"
            raise PicogptError(f"{path}: {found}; expected floating-point {shape} by hparams")
        tensors[name] = tensor
    return tensors


def _settings(params: dict[str, Any]) -> dict[str, Any]:
    """What a tree says beside its arrays: the one eps, and whether its gelu is the exact one."""
    norms = [params["ln_f"], *(block[name] for block in params["blocks"] for name in LAYER_NORMS)]
    if len(all_eps := {float(norm.get("eps", EPS)) for norm in norms}) > 1:
        raise PicogptError(f"params: have the eps {sorted(all_eps)}; a file has one")
    has_erf = {"erf" in block["mlp"] for block in params["blocks"]}
    if len(has_erf) > 1:
        raise PicogptError("params: have erf in some blocks only; expected one gelu")
    n_inner = params["blocks"][0]["mlp"]["c_fc"]["b"].shape[-1]
    return {"eps": all_eps.pop(), "has_erf": has_erf.pop(), "n_inner": n_inner}


def _narrow(name: str, tensor: np.ndarray, dtype: str) -> np.ndarray:
    """A copy in rows, in a type that has room for all its numbers."""
    with np.errstate(over="ignore"):
        narrow = np.ascontiguousarray(tensor, dtype)
    if narrow.dtype != tensor.dtype and not np.isfinite(narrow).all() and np.isfinite(tensor).all():
        raise PicogptError(f"{name}: holds numbers that {dtype} has no room for; use float32")
    return narrow


def _save_hugging_face(
    folder: Path,
    encoder: Encoder,
    hparams: dict[str, int],
    tensors: dict[str, np.ndarray],
    settings: dict[str, Any],
    dtype: str,
) -> None:
    from safetensors.numpy import save_file

    stored = {}
    for name, tensor in tensors.items():
        theirs = hugging_face_name(name)
        stored[theirs if theirs == HEAD else BODY + theirs] = _narrow(name, tensor, dtype)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        **{name: allowed[0] for name, allowed in SETTINGS.items() if allowed[0] is not None},
        **({"activation_function": EXACT[0]} if settings["has_erf"] else {}),
        **{theirs: hparams[name] for name, theirs in HPARAMS.items()},
        "n_inner": settings["n_inner"],
        "layer_norm_epsilon": settings["eps"],
        "tie_word_embeddings": "model/lm_head" not in tensors,
        "bos_token_id": encoder.end_of_text,
        "eos_token_id": encoder.end_of_text,
        "dtype": dtype,
    }
    with _whole(folder, "model.safetensors", "config.json.part", *SAVED_FILES):
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        encoder.save(folder)
        part = folder / "config.json.part"
        part.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        shutil.copymode(part, folder / "model.safetensors")  # which was made for its owner only
        part.replace(folder / "config.json")


@contextlib.contextmanager
def _whole(folder: Path, *names: str) -> Iterator[None]:
    """Makes a folder where there is none, and removes what was begun where it is not ended."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for name in names:
            (folder / name).unlink(missing_ok=True)
        if is_new:
            folder.rmdir()
        raise


def _save_gguf(
    path: Path,
    encoder: Encoder,
    hparams: dict[str, int],
    tensors: dict[str, np.ndarray],
    settings: dict[str, Any],
    dtype: str,
) -> None:
    import gguf

    if settings["has_erf"]:
        raise PicogptError(
            "params: have erf, the exact gelu, which llama.cpp's gpt2 does not compute"
        )
    if isinstance(encoder, CharacterEncoder):
        raise PicogptError("encoder: has single characters and no merges, which a GGUF must have")
    folder, name = (path.parent, path.name) if path.suffix == ".gguf" else (path, GGUF_FILE)
    part = folder / f"{name}.part"
    with _whole(folder, part.name):
        writer = gguf.GGUFWriter(part, "gpt2")
        try:
            _add_metadata(writer, encoder, hparams, settings, dtype)
            types = {
                n: dtype if t.ndim == 2 and n != "model/wpe" else "float32"
                for n, t in tensors.items()
            }
            for n, tensor in tensors.items():
                shape = tensor.shape[::-1] if n.endswith("/w") else tensor.shape  # as in nn.Linear
                kind = np.dtype(types[n])
                writer.add_tensor_info(gguf_name(n), shape, kind, tensor.size * kind.itemsize)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for n, tensor in tensors.items():
                turned = tensor.T if n.endswith("/w") else tensor
                writer.write_tensor_data(_narrow(n, turned, types[n]))
        finally:
            writer.close()
        part.replace(folder / name)


def _add_metadata(
    writer: Any, encoder: Encoder, hparams: dict[str, int], settings: dict[str, Any], dtype: str
) -> None:
    import gguf

    writer.add_file_type(
        getattr(gguf.LlamaFileType, {"float32": "ALL_F32", "float16": "MOSTLY_F16"}[dtype])
    )
    writer.add_context_length(hparams["n_ctx"])
    writer.add_embedding_length(hparams["n_embd"])
    writer.add_feed_forward_length(settings["n_inner"])
    writer.add_head_count(hparams["n_head"])
    writer.add_block_count(hparams["n_layer"])
    writer.add_layer_norm_eps(settings["eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    special = {token: text for text, token in encoder._special_ids.items()}
    tokens = [
        encoder.decoder[i] if i not in special else special[i] for i in range(encoder.n_vocab)
    ]
    kinds = gguf.TokenType
    writer.add_token_list(tokens)
    writer.add_token_types(
        [kinds.CONTROL if i in special else kinds.NORMAL for i in range(len(tokens))]
    )
    writer.add_token_merges(encoder.merges)
    writer.add_add_bos_token(False)
    if encoder.end_of_text is not None:
        writer.add_bos_token_id(encoder.end_of_text)
        writer.add_eos_token_id(encoder.end_of_text)
