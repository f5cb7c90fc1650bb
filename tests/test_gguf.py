"""GGUF: read as its own package wrote it; what is damaged or claims too much is refused."""

import struct
import sys

import numpy as np
import pytest

from picogpt import PicogptError, load
from picogpt.formats import gguf as ours
from picogpt.formats.gguf import list_tensors
from picogpt.formats.tensors import read_tensors

gguf = pytest.importorskip("gguf")
KINDS = gguf.GGMLQuantizationType
WIDENED = sorted(gguf.quants._type_traits, key=int)


@pytest.fixture
def written(tmp_path):
    """A function that writes arrays with the package, and returns where."""

    def write(arrays, kind=None, **metadata):
        path = tmp_path / "x.gguf"
        writer = gguf.GGUFWriter(path, "gpt2")
        for name, (add, value) in metadata.items():
            getattr(writer, f"add_{add}")(name, value)
        for name, array in arrays.items():
            writer.add_tensor(name, array, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def test_plain_types_and_metadata(written):
    arrays = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.float16([[1.5], [2]]),
        "c": np.float64([0.1, 0.2]),
    }
    metadata = {
        "x.text": ("string", "é☃"),
        "x.number": ("float32", 0.5),
        "x.large": ("uint64", 2**40),
        "x.truth": ("bool", True),
        "x.texts": ("array", ["a", "", "é"]),
        "x.numbers": ("array", [1, -2, 3]),
        "general.alignment": ("uint32", 64),
    }
    path = written(arrays, **metadata)
    listing = list_tensors(path)
    found = listing.metadata
    assert found["x.text"] == "é☃"
    assert found["x.number"] == 0.5
    assert found["x.large"] == 2**40
    assert found["x.truth"] is True
    assert found["x.texts"] == ["a", "", "é"]
    assert found["x.numbers"].tolist() == [1, -2, 3]
    read = read_tensors(listing)
    for name, array in arrays.items():
        assert read[name].dtype == np.float32
        assert (read[name] == array.astype(np.float32)).all()
    assert not read["a"].flags.owndata
    assert not read["a"].flags.writeable


@pytest.mark.parametrize("kind", WIDENED, ids=lambda kind: kind.name)
def test_every_type_that_the_package_widens(written, kind, monkeypatch):
    """From random bytes, of which each type makes some numbers; in pieces too."""
    block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
    n = 1 if kind == KINDS.BF16 else block
    data = np.random.default_rng(0).integers(0, 256, (12, 4 * n // block * n_bytes), np.uint8)
    if kind == KINDS.BF16:
        data = data.reshape(12, -1)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(data, kind)
    path = written({"w": data}, kind)
    for piece in (1 << 22, 3 * n_bytes, 1024):
        monkeypatch.setattr(ours, "PIECE_BYTES", max(piece, n_bytes))
        (found,) = read_tensors(list_tensors(path)).values()
        assert found.shape == wanted.shape
        assert np.array_equal(found, wanted, equal_nan=True)


@pytest.mark.parametrize("kind", ["I8", "I32", "Q8_1", "Q8_K"])
def test_other_types_are_refused_by_name(written, kind):
    path = written({"w": np.zeros((2, 4), np.int8)})
    data = path.read_bytes()
    at = data.index(b"w" + struct.pack("<I", 2)) + 21
    assert data[at : at + 4] == struct.pack("<I", KINDS.I8)
    path.write_bytes(data[:at] + struct.pack("<I", KINDS[kind]) + data[at + 4 :])
    with pytest.raises(PicogptError) as error:
        read_tensors(list_tensors(path))
    said = f"{path}: w has the type {kind}; expected a floating-point type"
    assert str(error.value) == said


def test_quantized_ones_need_the_package(model_folder, monkeypatch):
    folder = model_folder("gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert load(folder / "tiny-F16.gguf").hparams["n_ctx"] == 24
    path = folder / "tiny-Q8_0.gguf"
    with pytest.raises(PicogptError) as error:
        load(path)
    found = "token_embd.weight has the quantized type 8"
    assert str(error.value) == f'{path}: {found}; to read it, run "pip install gguf"'


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(n_tensors=0, n_metadata=0, body=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_metadata) + body


def tensor(*shape, kind=0, offset=0, name=b"w"):
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + axes + struct.pack("<IQ", kind, offset)


BEYOND = "is cut short, or has a length that reaches beyond its end; fetch it again"
LIST = struct.pack("<I", 9)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"GGUF", BEYOND),
        (header(version=1), "is of version 1; expected little-endian, version 3"),
        (header(version=3 << 24), "is big-endian; expected little-endian, version 3"),
        (header(2**40), "says that it has more than 50000 names"),
        (header(0, 2**63), "says that it has more than 50000 names"),
        (header(0, 1), BEYOND),
        (header(0, 1, struct.pack("<Q", 2**62) + b"x"), BEYOND),
        (header(0, 1, text(b"a") + struct.pack("<I", 13)), "has a metadatum of the type 13"),
        (header(0, 1, text(b"a") + LIST + struct.pack("<IQ", 4, 2**61)), BEYOND),
        (
            header(0, 1, text(b"a") + LIST + struct.pack("<IQ", 8, 2**61)),
            "says that it has 2305843009213693952 texts",
        ),
        (
            header(0, 1, text(b"a") + LIST + struct.pack("<IQ", 8, 1) + text(b"ab")[:-1]),
            BEYOND,
        ),
        (
            header(0, 1, text(b"a") + LIST + struct.pack("<IQ", 9, 1)),
            "has a metadatum of the type 9, 9",
        ),
        (header(1, 0, tensor(10**9)), "w ends at 4000000064; fetch it again"),
        (header(1, 0, tensor(2**31, 2**31)), "w has an impossible shape, or comes twice"),
        (header(1, 0, tensor(*[1] * 9)), "w has 9 axes"),
        (header(1, 0, tensor(1, offset=2**63)), "w ends at"),
        (header(2, 0, tensor(0) + tensor(0) + bytes(64)), "w has an impossible shape, or comes tw"),
        (header(1, 0, tensor(31, kind=2)), "w of (31,) does not fit into blocks of 32"),
        (header(1, 0, tensor(kind=2)), "w of () does not fit into blocks of 32"),
        (
            header(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 0)),
            "has the alignment 0",
        ),
        (
            header(0, 1, text(b"general.alignment") + struct.pack("<I", 8) + text(b"x")),
            "has the alignment 'x'",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, data, found):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(PicogptError) as error:
        list_tensors(path)
    assert str(error.value).startswith(f"{path}: ")
    assert found in str(error.value)


@pytest.mark.parametrize("name", ["tiny-F32.gguf", "tiny-Q4_0.gguf"])
def test_a_file_that_is_cut_short(model_folder, name):
    path = model_folder("gguf") / name
    data = path.read_bytes()
    for n in (3, 30, 2_000, len(data) // 2, len(data) - 200):
        path.write_bytes(data[:n])
        with pytest.raises(PicogptError) as error:
            load(path)
        assert str(error.value).startswith(f"{path}: ")
