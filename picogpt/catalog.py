"""Which models there are, and where they lie."""

import os
import re
from pathlib import Path

from . import download
from .download import OFFICIAL
from .errors import PicogptError

BUNDLED = ("tales",)
OLD_NAMES = {"117M": "124M", "345M": "355M"}


def default_model(weights_dir: str | Path | None = None) -> str:
    """The model to run when none is named: $PICOGPT_MODEL, else 124M if it is there, else tales."""
    if model := os.environ.get("PICOGPT_MODEL"):
        return model
    return "124M" if download.is_complete(weights_folder(weights_dir) / "124M") else "tales"


def weights_folder(weights_dir: str | Path | None = None) -> Path:
    """The folder of the official models: as given, else $PICOGPT_WEIGHTS, else in the cache."""
    if weights_dir := weights_dir or os.environ.get("PICOGPT_WEIGHTS"):
        return Path(weights_dir).expanduser().absolute()
    import platformdirs

    return platformdirs.user_cache_path("picogpt", appauthor=False)


def find_model(
    model: str | Path, weights_dir: str | Path | None = None, *, fetch: bool = True
) -> Path:
    """Returns the folder of a model, absolute.

    Args:
        model, weights_dir: as for `load`.
        fetch: an official one that is not complete; else it is returned as it is.

    Raises:
        PicogptError: no model is called that, or it cannot be fetched.
    """
    if model in BUNDLED:
        return _bundled_folder() / model
    if model in OFFICIAL:
        folder = weights_folder(weights_dir) / str(model)
        if fetch and not download.is_complete(folder):
            download.fetch(str(model), folder)
        return folder
    if model in OLD_NAMES:
        raise PicogptError(f"{model}: was renamed; use {OLD_NAMES[str(model)]}")
    folder = Path(model).absolute()
    is_name = isinstance(model, str) and not re.search(r"[/\\]", model)
    if is_name and not (model and folder.is_dir()):
        names = ", ".join((*BUNDLED, *OFFICIAL))
        raise PicogptError(f"{model}: neither a model nor a folder; the models are {names}")
    return folder


def _bundled_folder() -> Path:
    from importlib import resources

    try:
        return Path(str(resources.files("picogpt.weights")))
    except ModuleNotFoundError:  # Python took picogpt from its source tree, the folder it runs in
        return Path(str(resources.files("picogpt"))).parent / "weights"
