"""What a file says of a tensor, and the tensor itself: mapped where it lies, or widened.

Each format has a file of its own beside this one, whose `list_tensors` says at which bytes of which
file each tensor lies; `read_tensors` maps tensors of float32 from the disk, to be used where they
lie, and widens others. Nothing that a file says is believed before it is checked: a damaged or
hostile file ends in PicogptError.
"""

import math
import mmap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from ..errors import PicogptError, refuse_pointer

PIECE_BYTES = 1 << 22  # read at once of a tensor that cannot be used where it lies
MAX_KEYS = 50_000
MAX_AXES = 8
BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}  # the types read here


class Entry(NamedTuple):
    """What a file says about one tensor."""

    dtype: str  # as in BYTES_OF, or the name of a type that is not read here
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes
    size: int  # bytes
    crc: int | None = None  # masked CRC-32C of the bytes, where the format has one
    byte_order: Literal["<", ">"] = "<"
    read: "Callable[[str, Entry], np.ndarray] | None" = None  # where it takes more than its bytes


class DamagedError(Exception):
    """What is wrong with a file's list of its tensors; who reads it adds which."""


def read_tensors(entries: dict[str, Entry], *, verify: bool = True) -> dict[str, np.ndarray]:
    """Returns tensors in float32: mapped from the disk, read-only, or widened in memory.

    Only those stored in another type, unaligned or big-endian are copied.

    Args:
        entries: as `list_tensors` returns them, those that are wanted.
        verify: compare each tensor's checksum, where there is one, which reads all of it.

    Raises:
        PicogptError: a file is too short, a checksum is wrong, a type is not a floating-point one,
            or a tensor needs a package that is not installed.
        OSError: a file cannot be read.
    """
    import google_crc32c

    has_checksums = any(entry.crc is not None for entry in entries.values())
    if verify and has_checksums and google_crc32c.implementation == "python":
        warnings.warn("checksums not checked: google-crc32c lacks its C code", stacklevel=3)
        verify = False
    needed: dict[Path, int] = {}
    for entry in entries.values():
        needed[entry.file] = max(needed.get(entry.file, 0), entry.offset + entry.size)
    files = {file: _map(file, size) for file, size in needed.items()}
    tensors = {}
    for name, entry in entries.items():
        if entry.read:
            tensor = entry.read(name, entry)
        elif entry.dtype not in BYTES_OF:
            found = f"{name} has the type {entry.dtype}"
            raise PicogptError(f"{entry.file}: {found}; expected a floating-point type")
        elif entry.dtype == "float32" and entry.byte_order == "<" and not entry.offset % 4:
            data = files[entry.file][entry.offset : entry.offset + entry.size]
            if verify and entry.crc is not None:
                _check_crc(name, entry, google_crc32c.value(data))
            tensor = data.view("<f4")
        else:
            tensor = _widen(name, entry, verify and entry.crc is not None)
        tensors[name] = tensor.reshape(entry.shape)
    return tensors


def _widen(name: str, entry: Entry, verify: bool) -> np.ndarray:
    """A tensor read piece by piece, so that memory holds nothing but the result."""
    import google_crc32c

    tensor = np.empty(math.prod(entry.shape), np.float32)
    crc, done = 0, 0
    for start in range(0, entry.size, PIECE_BYTES):
        n_bytes = min(PIECE_BYTES, entry.size - start)
        data = np.fromfile(entry.file, np.uint8, n_bytes, offset=entry.offset + start)
        crc = google_crc32c.extend(crc, data) if verify else crc
        if entry.dtype == "bfloat16":  # the upper half of a float32
            upper = data.view(f"{entry.byte_order}u2").astype(np.uint32)
            piece = (upper << 16).view(np.float32)
        else:
            piece = data.view(np.dtype(entry.dtype).newbyteorder(entry.byte_order))
        tensor[done : done + len(piece)] = piece
        done += len(piece)
    if verify:
        _check_crc(name, entry, crc)
    return tensor


def _check_crc(name: str, entry: Entry, crc: int) -> None:
    if mask(crc) != entry.crc:
        raise PicogptError(f"{entry.file}: {name} is damaged (wrong checksum); fetch it again")


def refuse_pipe(file: Path) -> None:
    if file.exists() and not file.is_file():  # to open a pipe would wait for ever
        raise PicogptError(f"{file}: is no file; expected one with tensors")


def _map(file: Path, size: int) -> np.ndarray:
    """The bytes of a file that must have `size` of them or more."""
    refuse_pipe(file)
    with file.open("rb") as opened:
        found = opened.seek(0, 2)
        if found < size:
            opened.seek(0)
            refuse_pointer(file, opened.read(64))
            raise PicogptError(f"{file}: {found} bytes; expected {size}; fetch it again")
        if not found:
            return np.empty(0, np.uint8)
        try:
            mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:  # which does not say of which file
            raise PicogptError(f"{file}: {error.strerror}; {found} bytes to be mapped") from None
        return np.frombuffer(mapped, np.uint8)


def mask(crc: int) -> int:
    """A CRC-32C turned and shifted, as `Entry` has it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
