"""GGUF, the files of llama.cpp: metadata, the list of the tensors, and their bytes.

Everything in it is little-endian: the magic letters, the version, the number of tensors and of
metadata; each metadatum by its name, type and value; each tensor by its name, axes (the one that
runs fastest comes first), type and place; then, where the alignment says, the tensors. Types of
blocks of quantized numbers are widened by the package gguf.

Source: docs/gguf.md of ggml-org/ggml.
"""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import PicogptError
from .tensors import BYTES_OF, MAX_AXES, MAX_KEYS, PIECE_BYTES, DamagedError, Entry, Listing

SUFFIXES = (".gguf",)
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 1 << 24  # that of a GPT-2 has 2 MB
MAX_TEXTS = 1 << 19  # in all lists together
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
NUMBERS |= {12: "d"}  # the types of metadata, as `struct` calls them
TEXT, LIST = 8, 9
TYPES = {0: "float32", 1: "float16", 28: "float64", 30: "bfloat16"}  # of tensors; 30 is newer


def matches(head: bytes, tail: bytes) -> bool:
    """Whether a file begins with the magic letters."""
    return head.startswith(MAGIC)


def list_tensors(path: Path) -> Listing:
    """Reads which tensors a file holds, shapes with the axis that runs fastest last.

    Returns:
        the listing; its metadata are texts, numbers, lists of texts and arrays of numbers.

    Raises:
        PicogptError: the file is damaged or cut short, or of another version.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_HEADER_BYTES)
        size = file.seek(0, 2)
    try:
        header = _Header(data)
        metadata = header.read_metadata()
        entries = header.read_entries(path, metadata, size)
    except DamagedError as error:
        raise PicogptError(f"{path}: {error}; fetch it again") from None
    return Listing(entries, metadata)


class _Header:
    """Reads what comes before the tensors, from the front, never beyond its end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = len(MAGIC)
        self.n_texts = 0
        (version,) = self.unpack("I")
        if version not in VERSIONS:
            found = "is big-endian" if version >> 24 else f"is of version {version}"
            raise DamagedError(f"{found}; expected little-endian, version 3")
        self.n_tensors, self.n_metadata = self.unpack("QQ")
        if max(self.n_tensors, self.n_metadata) > MAX_KEYS:
            raise DamagedError(f"says that it has more than {MAX_KEYS} names")

    def take(self, n: int) -> int:
        """Goes n bytes on; returns where they begin."""
        if n > len(self.data) - self.at:
            raise DamagedError("is cut short, or has a length that reaches beyond its end")
        self.at += n
        return self.at - n

    def unpack(self, format_: str) -> tuple[Any, ...]:
        format_ = f"<{format_}"
        return struct.unpack_from(format_, self.data, self.take(struct.calcsize(format_)))

    def text(self) -> str:
        (n,) = self.unpack("Q")
        start = self.take(n)
        return self.data[start : start + n].decode("utf-8", "replace")

    def texts(self, n: int) -> list[str]:
        """Reads many in one go, since a vocabulary has 100,000."""
        self.n_texts += n
        if self.n_texts > MAX_TEXTS or 8 * n > len(self.data) - self.at:
            raise DamagedError(f"says that it has {n} texts")
        data, at, end = self.data, self.at, len(self.data)
        found = []
        for _ in range(n):
            start = at + 8
            at = start + int.from_bytes(data[at:start], "little")
            if at > end:
                raise DamagedError("is cut short, or has a length that reaches beyond its end")
            found.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind in NUMBERS:
            return self.unpack(NUMBERS[kind])[0]
        if kind == TEXT:
            return self.text()
        inner, n = self.unpack("IQ") if kind == LIST else (-1, 0)
        if inner == TEXT:
            return self.texts(n)
        if inner not in NUMBERS:
            raise DamagedError(f"has a metadatum of the type {kind}, {inner}")
        dtype = np.dtype(NUMBERS[inner]).newbyteorder("<")
        start = self.take(n * dtype.itemsize)
        return np.frombuffer(self.data, dtype, n, start)

    def read_metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(self.n_metadata):
            name, (kind,) = self.text(), self.unpack("I")
            metadata[name] = self.value(kind)
        return metadata

    def read_entries(self, path: Path, metadata: dict[str, Any], size: int) -> dict[str, Entry]:
        listed = []
        for _ in range(self.n_tensors):
            name, (n_axes,) = self.text(), self.unpack("I")
            if n_axes > MAX_AXES:
                raise DamagedError(f"{name:.100} has {n_axes} axes")
            listed.append((name, self.unpack(f"{n_axes}Q")[::-1], *self.unpack("IQ")))
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 16 or alignment % 8:
            raise DamagedError(f"has the alignment {alignment!r:.40}")
        start = -(-self.at // alignment) * alignment
        entries = {}
        for name, shape, type_, offset in listed:
            if math.prod(n or 1 for n in shape) >> 48 or name in entries:
                raise DamagedError(f"{name:.100} has an impossible shape, or comes twice")
            entry = _entry(name, shape, type_, path)
            entry = entry._replace(offset=start + offset)
            if entry.offset + entry.size > size:
                raise DamagedError(f"{size} bytes; {name:.100} ends at {entry.offset + entry.size}")
            entries[name] = entry
        return entries


def _entry(name: str, shape: tuple[int, ...], type_: int, path: Path) -> Entry:
    """An entry without its place. The size of quantized ones is the package's matter."""
    n_items = math.prod(shape)
    if type_ in TYPES:
        return Entry(TYPES[type_], shape, path, 0, n_items * BYTES_OF[TYPES[type_]])
    try:
        import gguf
    except ImportError:
        found = f"{name:.100} has the quantized type {type_}"
        raise PicogptError(f'{path}: {found}; to read it, run "pip install gguf"') from None
    kinds = {kind.value: kind for kind in gguf.GGMLQuantizationType}
    kind = kinds.get(type_)
    if kind not in gguf.quants._type_traits:
        return Entry(kind.name if kind else f"number {type_}", shape, path, 0, 0)
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise DamagedError(f"{name:.100} of {shape} does not fit into blocks of {block}")
    size = n_items // block * n_bytes
    return Entry(kind.name, shape, path, 0, size, read=_dequantize)


def _dequantize(name: str, entry: Entry) -> np.ndarray:
    """The numbers of a quantized tensor, widened piece by piece by the package."""
    import gguf

    kind = gguf.GGMLQuantizationType[entry.dtype]
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    tensor = np.empty(math.prod(entry.shape), np.float32)
    for start in range(0, entry.size, step := PIECE_BYTES // n_bytes * n_bytes):
        n = min(step, entry.size - start)
        data = np.fromfile(entry.file, np.uint8, n, offset=entry.offset + start)
        first = start // n_bytes * block
        with np.errstate(all="ignore"):  # a damaged scale may be infinite
            wide = gguf.quants.dequantize(data.reshape(-1, n_bytes), kind)
        tensor[first : first + n // n_bytes * block] = wide.ravel()
    return tensor
