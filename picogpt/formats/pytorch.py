"""PyTorch's files of tensors, read without it, and without running anything that they say.

What `torch.save` writes is a pickle of dicts, texts and numbers, in which a tensor is a storage, a
place in it, a shape and strides; the bytes of the storages lie outside the pickle. Since version
1.6 the file is a zip archive, NAME/data.pkl with NAME/data/0 and so on, all stored as they are, so
that they can be mapped. Before, it was a stream of pickles (a magic number, the protocol, the
writer's machine, the object, the keys of the storages) and then each storage behind its length.

A pickle is a program for a machine with a stack. Here is one that knows the opcodes and the names
that tensors need, and no others: nothing is imported, and nothing called but the few functions of
this file.

Sources: torch/serialization.py, torch/_utils.py and caffe2/serialize of PyTorch; Python's
pickletools; PKWARE's APPNOTE.TXT.
"""

import io
import math
import pickletools
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NamedTuple

from ..errors import PicogptError, refuse_pointer
from .tensors import BYTES_OF, MAX_AXES, MAX_KEYS, Checksum, DamagedError, Entry, Listing

SUFFIXES = (".bin", ".pt", ".pth")
ZIP = b"PK\x03\x04"
PICKLE = b"\x80"
STREAM = bytes.fromhex("80028a0a6cfc9c46f9206aa850192e")  # the pickle of the magic number
MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of a stream
PROTOCOL = 1001  # the second
MAX_PICKLE_BYTES = 1 << 22  # that of the largest GPT-2 with an optimizer has 0.5 MB
MAX_OPCODES = 200_000
MAX_DIRECTORY_BYTES = 1 << 23
MAX_DEPTH = 8  # of dicts in dicts
ITEM_BYTES = BYTES_OF | {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
OPCODES = {"PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT"}
OPCODES |= {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"}
OPCODES |= {"BINSTRING", "SHORT_BINSTRING", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE"}
OPCODES |= {"TUPLE1", "TUPLE2", "TUPLE3", "SETITEM", "SETITEMS", "APPEND", "APPENDS", "BINGET"}
OPCODES |= {"LONG_BINGET", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GLOBAL", "STACK_GLOBAL", "REDUCE"}
OPCODES |= {"BUILD", "BINPERSID"}
CODES = {opcode.code: opcode for opcode in pickletools.opcodes}


class _OrderedDict(dict[Any, Any]):
    """Apart from dict because BUILD may give it attributes, which are dropped."""

    def __init__(self) -> None:
        super().__init__()


class _Type(NamedTuple):
    """A class of storages, or a dtype."""

    dtype: str


class _Storage(NamedTuple):
    dtype: str
    key: str
    n_items: int


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int  # in elements, as strides are
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def matches(head: bytes, tail: bytes) -> bool:
    """Whether a file begins like an archive of torch.save's, or like a stream of it."""
    return (head.startswith(ZIP) and b"/data.pkl" in head) or head.startswith(STREAM)


def list_tensors(path: Path) -> Listing:
    """Reads which tensors a file holds; those of a dict within a dict are called "outer/inner".

    Returns:
        the listing; its metadata is the same dict without tensors, of texts and numbers.

    Raises:
        PicogptError: the file is damaged, holds something else, or would run code in PyTorch.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(64)
        refuse_pointer(path, head)
        try:
            if head[:4] != ZIP and head[:1] != PICKLE:
                raise DamagedError("is no file that torch.save wrote; fetch it again")
            read = _read_zip if head.startswith(ZIP) else _read_stream
            content, find = read(file, size)
            metadata: dict[str, Any] = {}
            tensors = _tensors(content, metadata)
            entries = {name: _entry(path, tensor, find) for name, tensor in tensors.items()}
            return Listing(entries, metadata)
        except DamagedError as error:
            raise PicogptError(f"{path}: {error}") from None


def read_pickle(path: Path) -> Any:
    """Reads a file that is one pickle of dicts, lists, texts and numbers.

    Raises:
        PicogptError: it is damaged, holds something else, or would run code.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(MAX_PICKLE_BYTES + 1)
    refuse_pointer(path, data)
    try:
        return _unpickle(io.BytesIO(data))
    except DamagedError as error:
        raise PicogptError(f"{path}: {error}") from None


def _entry(path: Path, tensor: _Tensor, find: Callable[[_Storage], tuple[int, Any]]) -> Entry:
    storage, first, shape, strides = tensor
    start, checksum = find(storage)
    item = ITEM_BYTES[storage.dtype]
    return Entry(
        dtype=storage.dtype,
        shape=shape,
        file=path,
        offset=start + first * item,
        size=_reach(shape, strides) * item,
        checksum=checksum,
        strides=None if strides == _contiguous(shape) else strides,
    )


def _reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many elements there are from a tensor's first to its last."""
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return 0 if 0 in shape else 1 + last


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _tensors(content: Any, metadata: dict[str, Any]) -> dict[str, _Tensor]:
    """The tensors of nested dicts by their names; texts and numbers are put in metadata."""
    if not isinstance(content, dict):
        raise DamagedError(f"holds a {type(content).__name__.strip('_')}; expected a state dict")
    tensors: dict[str, _Tensor] = {}
    waiting: list[tuple[str, Any, dict[str, Any]]] = [("", content, metadata)]
    n_seen = 0  # a dict can be in another twice, and that one in a third: work without end
    for path, values, told in waiting:
        for key, value in values.items():
            n_seen += 1
            if n_seen > MAX_OPCODES or len(tensors) > MAX_KEYS or path.count("/") > MAX_DEPTH:
                raise DamagedError("has too many dicts in dicts; expected a state dict")
            if isinstance(value, _Tensor):
                tensors[f"{path}{key}"] = value
            elif isinstance(value, dict):
                told[key] = {}
                waiting.append((f"{path}{key}/", value, told[key]))
            elif value is None or isinstance(value, str | int | float):
                told[key] = value
    return tensors


# The machine


def _unpickle(file: IO[bytes], storages: dict[str, _Storage] | None = None) -> Any:
    """Runs one pickle, from where a file is to behind its end; notes the storages that it names."""
    stacks: list[list[Any]] = [[]]  # a mark begins a new one
    memo: dict[int, Any] = {}
    for _ in range(MAX_OPCODES):
        opcode = CODES.get(file.read(1).decode("latin-1"))
        if opcode is None:
            raise DamagedError("has a pickle that is damaged or cut short; fetch it again")
        if opcode.name not in OPCODES:
            raise DamagedError(f"its pickle has the opcode {opcode.name}, {UNNEEDED}")
        try:
            if opcode.name == "GLOBAL":  # whose reader would look for escapes
                lines = file.readline() + file.readline()
                argument: Any = lines.decode("utf-8").replace("\n", " ").rstrip()
            else:
                argument = opcode.arg.reader(file) if opcode.arg else None
            if opcode.name == "STOP":
                return stacks.pop().pop()
            _step(opcode.name, argument, stacks, memo)
            if opcode.name == "BINPERSID" and storages is not None:
                storages[stacks[-1][-1].key] = stacks[-1][-1]
        except (ValueError, IndexError, KeyError, TypeError):
            raise DamagedError("has a pickle that makes no sense; fetch it again") from None
    raise DamagedError(f"has a pickle of more than {MAX_OPCODES} opcodes")


def _step(name: str, argument: Any, stacks: list[list[Any]], memo: dict[int, Any]) -> None:
    stack = stacks[-1]
    match name:
        case "PROTO" | "FRAME":
            pass
        case "MARK":
            stacks.append([])
        case "NONE" | "NEWTRUE" | "NEWFALSE":
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
        case "TUPLE":
            stacks.pop()
            stacks[-1].append(tuple(stack))
        case "TUPLE1" | "TUPLE2" | "TUPLE3":
            values = [stack.pop() for _ in range(int(name[-1]))]
            stack.append(tuple(values[::-1]))
        case "BINGET" | "LONG_BINGET":
            stack.append(memo[argument])
        case "BINPUT" | "LONG_BINPUT":
            memo[argument] = stack[-1]
        case "MEMOIZE":
            memo[len(memo)] = stack[-1]
        case "APPEND":
            value = stack.pop()
            _expect(stack[-1], list).append(value)
        case "APPENDS":
            stacks.pop()
            _expect(stacks[-1][-1], list).extend(stack)
        case "SETITEM":
            value, key = stack.pop(), stack.pop()
            _set(stack[-1], [key, value])
        case "SETITEMS":
            stacks.pop()
            _set(stacks[-1][-1], stack)
        case "GLOBAL":
            stack.append(_find(argument))
        case "STACK_GLOBAL":
            last, module = _expect(stack.pop(), str), _expect(stack.pop(), str)
            stack.append(_find(f"{module} {last}"))
        case "REDUCE":
            arguments, function = _expect(stack.pop(), tuple), stack.pop()
            if not any(function is one for one in FUNCTIONS.values()):
                raise DamagedError(f"its pickle calls what is no function, {UNNEEDED}")
            stack.append(function(*arguments))
        case "BUILD":  # state_dict() notes the versions of modules so
            _expect(stack.pop(), dict)
            _expect(stack[-1], _OrderedDict)
        case "BINPERSID":
            stack.append(_storage(*_expect(stack.pop(), tuple)))
        case _:  # a number or a text
            stack.append(argument)


def _expect(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def _set(target: Any, items: list[Any]) -> None:
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, str | int):  # the hash of tuples in tuples can take for ever
            raise TypeError
        _expect(target, dict)[key] = value


def _find(name: str) -> Any:
    """What a name of a module and of something in it, with a blank between, stands for here."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    module, _, last = name.partition(" ")
    if module == "torch" and last.removesuffix("Storage") in STORAGES and last[0].isupper():
        return _Type(STORAGES[last.removesuffix("Storage")])
    if module == "torch" and last in ITEM_BYTES:
        return _Type(last)
    raise DamagedError(f"its pickle names {module}.{last:.60}, {UNNEEDED}")


def _storage(kind: Any, type_: Any, key: Any, place: Any, n_items: Any, view: Any = None) -> Any:
    if kind != "storage" or view is not None:
        raise DamagedError("has a storage that is part of another, which is not read")
    _check_numbers(n_items)
    return _Storage(_expect(type_, _Type).dtype, _expect(key, str), n_items)


def _make_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    n_items = _expect(storage, _Storage).n_items
    if len(_expect(shape, tuple)) > MAX_AXES or len(shape) != len(_expect(strides, tuple)):
        raise DamagedError("has a tensor with an impossible shape")
    _check_numbers(offset, *shape, *strides)
    if math.prod(shape) > n_items or offset + _reach(shape, strides) > n_items:
        raise DamagedError(f"has a tensor of {shape} in a storage of {n_items} numbers")
    return _Tensor(storage, offset, shape, strides)


def _check_numbers(*numbers: Any) -> None:
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in numbers):
        raise DamagedError("has a tensor with an impossible size")


CUT = "is cut short, or its list of contents is damaged; fetch it again"
UNNEEDED = (
    "which a state dict does not need, so it was not read: a pickle can run code; if you trust it, "
    'write its tensors alone, where PyTorch is: python -c "import sys, torch; '
    "x = torch.load(sys.argv[1], weights_only=False); "
    "torch.save(x.state_dict() if hasattr(x, 'state_dict') else x, sys.argv[2])\" OLD NEW"
)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": _OrderedDict,
    "torch._utils _rebuild_tensor": _make_tensor,
    "torch._utils _rebuild_tensor_v2": _make_tensor,
    "torch._utils _rebuild_parameter": lambda data, *_: _expect(data, _Tensor),
    "torch Size": lambda shape: _expect(shape, tuple),
}
STORAGES = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16"}
STORAGES |= {"Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8"}
STORAGES |= {"Bool": "bool"}


# Where storages lie


def _read_zip(file: IO[bytes], size: int) -> tuple[Any, Callable[[_Storage], Any]]:
    """Returns what an archive's pickle makes, and a function that finds a storage's bytes."""
    records = _list_records(file, size)
    pickles = [name for name in records if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise DamagedError("is a zip archive, but none that torch.save wrote")
    folder = pickles[0].removesuffix("data.pkl")

    def read(name: str) -> bytes:
        offset, n_bytes, crc = records[name]
        if n_bytes > MAX_PICKLE_BYTES:
            raise DamagedError(f"has a pickle of {n_bytes} bytes; expected {MAX_PICKLE_BYTES}")
        file.seek(offset)
        data = file.read(n_bytes)
        if zlib.crc32(data) != crc:
            raise DamagedError(f"{name} is damaged (wrong checksum); fetch it again")
        return data

    if f"{folder}byteorder" in records and read(f"{folder}byteorder") != b"little":
        raise DamagedError("is big-endian; expected little-endian; save it on such a machine")

    def find(storage: _Storage) -> tuple[int, Checksum]:
        name = f"{folder}data/{storage.key}"
        n_bytes = storage.n_items * ITEM_BYTES[storage.dtype]
        offset, found, crc = records.get(name, (0, -1, 0))
        if found != n_bytes:
            what = "lacks" if found < 0 else f"has {found} bytes in"
            raise DamagedError(f"{what} {name:.100}; expected {n_bytes} bytes; fetch it again")
        return offset, Checksum("crc32", crc, offset, n_bytes)

    return _unpickle(io.BytesIO(read(pickles[0]))), find


def _list_records(file: IO[bytes], size: int) -> dict[str, tuple[int, int, int]]:
    """An archive's records by their names: where the bytes begin, how many, and their CRC-32."""
    file.seek(max(0, size - (1 << 16)))
    tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    try:
        n, n_bytes, start, n_comment = struct.unpack_from("<10xHIIH", tail, at)
        is_large = n == 0xFFFF or 0xFFFFFFFF in (n_bytes, start)
        if is_large and tail[at - 20 : at - 16] == b"PK\x06\x07":
            file.seek(struct.unpack_from("<8xQ", tail, at - 20)[0])
            n, n_bytes, start = struct.unpack("<4s28xQQQ", file.read(56))[1:]
        is_whole = at >= 0 and at + 22 + n_comment == len(tail) and start + n_bytes <= size
        if not is_whole or n > MAX_KEYS or n_bytes > MAX_DIRECTORY_BYTES:
            raise DamagedError(CUT)
        file.seek(start)
        directory = io.BytesIO(file.read(n_bytes))
        records = dict(_read_record(file, size, directory) for _ in range(n))
    except (struct.error, OverflowError):
        raise DamagedError(CUT) from None
    if len(records) < n:
        raise DamagedError("lists a name twice; fetch it again")
    return records


def _read_record(
    file: IO[bytes], size: int, directory: IO[bytes]
) -> tuple[str, tuple[int, int, int]]:
    fields = struct.unpack("<4sHHHHHHIIIHHHHHII", directory.read(46))
    flags, method, crc = fields[3], fields[4], fields[7]
    sizes, start = list(fields[8:10]), fields[16]
    name = directory.read(fields[10]).decode("utf-8", "replace")
    extra = directory.read(fields[11])
    directory.seek(fields[12], 1)
    at = 0
    while at + 4 <= len(extra):
        kind, n_bytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:  # what has more than 32 bits stands here
            large = list(struct.unpack_from(f"<{n_bytes // 8}Q", extra, at + 4))
            sizes = [large.pop(0) if n == 0xFFFFFFFF and large else n for n in sizes]
            start = large.pop(0) if start == 0xFFFFFFFF and large else start
        at += 4 + n_bytes
    if fields[0] != b"PK\x01\x02" or method or flags & 1 or sizes[0] != sizes[1]:
        raise DamagedError(f"{name:.100} is compressed or damaged; expected it as it is")
    file.seek(start)
    header = struct.unpack("<4s22xHH", file.read(30))
    offset = start + 30 + header[1] + header[2]
    if header[0] != ZIP or offset + sizes[0] > size:
        raise DamagedError(f"{name:.100} is cut short or out of place; fetch it again")
    return name, (offset, sizes[0], crc)


def _read_stream(file: IO[bytes], size: int) -> tuple[Any, Callable[[_Storage], Any]]:
    """Returns what the older layout's pickle makes, and a function that finds a storage's bytes."""
    file.seek(0)
    head = io.BytesIO(file.read(MAX_PICKLE_BYTES))
    if _unpickle(head) != MAGIC or _unpickle(head) != PROTOCOL:
        raise DamagedError(f"is a pickle, but none that torch.save wrote, {UNNEEDED}")
    machine = _unpickle(head)
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise DamagedError("is big-endian; expected little-endian; save it on such a machine")
    storages: dict[str, _Storage] = {}
    content, keys = _unpickle(head, storages), _unpickle(head)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise DamagedError("has no list of its storages; fetch it again")
    places: dict[str, int] = {}
    offset = head.tell()
    for key in keys:
        file.seek(offset)
        n_items = int.from_bytes(file.read(8), "little")
        storage = storages.get(key)
        if storage is None or storage.n_items != n_items or key in places:
            raise DamagedError(f"has {n_items} numbers in the storage {key:.40}; fetch it again")
        places[key] = offset + 8
        offset += 8 + n_items * ITEM_BYTES[storage.dtype]
    if offset != size:
        raise DamagedError(f"{size} bytes; expected {offset}; fetch it again")

    def find(storage: _Storage) -> tuple[int, None]:
        if storage != storages.get(storage.key) or storage.key not in places:
            raise DamagedError(f"lacks the storage {storage.key:.40}; fetch it again")
        return places[storage.key], None

    return content, find
