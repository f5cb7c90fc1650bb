"""LoRA adapters, as PEFT writes them: little matrices, merged into those that they were made for.

An adapter's folder holds adapter_config.json, which says what is adapted and how strongly, and
adapter_model.safetensors. For a matrix w [n_in, n_out] of the model it has lora_A [r, n_in] and
lora_B [n_out, r], and the fine-tuned matrix is

    w + (alpha / r) * lora_A.T @ lora_B.T

or alpha / sqrt(r) in rank-stabilized LoRA. Modules that modules_to_save names are there as a whole,
and take the place of the model's.

Source: LoRA, https://arxiv.org/abs/2106.09685. The folder's layout, and which names it means, are
as in https://github.com/huggingface/peft.
"""

import math
import re
from collections.abc import Iterable, Iterator
from numbers import Real
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import numpy as np

from .backend import array_module
from .errors import MAX_TOLD, PicogptError, find_files, read_json
from .formats.files import list_tensors
from .formats.tensors import Entry, read_tensors

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors or adapter_model.bin")
PREFIX = "base_model.model."  # comes before all names in an adapter
BODY = "transformer."  # comes before the names of a GPT2LMHeadModel, but that of the head
HEAD = "lm_head.weight"
ENDS = {"g": "weight", "w": "weight", "b": "bias"}  # of names, here and there
MATRICES = re.compile(r"(.*\.)?(c_attn|c_proj|c_fc)")
# What adapter_config.json may say, first what it means to leave it out.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM", "FEATURE_EXTRACTION"),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
# These say where it comes from and how it was trained. Whatever else is set is refused: DoRA and
# its like change what the little matrices mean, PiSSA and its like the model below them.
IDLE = {"auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode"}
IDLE |= {"fan_in_fan_out", "lora_dropout", "runtime_config", "megatron_config", "megatron_core"}
IDLE |= {"eva_config", "loftq_config", "corda_config", "lora_ga_config", "qalora_group_size"}
IDLE |= {"merge_weights"}
DEFAULTS: dict[str, Any] = {"r": 8, "lora_alpha": 8, "target_modules": ["c_attn"]}
DEFAULTS |= {"use_rslora": False, "ensure_weight_tying": False}
DEFAULTS |= {"rank_pattern": {}, "alpha_pattern": {}, "exclude_modules": [], "modules_to_save": []}
DEFAULTS |= {"layers_to_transform": [], "layers_pattern": []}
MATCH_SECONDS = 1  # a regular expression may take; some would take for ever

T = TypeVar("T")


class _Lora(NamedTuple):
    """What adapter_config.json says; `DEFAULTS` has what it means to leave something out."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    target_modules: str | list[str]
    exclude_modules: str | list[str]
    modules_to_save: list[str]
    ensure_weight_tying: bool
    layers_to_transform: int | list[int]
    layers_pattern: str | list[str]

    def is_target(self, module: str) -> bool:
        """Whether there are a lora_A and a lora_B for a module."""
        if _matches(self.exclude_modules, module):
            return False
        if any(_match(rf"(^|.*\.){name}($|\..*)", module) for name in self.modules_to_save):
            return False
        if isinstance(self.target_modules, str):
            if self.target_modules.lower() == "all-linear":
                return MATRICES.fullmatch(module) is not None
            return _matches(self.target_modules, module)
        if module in self.target_modules:
            return True
        return _matches(self.target_modules, module) and self.is_in_layers(module)

    def is_in_layers(self, module: str) -> bool:
        layers = self.layers_to_transform
        if layers == []:
            return True
        patterns = self.layers_pattern or []
        patterns = [patterns] if isinstance(patterns, str) else patterns
        starts = [rf"(?:^|.*?\.){pattern}" for pattern in patterns] or [r".*?\.[^.]*"]
        matches = (_match(rf"{start}\.(?P<layer>\d+)\.", module) for start in starts)
        found = next(filter(None, matches), None)
        wanted = layers if isinstance(layers, list) else [layers]
        return found is not None and int(found["layer"]) in wanted

    def is_saved(self, tensor: str) -> bool:
        """Whether a tensor is there as a whole."""
        parts = tensor.split(".")
        modules = [".".join(parts[:n]) for n in range(1, len(parts))]
        return any(module.endswith(tuple(self.modules_to_save)) for module in modules)

    def rank(self, module: str) -> int:
        return next(_values(self.rank_pattern, module), self.r)

    def scaling(self, module: str) -> float:
        rank = self.rank(module)
        alpha = next(_values(self.alpha_pattern, module), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _matches(names: str | list[str], module: str) -> bool:
    """A string is a regular expression; in a list are names, or ends of names."""
    if isinstance(names, str):
        return _match(rf"(?:{names})\Z", module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names)


def _values(patterns: dict[str, T], module: str) -> Iterator[T]:
    """Yields the values of the patterns that a module fits, all of it or its end."""
    return (value for key, value in patterns.items() if _match(rf"(.*\.)?({key})$", module))


def _match(pattern: str, module: str) -> Any:
    """As `re.match`, which PEFT uses, but not for ever."""
    import regex

    try:
        return regex.match(pattern, module, timeout=MATCH_SECONDS)
    except (regex.error, OverflowError, RecursionError, ValueError) as error:
        raise PicogptError(f"{pattern!r:.60} is no regular expression, {error}") from None
    except TimeoutError:
        raise PicogptError(f"{pattern!r:.60} takes for ever to match {module}") from None


def merge_adapter(
    params: dict[str, Any], adapter: str | Path, *, scale: float = 1.0
) -> dict[str, Any]:
    """Merges a LoRA adapter into a model's parameters.

    Args:
        params: as `load` returns them; not changed.
        adapter: the folder that PEFT wrote, with adapter_config.json and adapter_model.safetensors.
        scale: how much of it to add; -1 takes away what 1 has added. One that replaces whole
            modules (modules_to_save) can be merged at 1 only.

    Returns:
        A tree like params, with new arrays in place of those that the adapter changes; the others
        are shared. Where it replaces one of wte and lm_head and not the other, there is an lm_head.

    Raises:
        PicogptError: the adapter is damaged, of another kind, or was made for another model.
        OSError: a file cannot be read.

    Source: PEFT's merge_and_unload.

    >>> from picogpt import load, merge_adapter
    >>> encoder, hparams, params = load("tales")
    >>> merged = merge_adapter(params, "path/to/adapter")  # or load("tales", adapter=...)
    >>> merged["wpe"] is params["wpe"]  # which this adapter leaves alone
    True
    >>> half_as_strong = merge_adapter(params, "path/to/adapter", scale=0.5)
    """
    if not isinstance(scale, Real) or not -1e30 < (factor := float(scale)) < 1e30:
        raise PicogptError(f"scale: is {scale!r:.40}; expected a finite number")
    if not isinstance(params, dict) or not {"wte", "blocks"} <= params.keys():
        raise PicogptError(f"params: is a {type(params).__name__}; expected that of load")
    config, path = _find(adapter)
    lora = _read_config(config)
    if lora.modules_to_save and scale != 1:
        found = f"modules_to_save is {lora.modules_to_save!r:.60}"
        raise PicogptError(f"{config}: {found}; whole modules cannot be scaled by {scale}")

    stored = _read_names(path)
    merged: dict[str, Any] = _copy(params)
    body = BODY if any(name.startswith(BODY) for name in stored) else ""
    places = dict(_places(merged, body))
    if body:
        places[HEAD] = (merged, "lm_head")
    try:
        targets = _targets(lora, places)
        replaced = [name for name in places if lora.is_saved(name)]
    except PicogptError as error:
        raise PicogptError(f"{config}: {error}") from None
    if lora.ensure_weight_tying and HEAD in stored and f"{body}wte.weight" in replaced:
        replaced.append(HEAD)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in replaced:
        owner, key = places[name]
        shapes[name] = owner.get(key, merged["wte"]).shape
    for module, (rank, _) in targets.items():
        owner, key = places[f"{module}.weight"]
        n_in, n_out = owner[key].shape
        shapes[f"{module}.lora_A.weight"] = rank, n_in
        shapes[f"{module}.lora_B.weight"] = n_out, rank
    _check_shapes(path, {name: entry.shape for name, entry in stored.items()}, shapes)

    tensors = read_tensors({name: stored[name] for name in shapes})
    if f"{body}wte.weight" in replaced:
        merged.setdefault("lm_head", merged["wte"])  # which has not been trained
    for name in replaced:
        owner, key = places[name]
        owner[key] = _like(merged["wte"], tensors[name].copy(), f"{path}: {name}")
    for module, (_, scaling) in targets.items():
        owner, key = places[f"{module}.weight"]
        a, b = tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"]
        with np.errstate(all="ignore"):
            change = factor * scaling * (a.T @ b.T)
        owner[key] = owner[key] + _like(owner[key], change, f"{path}: {module}, at its scale,")
    return merged


def _find(adapter: str | Path) -> list[Path]:
    if adapter == "":
        raise PicogptError("adapter: is empty; expected a folder")
    folder = Path(adapter).absolute()
    return find_files(folder, *ADAPTER_FILES)


def _read_names(path: Path) -> dict[str, Entry]:
    """What a file holds, by names without `PREFIX`."""
    stored = list_tensors(path)
    for name in stored:
        if not name.startswith(PREFIX):
            raise PicogptError(f"{path}: {name:.100} does not begin with {PREFIX}, as all should")
    return {name.removeprefix(PREFIX): entry for name, entry in stored.items()}


def _targets(lora: _Lora, tensors: Iterable[str]) -> dict[str, tuple[int, float]]:
    """The modules that have a lora_A and a lora_B: rank and scaling of each."""
    modules = (name.removesuffix(".weight") for name in tensors if name.endswith(".weight"))
    found = {
        name: (lora.rank(name), lora.scaling(name)) for name in modules if lora.is_target(name)
    }
    others = ", ".join(module for module in found if not MATRICES.fullmatch(module))
    if others or not found:
        what = f"target_modules {lora.target_modules!r:.60} match {others or 'nothing'}"
        raise PicogptError(f"{what}; expected c_attn, c_proj or c_fc of a GPT-2")
    return found


def _like(array: Any, values: np.ndarray, what: str) -> Any:
    """Values in the library and dtype of an array."""
    if not np.isfinite(values).all():
        raise PicogptError(f"{what} is not finite; it is damaged, or the training of it failed")
    return array_module(array).asarray(values.astype(array.dtype, copy=False))


def _copy(tree: Any) -> Any:
    """A tree of its own, with the same arrays."""
    if isinstance(tree, dict):
        return {key: _copy(value) for key, value in tree.items() if value is not None}
    return [_copy(block) for block in tree] if isinstance(tree, list | tuple) else tree


def _places(tree: dict[str, Any], path: str) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    """Yields transformers' name of each array, and where it is: the dict that holds it, and key."""
    for key, value in tree.items():
        if key == "blocks":
            for i, block in enumerate(value):
                yield from _places(block, f"{path}h.{i}.")
        elif isinstance(value, dict):
            yield from _places(value, f"{path}{key}.")
        elif key not in ("eps", "erf"):
            name = path + ENDS[key] if key in ENDS else f"{path}{key}.weight"
            if key != "lm_head":  # of which the caller decides
                yield name, (tree, key)


def _read_config(path: Path) -> _Lora:
    config = read_json(path)
    for name, allowed in SETTINGS.items():
        if (value := config.get(name, allowed[0])) not in allowed:
            raise PicogptError(f"{path}: {name} is {value!r:.60}; expected {allowed[0]!r}")
    known = {*IDLE, *SETTINGS, *_Lora._fields}
    for name, value in config.items():
        if name not in known and value not in (None, False):
            raise PicogptError(f"{path}: {name} is {value!r:.60}; expected LoRA without it")

    fields = {name: config[name] for name in _Lora._fields if config.get(name) is not None}
    for name, value in fields.items():
        hint = _Lora.__annotations__[name]
        if not _is_a(value, hint):
            expected = hint.__name__ if isinstance(hint, type) and not get_args(hint) else hint
            raise PicogptError(f"{path}: {name} is {value!r:.60}; expected {expected}")
    lora = _Lora(**(DEFAULTS | fields))
    if lora.layers_to_transform != [] and isinstance(lora.target_modules, str):
        found = "layers_to_transform and a regular expression in target_modules"
        raise PicogptError(f"{path}: {found}; expected one of them")
    if lora.layers_pattern and lora.layers_to_transform == []:
        raise PicogptError(f"{path}: layers_pattern without layers_to_transform; expected both")
    for rank in (lora.r, *lora.rank_pattern.values()):
        if not 0 < rank < 1 << 31:
            raise PicogptError(f"{path}: a rank is {rank!r:.40}; expected 1 to 2147483647")
    for alpha in (lora.lora_alpha, *lora.alpha_pattern.values()):
        if not abs(alpha) < 1e30:
            raise PicogptError(f"{path}: an alpha is {alpha!r:.40}; expected a number below 1e30")
    return lora


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value of JSON has the type that an annotation says."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return any(_is_a(value, part) for part in parts)
    if kind in (list, dict):
        values = value.values() if isinstance(value, dict) else value
        return isinstance(value, kind) and all(_is_a(item, parts[-1]) for item in values)
    return type(value) is hint or (hint is float and type(value) is int)


def _check_shapes(
    path: Path, stored: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    """Raises PicogptError if tensors are missing, unexpected or of another shape; names each, once
    for what is the same in several layers."""
    problems = [f"missing {name}" for name in expected if name not in stored]
    problems += [f"unexpected {name}" for name in stored if name not in expected]
    for name, shape in expected.items():
        if stored.get(name, shape) != shape:
            problems.append(f"{name} is {stored[name]}, expected {shape}")
    layers: dict[str, list[str]] = {}
    for problem in problems:
        layers.setdefault(re.sub(r"\bh\.\d+", "h.*", problem), []).append(problem)
    told = [every if len(each) > 1 else each[0] for every, each in layers.items()]
    if told:
        rest = [f"and {len(told) - MAX_TOLD} more"] if len(told) > MAX_TOLD else []
        what = "; ".join(told[:MAX_TOLD] + rest)
        raise PicogptError(f"{path}: does not fit {ADAPTER_FILES[0]} and this model: {what}")
