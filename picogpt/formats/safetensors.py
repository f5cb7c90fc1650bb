"""safetensors: the length of a header in 8 bytes, the header in JSON, and the bytes of the tensors.

The tensors lie one behind the other.

Source: the section "Format" of huggingface/safetensors' README.
"""

import json
import math
from pathlib import Path
from typing import Any

from ..errors import PicogptError, refuse_pointer
from .tensors import BYTES_OF, MAX_AXES, DamagedError, Entry, Listing, refuse_pipe

MAX_HEADER_BYTES = 2 << 20
SUFFIXES = (".safetensors",)
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def matches(head: bytes, tail: bytes) -> bool:
    """Whether a file begins with a length and a JSON object."""
    return head[8:9] == b"{"


def list_tensors(path: Path) -> Listing:
    """Reads which tensors a safetensors file holds.

    Raises:
        PicogptError: the file is damaged, cut short, or is none.
        OSError: it cannot be read.
    """
    refuse_pipe(path)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(8)
        length = int.from_bytes(head, "little")
        data = file.read(min(length, MAX_HEADER_BYTES))
    refuse_pointer(path, head + data)
    try:
        if size < 8 or length > MAX_HEADER_BYTES:
            raise DamagedError("begins with no length of a header")
        if length > size - 8:
            raise PicogptError(f"{path}: {size} bytes; its header alone has {8 + length}")
        entries = _parse_header(data, path)
    except DamagedError as error:
        raise PicogptError(f"{path}: {error}; is damaged or no safetensors file") from None
    end = max((entry.offset + entry.size for entry in entries.values()), default=8 + length)
    if size != end:
        raise PicogptError(f"{path}: {size} bytes; expected {end}; fetch it again")
    return Listing(entries)


def _parse_header(data: bytes, path: Path) -> dict[str, Entry]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise DamagedError("has a header that is no JSON object")
    header.pop("__metadata__", None)
    end = 8 + len(data)
    entries = {name: _entry(name, value, path, end) for name, value in header.items()}
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.size)):
        if entry.offset != end:
            raise DamagedError("has tensors that do not lie one behind the other")
        end += entry.size
    return entries


def _entry(name: str, value: Any, path: Path, start: int) -> Entry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, places = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(places, list)):
        raise DamagedError(f"{name:.100} has no dtype, shape or data_offsets")
    is_whole = all(type(number) is int and 0 <= number < 1 << 48 for number in shape + places)
    if not is_whole or len(shape) > MAX_AXES or len(places) != 2 or places[0] > places[1]:
        raise DamagedError(f"{name:.100} has an impossible shape or place")
    dtype, size = DTYPES.get(dtype, dtype.upper()), places[1] - places[0]
    if dtype in BYTES_OF and math.prod(shape) * BYTES_OF[dtype] != size:
        raise DamagedError(f"{name:.100} has {size} bytes for the shape {tuple(shape)}")
    return Entry(dtype, tuple(shape), path, start + places[0], size)
