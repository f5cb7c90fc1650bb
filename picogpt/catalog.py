"""Which models there are, and where they lie."""

import os
import re
from pathlib import Path

from . import download
from .download import OFFICIAL
from .errors import PicogptError, read_json

BUNDLED = ("tales",)
OLD_NAMES = {"117M": "124M", "345M": "355M"}
HUB_NAMES = {"gpt2": "124M", "gpt2-medium": "355M", "gpt2-large": "774M", "gpt2-xl": "1558M"}
HUB = re.compile(  # owner/name, perhaps with @revision
    r"(?P<name>(?!\.{1,2}/)[\w.-]+/(?!\.{1,2}(@|$))[\w.-]+)(@(?P<revision>(?!.*\.\.)\w[\w./-]*))?",
    re.ASCII,
)


def default_model(weights_dir: str | Path | None = None, adapter: str | Path | None = None) -> str:
    """The model to run when none is named: the one that the adapter was made for, else
    $PICOGPT_MODEL, else 124M if it is in the weights folder, else tales.

    Raises:
        PicogptError: the one that the adapter was made for is not here, and there is no
            $PICOGPT_MODEL.
    """
    chosen = os.environ.get("PICOGPT_MODEL")
    if adapter is not None and (base := _read_base(Path(find_adapter(adapter)))):
        if _is_here(base, weights_dir):
            return base
        if not chosen:
            raise PicogptError(
                f"{adapter}: was made for {base:.100}, which is not here; name a model"
            )
    if chosen:
        return chosen
    return "124M" if download.is_complete(weights_folder(weights_dir) / "124M") else "tales"


def _read_base(adapter: Path) -> str | None:
    """The name of the model that an adapter was made for, if its settings tell."""
    config = adapter / "adapter_config.json"
    base = read_json(config).get("base_model_name_or_path") if config.is_file() else None
    return base if isinstance(base, str) and base else None


def _is_here(model: str, weights_dir: str | Path | None) -> bool:
    try:
        path = find_model(model, weights_dir, fetch=False)
    except PicogptError:
        return False
    return path.is_file() or path.is_dir()


def weights_folder(weights_dir: str | Path | None = None) -> Path:
    """The folder of the official models: as given, else $PICOGPT_WEIGHTS, else in the cache."""
    if weights_dir := weights_dir or os.environ.get("PICOGPT_WEIGHTS"):
        return Path(weights_dir).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("picogpt", appauthor=False)


def find_model(
    model: str | Path, weights_dir: str | Path | None = None, *, fetch: bool = True
) -> Path:
    """Returns the folder or file of a model, absolute.

    Args:
        model, weights_dir: as for `load`.
        fetch: one of the network that is not here; else an official one is returned as it is.

    Raises:
        PicogptError: no model is called that, or it cannot be fetched.
    """
    if model in BUNDLED:
        return _bundled_folder() / model
    path = Path(model).absolute()
    name = model if isinstance(model, str) else ""
    official = name if name in OFFICIAL or (name and path.exists()) else HUB_NAMES.get(name, name)
    if official in OFFICIAL:
        folder = weights_folder(weights_dir) / official
        cached = (
            None if download.is_complete(folder) else find_cached(OFFICIAL[official].repository)
        )
        if fetch and not (cached or download.is_complete(folder)):
            download.fetch(official, folder)
        return cached or folder
    if name in OLD_NAMES:
        raise PicogptError(f"{model}: was renamed; use {OLD_NAMES[name]}")
    if name and not path.exists() and (found := HUB.fullmatch(name)):
        return _find_hub(found["name"], found["revision"] or "main", fetch)
    is_name = isinstance(model, str) and not re.search(r"[/\\]", model)
    if is_name and not (model and path.exists()):
        names = ", ".join((*BUNDLED, *OFFICIAL))
        raise PicogptError(
            f"{model}: neither a model nor a folder; the models are {names}, "
            "and owner/name of the Hub"
        )
    return path


def find_adapter(adapter: str | Path) -> str | Path:
    """Returns the folder of an adapter: as it is given, or of one of the Hub, which is fetched.

    Args:
        adapter: as for `load`.

    Raises:
        PicogptError: it cannot be fetched.
    """
    found = HUB.fullmatch(adapter) if isinstance(adapter, str) else None
    if not found or Path(adapter).exists():
        return adapter
    return _find_hub(found["name"], found["revision"] or "main", fetch=True)


def _find_hub(name: str, revision: str, fetch: bool) -> Path:
    if cached := find_cached(name, revision):
        return cached
    if not fetch:
        raise PicogptError(f'{name}: is not here; run "picogpt download {name}"')
    return download.fetch_from_hub(name, revision)


def hub_cache() -> Path:
    """The folder where huggingface_hub keeps what it has fetched."""
    environ = os.environ
    home = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = environ.get("HF_HOME") or f"{home}/huggingface"
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(cache).expanduser().absolute()


def find_cached(name: str, revision: str = "main") -> Path | None:
    """Returns the folder of a model or an adapter of the Hub that is in its cache, whole, or None.

    Args:
        name: "owner/name".
        revision: a branch, a tag or a commit.
    """
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    ref = repository / "refs" / revision
    try:
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    except (OSError, ValueError):
        return None
    folder = repository / "snapshots" / commit
    return folder if re.fullmatch(r"\w+", commit) and _is_whole(folder) else None


def list_cached() -> list[str]:
    """The names of the GPT-2s in the Hub's cache."""
    names = []
    for repository in sorted(hub_cache().glob("models--*--*")):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        folder = find_cached(name)
        if not folder or (folder / "adapter_config.json").is_file():
            continue
        try:
            config = folder / "config.json"
            is_gpt2 = not config.is_file() or read_json(config).get("model_type") == "gpt2"
        except (PicogptError, OSError):
            is_gpt2 = False
        if is_gpt2:
            names.append(name)
    return names


def _is_whole(folder: Path) -> bool:
    """Whether a folder of the cache has weights, and all shards of them."""
    files = {path.name for path in folder.glob("*") if path.is_file()}
    index = next((name for name in sorted(files) if name.endswith(".index.json")), None)
    if index and not files & {"model.safetensors", "pytorch_model.bin"}:
        try:
            return files.issuperset(read_json(folder / index).get("weight_map", {}).values())
        except (AttributeError, PicogptError, OSError, TypeError):
            return False
    return any(re.fullmatch(pattern, file) for pattern in download.HUB_WEIGHTS for file in files)


def _bundled_folder() -> Path:
    from importlib import resources

    try:
        return Path(str(resources.files("picogpt.weights")))
    except ModuleNotFoundError:  # Python took picogpt from its source tree, the folder it runs in
        return Path(str(resources.files("picogpt"))).parent / "weights"
