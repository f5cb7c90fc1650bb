"""PyTorch's files: where arrays lie, and pickles that would do harm, refused before anything is."""

import collections
import io
import os
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
from conftest import DATA

from picogpt import PicogptError
from picogpt.formats.pytorch import list_tensors, read_pickle
from picogpt.formats.tensors import read_tensors

NUMBERS = np.arange(24, dtype=np.float32)


class Name:
    """Pickled, it is a reference to something that is never imported here."""

    def __init__(self, name, *arguments):
        self.name, self.arguments = name, arguments


class Writer(pickle._Pickler):
    """Writes references and calls by their names, and storages as torch does."""

    def save(self, value, save_persistent_id=True):
        if not isinstance(value, Name):
            return super().save(value, save_persistent_id)
        self.write(f"c{value.name.replace(' ', chr(10))}\n".encode())
        if value.arguments:
            self.save(value.arguments[0])
            self.write(b"R")
        return None

    def persistent_id(self, value):
        return value[1:] if isinstance(value, tuple) and value[:1] == ("persistent",) else None


def dumps(value):
    file = io.BytesIO()
    Writer(file, protocol=2).dump(value)
    return file.getvalue()


def storage(key="0", n=24, kind="Float"):
    return ("persistent", "storage", Name(f"torch {kind}Storage"), key, "cpu", n)


def tensor(shape=(4, 6), strides=(6, 1), offset=0, where=None):
    arguments = (where or storage(), offset, shape, strides, False, collections.OrderedDict())
    return Name("torch._utils _rebuild_tensor_v2", arguments)


def archive(path, content, method=zipfile.ZIP_STORED, **records):
    records = {"data/0": NUMBERS.tobytes(), "byteorder": b"little"} | records
    content = content if isinstance(content, bytes) else dumps(content)
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("archive/data.pkl", content)
        for name, data in records.items():
            file.writestr(f"archive/{name}", data)
    return path


@pytest.fixture
def refused(tmp_path):
    """A function that writes an archive and returns why it is refused; little memory is used."""

    def refusal(content, **records):
        path = archive(tmp_path / "x.pt", content, **records)
        tracemalloc.start()
        with pytest.raises(PicogptError) as error:
            read_tensors(list_tensors(path))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50 << 20
        assert str(error.value).startswith(f"{path}: ")
        assert "\n" not in str(error.value)
        return str(error.value).removeprefix(f"{path}: ")

    return refusal


def owner(array):
    """-> the map that an array is a view of, however many views are between."""
    while hasattr(array, "base"):
        array = array.base
    return array.obj


def test_arrays_lie_where_they_are_mapped(tmp_path):
    state = {
        "plain": tensor(),
        "turned": tensor((6, 4), (1, 6)),
        "part": tensor((2, 3), (6, 1), 8),
        "scalar": tensor((), (), 5),
        "empty": tensor((0, 4), (4, 1)),
        "parameter": Name("torch._utils _rebuild_parameter", (tensor(), True, None)),
        "inner": {"size": Name("torch Size", ((2, 3),)), "n": 3, "deep": {"x": tensor((1,), (1,))}},
    }
    listing = list_tensors(archive(tmp_path / "x.pt", state))
    assert listing.metadata == {"inner": {"n": 3, "deep": {}}}
    arrays = read_tensors(listing)
    whole = NUMBERS.reshape(4, 6)
    wanted = {"plain": whole, "turned": whole.T, "part": whole[1:3, 2:5], "scalar": whole[0, 5]}
    wanted |= {"empty": np.zeros((0, 4)), "parameter": whole, "inner/deep/x": NUMBERS[:1]}
    assert arrays.keys() == wanted.keys()
    for name, array in arrays.items():
        assert type(array) is np.ndarray
        assert array.dtype == np.float32
        assert array.shape == wanted[name].shape
        assert (array == wanted[name]).all()
        assert not array.flags.writeable
    assert np.shares_memory(arrays["plain"], arrays["turned"])
    assert np.shares_memory(arrays["plain"], arrays["part"])
    assert owner(arrays["plain"]) is owner(arrays["part"]) is owner(arrays["turned"])


def test_what_torch_wrote_is_mapped():
    for folder in ("torch", "nanogpt"):
        path = next((DATA / folder).glob("*.bin"), DATA / folder / "ckpt.pt")
        listing = list_tensors(path)
        arrays = read_tensors(listing)
        maps = {id(owner(array)) for array in arrays.values() if array.size}
        assert len(maps) == 1
        assert all(entry.checksum.kind == "crc32" for entry in listing.values())
    assert listing.metadata["model_args"]["block_size"] == 32
    assert listing.metadata["config"]["device"] == "cpu"


@pytest.mark.parametrize("kind", ["Half", "BFloat16", "Double"])
def test_other_types_are_widened_turned_round_or_not(tmp_path, kind):
    dtype = {"Half": np.float16, "BFloat16": np.uint16, "Double": np.float64}[kind]
    data = NUMBERS.astype(dtype) if kind != "BFloat16" else NUMBERS.view(np.uint32) >> 16
    where = storage("7", 24, kind)
    state = {"a": tensor(where=where), "b": tensor((6, 4), (1, 6), where=where)}
    path = archive(tmp_path / "x.pt", state, **{"data/7": data.astype(dtype).tobytes()})
    arrays = read_tensors(list_tensors(path))
    assert (arrays["a"] == NUMBERS.reshape(4, 6)).all()
    assert (arrays["b"] == NUMBERS.reshape(4, 6).T).all()


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (Name("os system", ("touch harm",)), "os.system"),
        (Name("posix system", ("touch harm",)), "posix.system"),
        (Name("builtins eval", ("1",)), "builtins.eval"),
        (Name("builtins getattr", (Name("os"), "system")), "builtins.getattr"),
        ({"w": tensor(), "x": Name("torch load", ("other.pt",))}, "torch.load"),
        (Name("torch.serialization load", (b"",)), "torch.serialization.load"),
        (Name("torch.storage _load_from_bytes", (b"",)), "torch.storage._load_from_bytes"),
        (Name("numpy.core.multiarray _reconstruct", ((),)), "numpy.core.multiarray._reconstruct"),
        (Name("collections defaultdict", (Name("os system"),)), "collections.defaultdict"),
        (Name("collections OrderedDict.fromkeys", ((),)), "collections.OrderedDict.fromkeys"),
        (Name("torch._utils os.system", ((),)), "torch._utils.os.system"),
        (Name("torch FloatStorage.__init__", ((),)), "torch.FloatStorage.__init__"),
        (Name("torch.nn.modules.linear Linear", ((),)), "torch.nn.modules.linear.Linear"),
        ({"a": {"b": {"c": [({"d": Name("nt system")},)]}}}, "nt.system"),
    ],
)
def test_other_names_are_refused_by_name(refused, tmp_path, monkeypatch, state, name):
    monkeypatch.chdir(tmp_path)
    message = refused(state)
    assert message.startswith(f"its pickle names {name}, which a state dict does not need, so it ")
    assert 'python -c "import sys, torch; x = torch.load(sys.argv[1], ' in message
    assert not (tmp_path / "harm").exists()


def test_what_reduce_makes_is_never_called(refused, tmp_path, monkeypatch):
    """Chains of __reduce__, as Python's own pickler writes them."""

    class Harm:
        def __reduce__(self):
            return os.mkdir, ("harm",)

    class Chain:
        def __reduce__(self):
            return collections.OrderedDict, ((("a", Harm()),),)

    monkeypatch.chdir(tmp_path)
    for harm in (Harm(), {"w": Harm()}, Chain(), [Harm()] * 3):
        for protocol in (2, 4):
            assert "its pickle names posix.mkdir" in refused(pickle.dumps(harm, protocol))
    assert not (tmp_path / "harm").exists()


SENSELESS = "has a pickle that makes no sense; fetch it again"
ORDERED = b"ccollections\nOrderedDict\n"


@pytest.mark.parametrize(
    ("pickled", "found"),
    [
        (b"", "has a pickle that is damaged or cut short; fetch it again"),
        (b"\x80\x02}", "has a pickle that is damaged or cut short; fetch it again"),
        (b"\x80\x02.", SENSELESS),
        (b"\x80\x02r\xff\xff\xff\xffN.", SENSELESS),  # a memo of 4 GB, in Python's
        (b"\x80\x02}r\xff\xff\xff\xff.", ""),
        (b"\x80\x02h\x05.", SENSELESS),
        (b"\x80\x02" + ORDERED + b")R}b.", ""),  # BUILD, as state_dict() needs it
        (b"\x80\x02" + ORDERED + b")RNb.", SENSELESS),
        (b"\x80\x02}}b.", SENSELESS),  # of something else
        (b"\x80\x02" + ORDERED + b"}b.", SENSELESS),  # of a function
        (b"\x80\x02" + ORDERED + b"((X\x01\x00\x00\x00aK\x01tttR.", SENSELESS),
        (b"\x80\x02K\x01)R.", "its pickle calls what is no function"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "its pickle calls what is no function"),
        (b"\x80\x02})K\x01s.", SENSELESS),  # a tuple for a key
        (b"\x80\x02}(]K\x01u.", SENSELESS),
        (b"\x80\x02]X\x01\x00\x00\x00aK\x01s.", SENSELESS),
        (b"\x80\x02}K\x01a.", SENSELESS),
        (b"\x80\x02X\xff\xff\xff\x7fabc.", SENSELESS),
        (b"\x80\x02X\x02\x00\x00\x00\xff\xfe.", SENSELESS),
        (b"\x80\x02K\x01Q.", SENSELESS),
        (b"\x80\x022.", "its pickle has the opcode DUP"),
        (b"\x80\x02\x8f.", "its pickle has the opcode EMPTY_SET"),
        (b"(ios\nsystem\n.", "its pickle has the opcode INST"),
        (b"\x80\x02)\x81.", "its pickle has the opcode NEWOBJ"),
        (b"\x80\x02\x82\x01.", "its pickle has the opcode EXT1"),
        (b"\x80\x02L" + b"9" * 100_000 + b"L\n.", "its pickle has the opcode LONG"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f.", "its pickle has the opcode LONG4"),
        (b"\x80\x02N.", "holds a NoneType; expected a state dict"),
        (b"\x80\x02].", "holds a list; expected a state dict"),
    ],
)
def test_pickles_that_make_no_sense(refused, tmp_path, pickled, found):
    if found:
        assert refused(pickled).startswith(found)
    else:
        assert list_tensors(archive(tmp_path / "y.pt", pickled)) == {}


def test_bombs(refused):
    """Little files that would take for ever, or all memory, where they are unpacked as they say."""
    tuples = b"\x80\x02)" + b"q\x00h\x00\x86" * 40
    assert refused(tuples + b"}h\x00K\x01s.") == SENSELESS  # the hash of 2^40 tuples
    deep = b"\x80\x02}" + b"K\x01" + b"\x85" * 150_000
    assert refused(deep + b"K\x01s.") == SENSELESS  # a hash so deep that Python would crash
    dicts = b"\x80\x02}" + b"q\x00}(X\x01\x00\x00\x00ah\x00X\x01\x00\x00\x00bh\x00u" * 60
    assert refused(dicts + b".").startswith("has too many dicts in dicts")
    itself = b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s."
    assert refused(itself).startswith("has too many dicts in dicts")
    assert refused(b"\x80\x02" + b"]" * 300_000) == "has a pickle of more than 200000 opcodes"
    long = f"has a pickle of {4 << 20 | 1} bytes; expected {4 << 20}"
    assert refused(b"\x80\x02" + b"]" * (4 << 20) + b".").startswith(long[:16])
    lists = b"\x80\x02" + b"](" + b"K\x01" * 1000 + b"eq\x00" + b"]h\x00e" * 50
    assert refused(lists + b".")


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (tensor((10**9,), (0,)), "has a tensor of (1000000000,) in a storage of 24 numbers"),
        (tensor((10**9, 0), (1, 1)), ""),
        (tensor((5, 6), (6, 1)), "has a tensor of (5, 6) in a storage of 24 numbers"),
        (tensor((4, 6), (7, 1)), "has a tensor of (4, 6) in a storage of 24 numbers"),
        (tensor((4, 6), (6, 1), 1), "has a tensor of (4, 6) in a storage of 24 numbers"),
        (tensor((4, 6), (-6, 1)), "has a tensor with an impossible size"),
        (tensor((4, 6), (6, 1), -1), "has a tensor with an impossible size"),
        (tensor((2**50,), (1,)), "has a tensor with an impossible size"),
        (tensor((True,), (1,)), "has a tensor with an impossible size"),
        (tensor((1,) * 9, (1,) * 9), "has a tensor with an impossible shape"),
        (tensor((4, 6), (6,)), "has a tensor with an impossible shape"),
        (tensor([4, 6], (6, 1)), SENSELESS),
        (tensor(where=1), SENSELESS),
        (
            tensor(where=storage(n=10**9)),
            "has 96 bytes in archive/data/0; expected 4000000000 bytes; fetch it again",
        ),
        (
            tensor(where=storage("1")),
            "lacks archive/data/1; expected 96 bytes; fetch it again",
        ),
        (tensor(where=storage(kind="Quantized")), "its pickle names torch.QuantizedStorage"),
        (
            tensor(where=storage(kind="Long")),
            "has 96 bytes in archive/data/0; expected 192 bytes; fetch it again",
        ),
    ],
)
def test_claims_that_do_not_fit_the_storage(refused, tmp_path, state, found):
    if found:
        assert refused({"w": state}).startswith(found)
    else:
        (array,) = read_tensors(list_tensors(archive(tmp_path / "y", {"w": state}))).values()
        assert array.size == 0


def test_archives_that_are_none_of_torchs(refused, tmp_path):
    state = {"w": tensor()}
    message = "archive/data.pkl is compressed or damaged; expected it as it is"
    assert refused(state, method=zipfile.ZIP_DEFLATED) == message
    assert refused(state, byteorder=b"big").startswith("is big-endian; expected little-endian")
    inner = archive(tmp_path / "inner", state).read_bytes()
    assert refused(inner).startswith("its pickle has the opcode PERSID")  # P, of PK
    with pytest.warns(UserWarning, match="Duplicate name"):
        assert refused(b"N.", **{"data.pkl": dumps(state)}) == "lists a name twice; fetch it again"
    none = "is a zip archive, but none that torch.save wrote"
    assert refused(state, **{"inner/data.pkl": b"N."}) == none
    for path in (tmp_path / "x.npz", tmp_path / "empty.zip"):
        with zipfile.ZipFile(path, "w") as file:
            if path.name == "x.npz":
                file.writestr("a.npy", b"x")
        with pytest.raises(PicogptError):
            list_tensors(path)


def test_a_damaged_archive(tmp_path):
    data = (DATA / "torch" / "pytorch_model.bin").read_bytes()
    path = tmp_path / "x.bin"
    for damaged, found in {
        data[:-1]: "is cut short, or its list of contents is damaged; fetch it again",
        data + b"x": "is cut short, or its list of contents is damaged; fetch it again",
        data[:-100]: "is cut short, or its list of contents is damaged; fetch it again",
        data[:3000]: "is cut short, or its list of contents is damaged; fetch it again",
        data.replace(b"_rebuild_tensor", b"_rebuilt_tensor"): (
            "pytorch_model/data.pkl is damaged (wrong checksum); fetch it again"
        ),
    }.items():
        path.write_bytes(damaged)
        with pytest.raises(PicogptError) as error:
            list_tensors(path)
        assert found in str(error.value)


@pytest.mark.parametrize("data", [b"", b"<html>404</html>", b"{}", bytes(100), b"PK"])
def test_other_files_that_are_called_so(tmp_path, data):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(data)
    with pytest.raises(PicogptError) as error:
        list_tensors(path)
    assert str(error.value) == f"{path}: is no file that torch.save wrote; fetch it again"


def streamed(*values, tail=b""):
    return b"".join(map(dumps, values)) + tail


def test_the_older_stream(tmp_path):
    magic, machine = 0x1950A86A20F9469CFC6C, {"little_endian": True, "protocol_version": 1001}
    body = struct.pack("<Q", 24) + NUMBERS.tobytes()
    view = ("persistent", "storage", Name("torch FloatStorage"), "0", "cpu", 24, ("1", 0, 4))
    state = {"w": tensor((6, 4), (1, 6))}
    path = tmp_path / "x.bin"
    for data, found in (
        (streamed(magic, 1001, machine, state, ["0"], tail=body), ""),
        (streamed(magic, 1001, machine, state, ["0"], tail=body[:-4]), "; expected "),
        (streamed(magic, 1001, machine, state, ["0"], tail=body + b"x"), "; expected "),
        (streamed(magic, 1001, machine, state, ["1"], tail=body), "in the storage 1"),
        (streamed(magic, 1001, machine, state, ["0", "0"], tail=body), "in the storage 0"),
        (streamed(magic, 1001, machine, state, []), "lacks the storage 0"),
        (streamed(magic, 1001, machine, state, [1], tail=body), "has no list of its storages"),
        (
            streamed(magic, 1001, machine, state, ["0"], tail=b"\xff" * 8),
            "numbers in the storage 0",
        ),
        (streamed(magic, 1002, machine, state, ["0"], tail=body), "none that torch.save wrote"),
        (streamed(magic, 1001, {"little_endian": False}, state, ["0"]), "is big-endian"),
        (streamed(magic, 1001, {}, state, ["0"]), "is big-endian"),
        (streamed(magic, 1001, machine, {"w": tensor(where=view)}, ["0"]), "is part of another"),
        (streamed({"a": 1}), "is a pickle, but none that torch.save wrote"),
        (streamed(Name("os system", ("harm",))), "its pickle names os.system"),
        (streamed(magic, 1001, machine, Name("os system", ("x",)), []), "names os.system"),
    ):
        path.write_bytes(data)
        if found:
            with pytest.raises(PicogptError) as error:
                list_tensors(path)
            assert found in str(error.value)
        else:
            assert (read_tensors(list_tensors(path))["w"] == NUMBERS.reshape(4, 6).T).all()


def test_a_pickle_alone(tmp_path):
    path = tmp_path / "meta.pkl"
    value = {"stoi": {"a": 0, "é☃": 1}, "itos": {0: "a"}, "x": [1, 2.5, None, True, (1, -(2**40))]}
    for protocol in (2, 3, 4, 5):
        path.write_bytes(pickle.dumps(value, protocol))
        assert read_pickle(path) == value
    path.write_bytes(pickle.dumps({1, 2}))
    with pytest.raises(PicogptError, match="its pickle has the opcode EMPTY_SET"):
        read_pickle(path)
