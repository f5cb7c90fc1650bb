"""Which format a file has, by what it holds, and files that list others.

A format is a module beside this one. It has `matches`, which looks at the first and the last bytes
of a file, `list_tensors`, and `SUFFIXES`: where what a file holds tells nothing, the format that
its name promises says what is wrong with it.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from ..errors import PicogptError, find_files, read_json, refuse_pointer
from . import __path__
from .tensors import MAX_KEYS, Listing, refuse_pipe

HEAD_BYTES = 512
TAIL_BYTES = 8


def find_format(path: Path) -> ModuleType | None:
    """Returns the module that reads a file, or None where it is in none of the formats.

    Raises:
        PicogptError: it is a Git LFS pointer, or no file.
        OSError: it cannot be read.
    """
    refuse_pipe(path)
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
        tail = file.read()
    refuse_pointer(path, head)
    return next((module for module in _formats() if module.matches(head, tail)), None)


def _formats() -> Iterator[ModuleType]:
    for found in pkgutil.iter_modules(__path__):
        if found.name not in ("files", "tensors"):
            yield importlib.import_module(f".{found.name}", __package__)


def list_tensors(path: Path) -> Listing:
    """Reads which tensors a file holds, or the files beside it that it lists (`*.index.json`).

    Raises:
        PicogptError: a file is damaged, cut short, or in none of the formats.
        OSError: one cannot be read.
    """
    if not path.name.endswith(".index.json"):
        named = (module for module in _formats() if path.suffix in module.SUFFIXES)
        module = find_format(path) or next(named, None)
        if not module:
            names = ", ".join(format_.__name__.rpartition(".")[2] for format_ in _formats())
            raise PicogptError(f"{path}: holds no tensors; expected one of the formats {names}")
        listing: Listing = module.list_tensors(path)
        return listing
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict):
        raise PicogptError(f"{path}: has no weight_map; expected the shard of each tensor")
    files: dict[str, Listing] = {}
    for name, file in shards.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]*", file):
            raise PicogptError(f"{path}: {name} is in {file!r:.60}; expected a file beside this")
        files.setdefault(file, Listing({}))
    find_files(path.parent, *sorted(files))
    for file in files:
        files[file] = list_tensors(path.with_name(file))
        if sum(map(len, files.values())) > MAX_KEYS:
            raise PicogptError(f"{path}: its shards have more than {MAX_KEYS} names")
    if lost := [name for name, file in shards.items() if name not in files[file]]:
        raise PicogptError(f"{path}: {lost[0]} is not in {shards[lost[0]]}; fetch both again")
    return Listing({name: files[file][name] for name, file in shards.items()})
