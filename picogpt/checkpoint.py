"""TensorFlow's checkpoints and safetensors, read without either, to named arrays.

Both formats say at which bytes of a file each tensor lies: `read_index` and `read_header` return
that, `read_tensors` maps tensors of float32 from the disk, to be used where they lie, and widens
smaller ones. Nothing that a file says is believed before it is checked: a damaged or hostile file
ends in PicogptError.

A TensorFlow checkpoint (a "tensor bundle") PREFIX is PREFIX.index and PREFIX.data-00000-of-00001
and so on, the shards, which are nothing but the bytes of the tensors. The index is a table in
LevelDB's format: blocks of sorted keys and values, one more block that lists the blocks, and a
footer that says where that one is; each block carries a checksum. Keys are the tensors' names,
values are protocol buffers. The empty key comes first, with the header.

A safetensors file is the length of a header in 8 bytes, the header in JSON, and the bytes of the
tensors, one behind the other. Shards are listed in a JSON file beside them.

Sources: tensorflow/core/util/tensor_bundle and tensorflow/core/protobuf/tensor_bundle.proto;
tensorflow/core/lib/io/table_format.txt; the encoding guide of Protocol Buffers; the section
"Format" of huggingface/safetensors' README.
"""

import json
import math
import mmap
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from .errors import PicogptError, find_files, read_json, read_text, refuse_pointer

MAGIC = 0xDB4775248B80FB57
FOOTER_BYTES = 48
TRAILER_BYTES = 5  # of a block: the kind of compression, and the checksum
MAX_INDEX_BYTES = 2 << 20  # that of the largest GPT-2 with an optimizer's slots has 0.1 MB
PIECE_BYTES = 1 << 22  # read at once of a tensor that cannot be used where it lies
MAX_NAME_BYTES = 1024
MAX_KEYS = 50_000
MAX_AXES = 8
BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}  # the types read here
# By their numbers in tensorflow/core/framework/types.proto, and by their names in safetensors.
TF_DTYPES = {1: "float32", 2: "float64", 3: "int32", 9: "int64", 10: "bool", 14: "bfloat16"}
TF_DTYPES |= {7: "string", 19: "float16"}
SAFETENSORS_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# The line of a state file that counts, and the escapes in its string.
STATE = re.compile(
    r"""^\s*model_checkpoint_path\s*:\s*(?P<quote>["'])(?P<path>(?:\\.|(?!(?P=quote))[^\\])*)"""
    r"""(?P=quote)""",
    re.MULTILINE,
)
ESCAPE = re.compile(r"\\([0-7]{1,3}|.)", re.DOTALL)


class Entry(NamedTuple):
    """What a file says about one tensor."""

    dtype: str  # as in BYTES_OF, or the name of a type that is not read here
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes
    size: int  # bytes
    crc: int | None = None  # masked CRC-32C of the bytes, where the format has one
    byte_order: Literal["<", ">"] = "<"
    is_sliced: bool = False  # stored in pieces, for TensorFlow to put together


class _DamagedError(Exception):
    """What is wrong with an index or a header; who reads it adds which."""


def find_checkpoint(folder: Path) -> Path:
    """Returns the prefix of a folder's checkpoint: the one its state file names, or the only one.

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
            return folder / found[0]
        raise PicogptError(
            f"{folder}: found {names} of the files *.index; expected one, "
            "or a file `checkpoint` that names one"
        )
    name = read_state(state)
    if name not in found:
        raise PicogptError(
            f"{state}: names {name:.100}; {name:.100}.index is missing; found {names}"
        )
    return folder / name


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


def read_index(prefix: Path, path: Path | None = None) -> dict[str, Entry]:
    """Reads which tensors the bundle `prefix` holds: name to entry, in order of the names.

    Args:
        prefix: of the bundle.
        path: of the index, where it is not PREFIX.index.

    Raises:
        PicogptError: the index is damaged, or is none.
        OSError: it cannot be read.
    """
    path = path or prefix.with_name(prefix.name + ".index")
    with path.open("rb") as file:
        data = file.read(MAX_INDEX_BYTES + 1)
    refuse_pointer(path, data)
    try:
        if len(data) > MAX_INDEX_BYTES:
            raise _DamagedError(f"is larger than {MAX_INDEX_BYTES} bytes")
        return _read_entries(data, prefix)
    except _DamagedError as error:
        raise PicogptError(f"{path}: {error}; is damaged or no index; fetch it again") from None


def read_header(path: Path) -> dict[str, Entry]:
    """Reads which tensors a safetensors file holds, or the shards that `*.index.json` lists.

    Raises:
        PicogptError: the file, or one of the shards, is damaged, cut short, or is none.
        OSError: it cannot be read.
    """
    if path.suffix != ".json":
        return _read_file_header(path)
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict):
        raise PicogptError(f"{path}: has no weight_map; expected the shard of each tensor")
    files: dict[str, dict[str, Entry]] = {}
    for name, file in shards.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise PicogptError(f"{path}: {name} is in {file!r:.60}; expected a file beside this")
        files.setdefault(file, {})
    find_files(path.parent, *sorted(files))
    for file in files:
        files[file] = _read_file_header(path.with_name(file))
        if sum(map(len, files.values())) > MAX_KEYS:
            raise PicogptError(f"{path}: its shards have more than {MAX_KEYS} names")
    if lost := [name for name, file in shards.items() if name not in files[file]]:
        raise PicogptError(f"{path}: {lost[0]} is not in {shards[lost[0]]}; fetch both again")
    return {name: files[file][name] for name, file in shards.items()}


def _read_file_header(path: Path) -> dict[str, Entry]:
    _refuse_pipe(path)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(8)
        length = int.from_bytes(head, "little")
        data = file.read(min(length, MAX_INDEX_BYTES))
    refuse_pointer(path, head + data)
    try:
        if size < 8 or length > MAX_INDEX_BYTES:
            raise _DamagedError("begins with no length of a header")
        if length > size - 8:
            raise PicogptError(f"{path}: {size} bytes; its header alone has {8 + length}")
        entries = _parse_header(data, path)
    except _DamagedError as error:
        raise PicogptError(f"{path}: {error}; is damaged or no safetensors file") from None
    end = max((entry.offset + entry.size for entry in entries.values()), default=8 + length)
    if size != end:
        raise PicogptError(f"{path}: {size} bytes; expected {end}; fetch it again")
    return entries


def _parse_header(data: bytes, path: Path) -> dict[str, Entry]:
    try:
        header = json.loads(data)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise _DamagedError("has a header that is no JSON object")
    header.pop("__metadata__", None)
    end = 8 + len(data)
    entries = {name: _safetensors_entry(name, value, path, end) for name, value in header.items()}
    for entry in sorted(entries.values(), key=lambda entry: (entry.offset, entry.size)):
        if entry.offset != end:
            raise _DamagedError("has tensors that do not lie one behind the other")
        end += entry.size
    return entries


def _safetensors_entry(name: str, value: Any, path: Path, start: int) -> Entry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, places = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(places, list)):
        raise _DamagedError(f"{name:.100} has no dtype, shape or data_offsets")
    is_whole = all(type(number) is int and 0 <= number < 1 << 48 for number in shape + places)
    if not is_whole or len(shape) > MAX_AXES or len(places) != 2 or places[0] > places[1]:
        raise _DamagedError(f"{name:.100} has an impossible shape or place")
    dtype, size = SAFETENSORS_DTYPES.get(dtype, dtype.upper()), places[1] - places[0]
    if dtype in BYTES_OF and math.prod(shape) * BYTES_OF[dtype] != size:
        raise _DamagedError(f"{name:.100} has {size} bytes for the shape {tuple(shape)}")
    return Entry(dtype, tuple(shape), path, start + places[0], size)


def read_tensors(entries: dict[str, Entry], *, verify: bool = True) -> dict[str, np.ndarray]:
    """Returns tensors in float32: mapped from the disk, read-only, or widened in memory.

    Only those stored in another type, unaligned or big-endian are copied.

    Args:
        entries: from an index or a header, those that are wanted.
        verify: compare each tensor's checksum, where there is one, which reads all of it.

    Raises:
        PicogptError: a file is too short, a checksum is wrong, a type is not a floating-point one,
            or a tensor needs TensorFlow, which is not installed.
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
        if entry.is_sliced:
            tensor = _read_with_tensorflow(name, entry)
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
    if _mask(crc) != entry.crc:
        raise PicogptError(f"{entry.file}: {name} is damaged (wrong checksum); fetch it again")


def _refuse_pipe(file: Path) -> None:
    if file.exists() and not file.is_file():  # to open a pipe would wait for ever
        raise PicogptError(f"{file}: is no file; expected one with tensors")


def _map(file: Path, size: int) -> np.ndarray:
    """The bytes of a file that must have `size` of them or more."""
    _refuse_pipe(file)
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
        raise _DamagedError("has no proper header")
    entries: dict[str, Entry] = {}
    for i, (key, value) in enumerate(table):
        if i == MAX_KEYS:
            raise _DamagedError(f"has more than {MAX_KEYS} names")
        if key.startswith(b"\0"):
            continue  # a slice of a tensor, whose own entry says that it has slices
        name = key.decode("utf-8", "replace")
        if not name.isprintable():
            raise _DamagedError("has a name that is not text")
        fields = _fields(value)
        shard, offset, size = (_number(fields, number) for number in (3, 4, 5))
        shape = tuple(_number(axis, 1) for part in _parts(fields, 2) for axis in _parts(part, 2))
        number = _number(fields, 1)
        dtype = TF_DTYPES.get(number, f"number {number}")
        if len(shape) > MAX_AXES or math.prod(n or 1 for n in shape) >> 48 or shard >= n_shards:
            raise _DamagedError(f"{name} has an impossible shape or shard")
        is_sliced = 7 in fields
        if not is_sliced and dtype in BYTES_OF and math.prod(shape) * BYTES_OF[dtype] != size:
            raise _DamagedError(f"{name} has {size} bytes for the shape {shape}")
        entries[name] = Entry(
            dtype=dtype,
            shape=shape,
            file=prefix.with_name(f"{prefix.name}.data-{shard:05d}-of-{n_shards:05d}"),
            offset=offset,
            size=size,
            crc=_number(fields, 6),
            byte_order=">" if byte_order else "<",
            is_sliced=is_sliced,
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
            raise _DamagedError("has a length that reaches beyond its end")
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
        raise _DamagedError("has a number that is too long")


def _read_table(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a LevelDB table."""
    footer = _Cursor(data[-FOOTER_BYTES:])
    if len(data) < FOOTER_BYTES or data[-8:] != MAGIC.to_bytes(8, "little"):
        raise _DamagedError("does not end in an index's magic number")
    footer.varint(), footer.varint()  # the place of the meta index, which is empty
    block_list, _ = _read_block(data, footer)
    end, last = 0, None
    for _, handle in _read_pairs(block_list):
        start = end
        block, end = _read_block(data, _Cursor(handle), start)
        for key, value in _read_pairs(block):
            if last is not None and key <= last:
                raise _DamagedError("has names out of order")
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
        raise _DamagedError("has a block out of place")
    crc = google_crc32c.value(data[offset : end + 1])
    if _mask(crc) != int.from_bytes(data[end + 1 : end + 5], "little"):
        raise _DamagedError("has a block with a wrong checksum")
    if data[end]:
        raise _DamagedError(f"has a compressed block (type {data[end]})")
    return data[offset:end], end + TRAILER_BYTES


def _read_pairs(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of a block. A key is stored as what it does not share with the
    one before it; the list of places to start from, at the end, is for searching."""
    n_starts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (n_starts + 1)
    if end < 0:
        raise _DamagedError("has a block too short for what it says")
    cursor, key = _Cursor(block[:end]), b""
    while cursor:
        n_shared, n_rest, n_value = cursor.varint(), cursor.varint(), cursor.varint()
        if n_shared > len(key) or n_shared + n_rest > MAX_NAME_BYTES:
            raise _DamagedError("has a name that is too long")
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
            raise _DamagedError(f"has a field of kind {kind}")
        fields.setdefault(number, []).append(value)
    return fields


def _number(fields: dict[int, list[int | bytes]], number: int) -> int:
    """The integer of that number; 0 where it is left out."""
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise _DamagedError(f"has bytes for a number in field {number}")
    return value


def _parts(fields: dict[int, list[int | bytes]], number: int) -> Iterator[Any]:
    """The messages of that number, as fields."""
    for value in fields.get(number, []):
        if not isinstance(value, bytes):
            raise _DamagedError(f"has a number for a message in field {number}")
        yield _fields(value)


def _mask(crc: int) -> int:
    """A CRC-32C turned and shifted, as TensorFlow stores it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
