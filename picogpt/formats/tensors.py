"""What a file says of a tensor, and the tensor itself: mapped where it lies, or widened.

Each format has a file of its own beside this one, whose `list_tensors` says at which bytes of which
file each tensor lies; `read_tensors` maps tensors of float32 from the disk, to be used where they
lie, and widens others. Nothing that a file says is believed before it is checked: a damaged or
hostile file ends in PicogptError.
"""

import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from ..errors import PicogptError, refuse_pointer

PIECE_BYTES = 1 << 22  # read at once of a tensor that cannot be used where it lies
MAX_KEYS = 50_000
MAX_AXES = 8
BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}  # the types read here


class Checksum(NamedTuple):
    """What a file says about some of its bytes."""

    kind: Literal["crc32c", "crc32"]
    value: int
    offset: int
    size: int


class Entry(NamedTuple):
    """What a file says about one tensor."""

    dtype: str  # as in BYTES_OF, or the name of a type that is not read here
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes
    size: int  # bytes
    checksum: Checksum | None = None  # of these bytes, or of more; where the format has one
    byte_order: Literal["<", ">"] = "<"
    strides: tuple[int, ...] | None = None  # in elements; None: one row behind the other
    read: "Callable[[str, Entry], np.ndarray] | None" = None  # where it takes more than its bytes

    def transposed(self) -> "Entry":
        """The same tensor with its two axes the other way round: where it lies, nothing moves."""
        rows, columns = self.shape
        return self._replace(shape=(columns, rows), strides=(self.strides or (columns, 1))[::-1])


class Listing(dict[str, Entry]):
    """The tensors of a file by their names, and in `metadata` what else it says."""

    def __init__(
        self, entries: Mapping[str, Entry], metadata: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(entries)
        self.metadata = dict(metadata or {})


class DamagedError(Exception):
    """What is wrong with a file's list of its tensors; who reads it adds which."""


def read_tensors(entries: Mapping[str, Entry], *, verify: bool = True) -> dict[str, np.ndarray]:
    """Returns tensors in float32: mapped from the disk, read-only, or widened in memory.

    Only those stored in another type, unaligned or big-endian are copied.

    Args:
        entries: as `list_tensors` returns them, those that are wanted.
        verify: compare the checksums, where there are some, which reads all of the tensors.

    Raises:
        PicogptError: a file is too short, a checksum is wrong, a type is not a floating-point one,
            or a tensor needs a package that is not installed.
        OSError: a file cannot be read.
    """
    needed: dict[Path, int] = {}
    for entry in entries.values():
        needed[entry.file] = max(needed.get(entry.file, 0), entry.offset + entry.size)
    files = {file: _map(file, size) for file, size in needed.items()}
    if verify:
        _check(entries, files)
    tensors = {}
    for name, entry in entries.items():
        if entry.read:
            tensor = entry.read(name, entry)
        elif entry.dtype not in BYTES_OF:
            found = f"{name} has the type {entry.dtype}"
            raise PicogptError(f"{entry.file}: {found}; expected a floating-point type")
        elif _is_mapped(entry):
            tensor = files[entry.file][entry.offset : entry.offset + entry.size].view("<f4")
        else:
            tensor = _widen(entry)
        if entry.strides is None:
            tensors[name] = tensor.reshape(entry.shape)
        else:
            steps = [4 * step for step in entry.strides]
            tensors[name] = as_strided(tensor, entry.shape, steps, writeable=tensor.flags.writeable)
    return tensors


def _is_mapped(entry: Entry) -> bool:
    return entry.dtype == "float32" and entry.byte_order == "<" and not entry.offset % 4


def _widen(entry: Entry) -> np.ndarray:
    """A tensor read piece by piece, so that memory holds nothing but the result."""
    tensor = np.empty(entry.size // BYTES_OF[entry.dtype], np.float32)
    done = 0
    for data in _pieces(entry.file, entry.offset, entry.size):
        if entry.dtype == "bfloat16":  # the upper half of a float32
            upper = data.view(f"{entry.byte_order}u2").astype(np.uint32)
            piece = (upper << 16).view(np.float32)
        else:
            piece = data.view(np.dtype(entry.dtype).newbyteorder(entry.byte_order))
        tensor[done : done + len(piece)] = piece
        done += len(piece)
    return tensor


def _pieces(file: Path, offset: int, size: int) -> Iterator[np.ndarray]:
    for start in range(0, size, PIECE_BYTES):
        n_bytes = min(PIECE_BYTES, size - start)
        yield np.fromfile(file, np.uint8, n_bytes, offset=offset + start)


def _check(entries: Mapping[str, Entry], files: dict[Path, np.ndarray]) -> None:
    """Compares each checksum once; what will be used where it lies is not copied for it either."""
    import zlib

    import google_crc32c

    extend = {"crc32": lambda crc, data: zlib.crc32(data, crc), "crc32c": google_crc32c.extend}
    kinds = {entry.checksum.kind for entry in entries.values() if entry.checksum}
    if "crc32c" in kinds and google_crc32c.implementation == "python":
        warnings.warn("checksums not checked: google-crc32c lacks its C code", stacklevel=4)
        del extend["crc32c"]
    done = set()
    for name, entry in entries.items():
        checksum = entry.checksum
        if not checksum or checksum.kind not in extend or (entry.file, checksum) in done:
            continue
        done.add((entry.file, checksum))
        _, value, start, size = checksum
        mapped = files[entry.file][start : start + size]
        pieces = [mapped] if _is_mapped(entry) else _pieces(entry.file, start, size)
        crc = 0
        for piece in pieces:
            crc = extend[checksum.kind](crc, piece)
        if crc != value:
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
