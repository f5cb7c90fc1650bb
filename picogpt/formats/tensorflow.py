"""TensorFlow's checkpoints ("tensor bundles"), read without TensorFlow.

A checkpoint PREFIX is PREFIX.index and PREFIX.data-00000-of-00001 and so on, the shards, which are
nothing but the bytes of the tensors. The index is a table in LevelDB's format: blocks of sorted
keys and values, one more block that lists the blocks, and a footer that says where that one is;
each block carries a checksum. Keys are the tensors' names, values are protocol buffers. The empty
key comes first, with the header.

Sources: tensorflow/core/util/tensor_bundle and tensorflow/core/protobuf/tensor_bundle.proto;
tensorflow/core/lib/io/table_format.txt; the encoding guide of Protocol Buffers.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import PicogptError, read_text, refuse_pointer
from .tensors import BYTES_OF, MAX_AXES, MAX_KEYS, Checksum, DamagedError, Entry, Listing

SUFFIXES = (".index",)
MAGIC = 0xDB4775248B80FB57
FOOTER_BYTES = 48
TRAILER_BYTES = 5  # of a block: the kind of compression, and the checksum
MAX_INDEX_BYTES = 2 << 20  # that of the largest GPT-2 with an optimizer's slots has 0.1 MB
MAX_NAME_BYTES = 1024
# By their numbers in tensorflow/core/framework/types.proto.
DTYPES = {1: "float32", 2: "float64", 3: "int32", 9: "int64", 10: "bool", 14: "bfloat16"}
DTYPES |= {7: "string", 19: "float16"}

# The line of a state file that counts, and the escapes in its string.
STATE = re.compile(
    r"""^\s*model_checkpoint_path\s*:\s*(?P<quote>["'])(?P<path>(?:\\.|(?!(?P=quote))[^\\])*)"""
    r"""(?P=quote)""",
    re.MULTILINE,
)
ESCAPE = re.compile(r"\\([0-7]{1,3}|.)", re.DOTALL)


def find_checkpoint(folder: Path) -> Path:
    """Returns the index of a folder's checkpoint: the one its state file names, or the only one.

    The state file, `checkpoint`, may give a path on the machine that wrote it: only its last part
    counts.

    Raises:
        PicogptError: there is none, or no telling which.
    """
    indexes = sorted(path for path in folder.glob("*.index") if path.is_file())
    found = [path.name.removesuffix(".index") for path in indexes]
    names = ", ".join(found) or "none"
    state = folder / "checkpoint"
    if not state.is_file():
        if len(found) == 1:
            return indexes[0]
        raise PicogptError(
            f"{folder}: found {names} of the files *.index; expected one, "
            "or a file `checkpoint` that names one"
        )
    name = read_state(state)
    if name not in found:
        raise PicogptError(
            f"{state}: names {name:.100}; {name:.100}.index is missing; found {names}"
        )
    return folder / f"{name}.index"


def read_state(state: Path) -> str:
    """Returns the name of the checkpoint that a state file names, without its folder.

    Raises:
        PicogptError: it names none.
        OSError: it cannot be read.
    """
    line = STATE.search(read_text(state))
    if not line:
        raise PicogptError(f"{state}: names no model_checkpoint_path; fetch it again")
    name = re.split(r"[/\\]", ESCAPE.sub(_unescape, line["path"]))[-1]
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _unescape(escape: re.Match[str]) -> str:
    """A character as protocol buffers' text writes it; an octal one is a byte of UTF-8."""
    code = escape[1]
    if code[0] in "01234567":
        return bytes([int(code, 8) & 0xFF]).decode("utf-8", "surrogateescape")
    return {"n": "\n", "r": "\r", "t": "\t"}.get(code, code if code in "\\'\"" else escape[0])


def matches(head: bytes, tail: bytes) -> bool:
    """Whether a file begins and ends like an index."""
    return tail.endswith(MAGIC.to_bytes(8, "little"))


def list_tensors(index: Path, prefix: Path | None = None) -> Listing:
    """Reads which tensors a bundle holds: name to entry, in order of the names.

    Args:
        index: its index, PREFIX.index.
        prefix: of its shards, where it is another.

    Raises:
        PicogptError: the index is damaged, or is none.
        OSError: it cannot be read.
    """
    prefix = prefix or index.with_suffix("")
    with index.open("rb") as file:
        data = file.read(MAX_INDEX_BYTES + 1)
    refuse_pointer(index, data)
    try:
        if len(data) > MAX_INDEX_BYTES:
            raise DamagedError(f"is larger than {MAX_INDEX_BYTES} bytes")
        return Listing(_read_entries(data, prefix))
    except DamagedError as error:
        raise PicogptError(f"{index}: {error}; is damaged or no index; fetch it again") from None


def _read_with_tensorflow(name: str, entry: Entry) -> np.ndarray:
    prefix = str(entry.file).rpartition(".data-")[0]
    try:
        import tensorflow  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        raise PicogptError(
            f"{prefix}.index: {name} is stored in slices, which only TensorFlow reads; "
            'run "pip install picogpt[tensorflow]"'
        ) from None
    try:
        tensor = tensorflow.train.load_checkpoint(prefix).get_tensor(name)
    except tensorflow.errors.OpError as error:
        raise PicogptError(f"{prefix}.index: {name}: TensorFlow says: {error.message}") from None
    return np.asarray(tensor, np.float32)


def _read_entries(data: bytes, prefix: Path) -> dict[str, Entry]:
    table = _read_table(data)
    key, value = next(table, (b"", b""))
    header = _fields(value)
    n_shards, byte_order = _number(header, 1), _number(header, 2)
    if key or not 1 <= n_shards < 100_000 or byte_order > 1:
        raise DamagedError("has no proper header")
    entries: dict[str, Entry] = {}
    for i, (key, value) in enumerate(table):
        if i == MAX_KEYS:
            raise DamagedError(f"has more than {MAX_KEYS} names")
        if key.startswith(b"\0"):
            continue  # a slice of a tensor, whose own entry says that it has slices
        name = key.decode("utf-8", "replace")
        if not name.isprintable():
            raise DamagedError("has a name that is not text")
        fields = _fields(value)
        shard, offset, size = (_number(fields, number) for number in (3, 4, 5))
        shape = tuple(_number(axis, 1) for part in _parts(fields, 2) for axis in _parts(part, 2))
        number = _number(fields, 1)
        dtype = DTYPES.get(number, f"number {number}")
        if len(shape) > MAX_AXES or math.prod(n or 1 for n in shape) >> 48 or shard >= n_shards:
            raise DamagedError(f"{name} has an impossible shape or shard")
        is_sliced, crc = 7 in fields, _unmask(_number(fields, 6))
        if not is_sliced and dtype in BYTES_OF and math.prod(shape) * BYTES_OF[dtype] != size:
            raise DamagedError(f"{name} has {size} bytes for the shape {shape}")
        entries[name] = Entry(
            dtype=dtype,
            shape=shape,
            file=prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{n_shards:05d}"),
            offset=offset,
            size=size,
            checksum=None if is_sliced else Checksum("crc32c", crc, offset, size),
            byte_order=">" if byte_order else "<",
            read=_read_with_tensorflow if is_sliced else None,
        )
    return entries


class _Cursor:
    """Reads bytes from the front, never beyond their end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def __bool__(self) -> bool:
        return self.at < len(self.data)

    def take(self, n: int) -> bytes:
        if n > len(self.data) - self.at:
            raise DamagedError("has a length that reaches beyond its end")
        self.at += n
        return self.data[self.at - n : self.at]

    def varint(self) -> int:
        """A number in groups of 7 bits, the lowest first, each but the last with bit 8 set."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise DamagedError("has a number that is too long")


def _read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a LevelDB table."""
    footer = _Cursor(data[-FOOTER_BYTES:])
    if len(data) < FOOTER_BYTES or data[-8:] != MAGIC.to_bytes(8, "little"):
        raise DamagedError("does not end in an index's magic number")
    footer.varint(), footer.varint()  # the place of the meta index, which is empty
    block_list, _ = _read_block(data, footer)
    end, last = 0, None
    for _, handle in _read_pairs(block_list):
        start = end
        block, end = _read_block(data, _Cursor(handle), start)
        for key, value in _read_pairs(block):
            if last is not None and key <= last:
                raise DamagedError("has names out of order")
            last = key
            yield key, value


def _read_block(data: bytes, handle: _Cursor, earliest: int = 0) -> tuple[bytes, int]:
    """Returns the block that a handle points to, and where its trailer ends.

    Blocks lie one behind the other; if one could be listed twice, a small file could hold work
    without end. Hence `earliest`, where it may begin.
    """
    import google_crc32c

    offset, size = handle.varint(), handle.varint()
    end = offset + size
    if offset < earliest or end + TRAILER_BYTES > len(data) - FOOTER_BYTES:
        raise DamagedError("has a block out of place")
    crc = google_crc32c.value(data[offset : end + 1])
    if crc != _unmask(int.from_bytes(data[end + 1 : end + 5], "little")):
        raise DamagedError("has a block with a wrong checksum")
    if data[end]:
        raise DamagedError(f"has a compressed block (type {data[end]})")
    return data[offset:end], end + TRAILER_BYTES


def _read_pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a block. A key is stored as what it does not share with the
    one before it; the list of places to start from, at the end, is for searching."""
    n_starts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (n_starts + 1)
    if end < 0:
        raise DamagedError("has a block too short for what it says")
    cursor, key = _Cursor(block[:end]), b""
    while cursor:
        n_shared, n_rest, n_value = cursor.varint(), cursor.varint(), cursor.varint()
        if n_shared > len(key) or n_shared + n_rest > MAX_NAME_BYTES:
            raise DamagedError("has a name that is too long")
        key = key[:n_shared] + cursor.take(n_rest)
        yield key, cursor.take(n_value)


def _fields(message: bytes) -> dict[int, list[int | bytes]]:
    """The fields of a protocol buffer by number: integers, or the bytes of what has a length."""
    fields: dict[int, list[int | bytes]] = {}
    cursor = _Cursor(message)
    while cursor:
        number, kind = divmod(cursor.varint(), 8)
        value: int | bytes
        if kind == 0:
            value = cursor.varint()
        elif kind == 2:
            value = cursor.take(cursor.varint())
        elif kind in (1, 5):
            value = int.from_bytes(cursor.take(8 if kind == 1 else 4), "little")
        else:
            raise DamagedError(f"has a field of kind {kind}")
        fields.setdefault(number, []).append(value)
    return fields


def _number(fields: dict[int, list[int | bytes]], number: int) -> int:
    """The integer of that number; 0 where it is left out."""
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise DamagedError(f"has bytes for a number in field {number}")
    return value


def _parts(fields: dict[int, list[int | bytes]], number: int) -> Iterator[Any]:
    """The messages of that number, as fields."""
    for value in fields.get(number, []):
        if not isinstance(value, bytes):
            raise DamagedError(f"has a number for a message in field {number}")
        yield _fields(value)


def _unmask(crc: int) -> int:
    """A CRC-32C that was turned by 15 bits and shifted, as TensorFlow stores it."""
    turned = (crc - 0xA282EAD8) & 0xFFFFFFFF
    return (turned >> 17 | turned << 15) & 0xFFFFFFFF
