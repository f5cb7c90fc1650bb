"""TensorFlow's files and safetensors, read right, or refused in one line."""

import json
import os
import random
import struct
import sys
import warnings

import google_crc32c
import numpy as np
import pytest
from conftest import DATA

from picogpt import PicogptError
from picogpt.formats import tensorflow
from picogpt.formats.files import list_tensors
from picogpt.formats.tensorflow import find_checkpoint
from picogpt.formats.tensors import read_tensors

INDEX = (DATA / "plain" / "model.ckpt.index").read_bytes()


def read(folder, **options):
    index = tensorflow.list_tensors(find_checkpoint(folder))
    return read_tensors({n: e for n, e in index.items() if "model/" in n}, **options)


def _masked_crc(data):
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def footer(data):
    """-> offset and size of the list of blocks."""
    values, value, shift = [], 0, 0
    for byte in data[-48:]:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(value)
            value = shift = 0
    return values[2:4]


def reseal(data):
    """Computes the checksums of a changed index anew, where its blocks still can be found."""
    data = bytearray(data)
    start, size = footer(INDEX)
    for offset, n in ((0, start - 5 - 13), (start, size)):  # 13 bytes of meta index between them
        end = offset + n + 1
        data[end : end + 4] = struct.pack("<I", _masked_crc(bytes(data[offset:end])))
    return bytes(data)


def test_reseal_finds_the_blocks():
    """Else half of the fuzzing below would test nothing but checksums."""
    assert reseal(INDEX) == INDEX


@pytest.mark.parametrize("name", ["plain", "sharded", "slots"])
def test_tensors_equal_the_writers_bit_for_bit(name, expected):
    tensors = read(DATA / name)
    wanted = {n: value for n, value in expected.items() if n.startswith("model/")}
    assert len(wanted) == 28
    for n, value in wanted.items():
        assert tensors[n].dtype == np.float32
        assert tensors[n].shape == value.shape
        assert tensors[n].tobytes() == value.tobytes()


@pytest.mark.parametrize("piece", [1 << 22, 100, 2])
def test_float16_is_widened_piece_by_piece(expected, monkeypatch, piece):
    monkeypatch.setattr("picogpt.formats.tensors.PIECE_BYTES", piece)
    for name, tensor in read(DATA / "float16").items():
        assert tensor.dtype == np.float32
        assert (tensor == expected[name].astype(np.float16)).all()


def test_a_flipped_bit_of_a_float16_is_seen(model_folder):
    folder = model_folder("float16")
    path = folder / "model.ckpt.data-00000-of-00001"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(PicogptError, match=r"model/wte is damaged \(wrong checksum\)"):
        read(folder)
    read(folder, verify=False)


def test_tensors_are_mapped_and_read_only():
    for tensor in read(DATA / "plain").values():
        assert not tensor.flags.owndata
        assert not tensor.flags.writeable
        assert tensor.flags.aligned
        assert type(tensor) is np.ndarray


def rewrite(folder, change):
    path = folder / "model.ckpt.index"
    path.write_bytes(change(path.read_bytes()))


def entry_of(name, index=INDEX):
    """-> where the value of that tensor's entry begins."""
    return index.index(name) + len(name)


def test_big_endian_files_are_turned_round(model_folder, expected):
    folder = model_folder()
    data = folder / "model.ckpt.data-00000-of-00001"
    swapped = np.fromfile(data, np.uint32).byteswap()
    swapped.tofile(data)
    old, new = tensorflow.list_tensors(folder / "model.ckpt.index"), bytearray(INDEX)
    whole = (DATA / "plain" / "model.ckpt.data-00000-of-00001").read_bytes()
    for entry in old.values():
        raw = swapped.view(np.uint8)[entry.offset : entry.offset + entry.size]
        crc = _masked_crc(whole[entry.offset : entry.offset + entry.size])
        at = new.index(struct.pack("<I", crc))
        new[at : at + 4] = struct.pack("<I", _masked_crc(raw))
    assert new[5:7] == b"\x1a\x02"  # the header: one shard, little-endian left out, the version
    # Field 3, the version, makes room for field 2, the byte order.
    new[5:9] = b"\x10\x01\x18\x01"
    (folder / "model.ckpt.index").write_bytes(reseal(bytes(new)))
    for name, tensor in read(folder).items():
        assert tensor.dtype == np.float32
        assert (tensor == expected[name]).all()


def test_unaligned_tensors_are_copied(model_folder, expected):
    folder = model_folder()
    data = folder / "model.ckpt.data-00000-of-00001"
    data.write_bytes(b"x" + data.read_bytes())
    index = tensorflow.list_tensors(folder / "model.ckpt.index")
    entries = {n: e._replace(offset=e.offset + 1, checksum=None) for n, e in index.items()}
    for name, tensor in read_tensors(entries).items():
        assert tensor.flags.aligned
        assert (tensor == expected[name]).all()


def test_a_flipped_bit_names_tensor_and_file(model_folder):
    folder = model_folder()
    path = folder / "model.ckpt.data-00000-of-00001"
    data = bytearray(path.read_bytes())
    entry = tensorflow.list_tensors(folder / "model.ckpt.index")["model/h1/mlp/c_fc/w"]
    data[entry.offset + entry.size - 1] ^= 1
    path.write_bytes(data)
    with pytest.raises(PicogptError) as error:
        read(folder)
    damaged = "model/h1/mlp/c_fc/w is damaged (wrong checksum)"
    assert str(error.value) == f"{path}: {damaged}; fetch it again"
    assert len(read(folder, verify=False)) == 28


def test_without_fast_checksums_none_is_checked_and_it_says_so(model_folder, monkeypatch):
    folder = model_folder()
    path = folder / "model.ckpt.data-00000-of-00001"
    path.write_bytes(bytes(path.stat().st_size))
    monkeypatch.setattr(google_crc32c, "implementation", "python")
    with pytest.warns(UserWarning, match="^checksums not checked: google-crc32c lacks its C code$"):
        assert len(read(folder)) == 28
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read(folder, verify=False)) == 28


@pytest.mark.parametrize("size", [0, 1, 20_000])
def test_a_truncated_shard_says_how_many_bytes(model_folder, size):
    folder = model_folder()
    path = folder / "model.ckpt.data-00000-of-00001"
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    with pytest.raises(PicogptError) as error:
        read(folder)
    assert str(error.value) == f"{path}: {size} bytes; expected {len(whole)}; fetch it again"


@pytest.mark.parametrize("name", ["model.ckpt.index", "model.ckpt.data-00000-of-00001"])
def test_a_git_lfs_pointer_is_called_one(model_folder, name):
    folder = model_folder()
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 52096\n"
    (folder / name).write_text(pointer, encoding="utf-8")
    with pytest.raises(PicogptError) as error:
        read(folder)
    message = 'is a Git LFS pointer, not the file; run "git lfs pull"'
    assert str(error.value) == f"{folder / name}: {message}"


def test_a_missing_shard_is_named(model_folder):
    folder = model_folder()
    path = folder / "model.ckpt.data-00000-of-00001"
    path.unlink()
    with pytest.raises(FileNotFoundError) as error:
        read(folder)
    assert error.value.filename == str(path)


def test_what_needs_tensorflow_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(PicogptError) as error:
        read(DATA / "sliced")
    what = "model/wte is stored in slices, which only TensorFlow reads"
    message = f'{what}; run "pip install picogpt[tensorflow]"'
    assert str(error.value) == f"{DATA / 'sliced'}/model.ckpt.index: {message}"


@pytest.mark.parametrize(
    "state",
    [
        "/content/checkpoint/run1/model-1000",
        r"C:\\runs\\1\\model-1000",
        r"C:\runs\model-1000",
        "model-1000",
        r"C:\\runs\\117M\\model-1000",
        r"/it\'s \"here\"/model-1000",
    ],
)
def test_only_the_last_part_of_the_state_files_path_counts(tmp_path, state):
    for name in ("model-500.index", "model-1000.index"):
        (tmp_path / name).touch()
    line = f'model_checkpoint_path: "{state}"\nall_model_checkpoint_paths: "x"\n'
    (tmp_path / "checkpoint").write_text(line, encoding="utf-8")
    assert find_checkpoint(tmp_path) == tmp_path / "model-1000.index"


def test_a_state_file_holds_utf8_as_octal_escapes(tmp_path):
    (tmp_path / "modèle.index").touch()
    line = r'model_checkpoint_path: "/é/mod\303\250le"'
    (tmp_path / "checkpoint").write_text(line, encoding="utf-8")
    assert find_checkpoint(tmp_path) == tmp_path / "modèle.index"


def test_the_only_checkpoint_needs_no_state_file(tmp_path):
    (tmp_path / "model.ckpt.index").touch()
    assert find_checkpoint(tmp_path) == tmp_path / "model.ckpt.index"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "{0}: found a, b of the files *.index; expected one, or a file `checkpoint` that "
               "names one"),
        ('model_checkpoint_path: "c"', "{0}/checkpoint: names c; c.index is missing; found a, b"),
        ('model_checkpoint_path: ""', "{0}/checkpoint: names ; .index is missing; found a, b"),
        ("<html>", "{0}/checkpoint: names no model_checkpoint_path; fetch it again"),
        ("\udcff", "{0}/checkpoint: byte 0 is 0xff; expected UTF-8 text; fetch it again"),
    ],
)  # fmt: skip
def test_no_telling_which_checkpoint(tmp_path, state, message):
    for name in ("a.index", "b.index"):
        (tmp_path / name).touch()
    if state is not None:
        (tmp_path / "checkpoint").write_bytes(state.encode("utf-8", "surrogateescape"))
    with pytest.raises(PicogptError) as error:
        find_checkpoint(tmp_path)
    assert str(error.value) == message.format(tmp_path)


def varint(n):
    out = b""
    while n > 127:
        out += bytes([n & 127 | 128])
        n >>= 7
    return out + bytes([n])


def table(blocks, listed=None):
    """Writes an index of blocks of (key, value), none of them compressed in the key."""

    def seal(pairs):
        body = b"".join(
            varint(0) + varint(len(k)) + varint(len(v)) + k + v for k, v in pairs
        ) + struct.pack("<II", 0, 1)
        return body + b"\0" + struct.pack("<I", _masked_crc(body + b"\0"))

    data, handles = b"", []
    for pairs in blocks:
        sealed = seal(pairs)
        handles.append(varint(len(data)) + varint(len(sealed) - 5))
        data += sealed
    handles = [handles[i] for i in listed] if listed else handles
    sealed = seal([(b"%05d" % i, handle) for i, handle in enumerate(handles)])
    end = varint(0) + varint(0) + varint(len(data)) + varint(len(sealed) - 5)
    return data + sealed + end.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57)


HEADER = (b"", b"\x08\x01\x1a\x02\x08\x01")
AXES = b"\x12\x02\x08\x02"  # one axis of length 2
W = (b"model/w", b"\x08\x01\x12\x04" + AXES + b"\x28\x08\x35abcd")


def test_the_table_writer_of_these_tests_is_right(tmp_path):
    (tmp_path / "x.index").write_bytes(table([[HEADER], [W]]))
    entry = tensorflow.list_tensors(tmp_path / "x.index")["model/w"]
    assert (entry.dtype, entry.shape, entry.offset, entry.size) == ("float32", (2,), 0, 8)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "does not end in an index's magic number"),
        (b"<html>" * 99, "does not end in an index's magic number"),
        (INDEX[:-1], "does not end in an index's magic number"),
        (bytes(40) + INDEX[-8:], "has a block out of place"),
        (INDEX[40:], "has a block out of place"),
        (b"x" * 40 + INDEX[40:], "has a block with a wrong checksum"),
        (bytes((2 << 20) + 1), f"is larger than {2 << 20} bytes"),
        (table([[HEADER], [W]], [0, 1, 1]), "has a block out of place"),
        (table([[HEADER], [W], [W]]), "has names out of order"),
        (table([[(b"w", HEADER[1])]]), "has no proper header"),
        (table([[(b"", b"\x08\x00")]]), "has no proper header"),
        (table([[(b"", b"\x08\x01\x10\x02")]]), "has no proper header"),
        (table([[HEADER, (b"x" * 1025, b"")]]), "has a name that is too long"),
        (table([[HEADER, (b"a\nb", b"")]]), "has a name that is not text"),
        (table([[HEADER, (b"w", b"\x08")]]), "has a length that reaches beyond its end"),
        (table([[HEADER, (b"w", b"\x0b")]]), "has a field of kind 3"),
        (table([[HEADER, (b"w", b"\x08" + b"\xff" * 11)]]), "has a number that is too long"),
        (table([[HEADER, (b"w", b"\x0a\x01\x01")]]), "has bytes for a number in field 1"),
        (table([[HEADER, (b"w", b"\x10\x01")]]), "has a number for a message in field 2"),
        (table([[HEADER, (b"w", b"\x08\x01\x18\x01")]]), "w has an impossible shape or shard"),
        (
            table([[HEADER, (b"w", b"\x08\x01\x12\x24" + AXES * 9)]]),
            "w has an impossible shape or shard",
        ),
        (
            table([[HEADER, (b"w", b"\x08\x01\x12\x0c\x12\x00\x12\x08\x08" + varint(2**48))]]),
            "w has an impossible shape or shard",
        ),
        (
            table([[HEADER, (b"w", b"\x08\x01\x12\x04" + AXES + b"\x28\x04")]]),
            "w has 4 bytes for the shape (2,)",
        ),
    ],
)
def test_a_damaged_or_hostile_index_is_refused(tmp_path, data, found):
    path = tmp_path / "x.index"
    path.write_bytes(data)
    with pytest.raises(PicogptError) as error:
        tensorflow.list_tensors(tmp_path / "x.index")
    assert str(error.value) == f"{path}: {found}; is damaged or no index; fetch it again"


def test_a_compressed_block_is_refused(tmp_path):
    data = bytearray(table([[HEADER], [W]]))
    end = 5 + len(HEADER[1]) - 2 + 8  # of the first block: 3 lengths, the header, two numbers
    assert data[end] == 0
    data[end] = 1
    data[end + 1 : end + 5] = struct.pack("<I", _masked_crc(bytes(data[: end + 1])))
    (tmp_path / "x.index").write_bytes(data)
    with pytest.raises(PicogptError, match=r"has a compressed block \(type 1\)"):
        tensorflow.list_tensors(tmp_path / "x.index")


def mutate(data, rng):
    """A few bytes changed, cut out, copied elsewhere, or set to what a length must not be."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 8])):
        at = rng.randrange(len(data))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice([0, 1, 127, 128, 255])
            case 2:
                huge = varint(rng.choice([2**31, 2**32 - 1, 2**63, 2**64 - 1, len(data)]))
                data[at : at + len(huge)] = huge[: len(data) - at]
            case 3:
                other = rng.randrange(len(data))
                n = rng.randrange(1, 40)
                data[at : at + n] = data[other : other + n]
            case 4:
                del data[at : at + rng.randrange(1, 40)]
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.05 else data)


SAFETENSORS = (DATA / "transformers" / "model.safetensors").read_bytes()
LENGTH = int.from_bytes(SAFETENSORS[:8], "little")


def safetensors(header, data=b""):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + data


def tensor(dtype="F32", shape=(2,), data_offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


@pytest.mark.parametrize("name", ["transformers", "shards", "old"])
def test_safetensors_hold_the_writers_numbers(name, expected):
    many = DATA / name / "model.safetensors.index.json"
    entries = list_tensors(many if many.exists() else DATA / name / "model.safetensors")
    prefix = "" if name == "old" else "transformer."
    wanted = {
        f"{prefix}wte.weight": "model/wte",
        f"{prefix}h.1.attn.c_attn.bias": "model/h1/attn/c_attn/b",
        f"{prefix}h.0.mlp.c_fc.weight": "model/h0/mlp/c_fc/w",
    }
    found = read_tensors({name: entries[name] for name in wanted})
    for name, other in wanted.items():
        assert found[name].dtype == np.float32
        assert not found[name].flags.owndata
        assert not found[name].flags.writeable
        assert found[name].tobytes() == expected[other].tobytes()


def test_a_safetensors_file_written_here_is_right(tmp_path):
    path = tmp_path / "model.safetensors"
    data = np.float32([1, 2]).tobytes() + np.float64([3]).tobytes() + np.uint16([0x4080]).tobytes()
    header = {
        "__metadata__": {"format": "pt"},
        "b": tensor(),
        "empty": tensor(shape=(0, 3), data_offsets=(0, 0)),
        "a": tensor("F64", (), (8, 16)),
        "c": tensor("BF16", (1, 1), (16, 18)),
        "d": tensor("I64", (0,), (18, 18)),
    }
    path.write_bytes(safetensors(header, data))
    entries = list_tensors(path)
    assert list(entries) == ["b", "empty", "a", "c", "d"]
    assert entries["d"].dtype == "I64"
    with pytest.raises(PicogptError) as error:
        read_tensors(entries)
    assert str(error.value) == f"{path}: d has the type I64; expected a floating-point type"
    del entries["d"]
    tensors = read_tensors(entries)
    assert {name: array.tolist() for name, array in tensors.items()} == (
        {"b": [1, 2], "empty": [], "a": 3, "c": [[4]]}
    )
    assert {array.dtype.name for array in tensors.values()} == {"float32"}


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "begins with no length of a header"),
        (b"<!DOCTYPE html>", "begins with no length of a header"),
        ((1 << 62).to_bytes(8, "little"), "begins with no length of a header"),
        (safetensors(b""), "has a header that is no JSON object"),
        (safetensors(b"[]"), "has a header that is no JSON object"),
        (safetensors(b"{" * 9), "has a header that is no JSON object"),
        (safetensors(b"[" * 100_000), "has a header that is no JSON object"),
        (safetensors(b"\xff"), "has a header that is no JSON object"),
        (safetensors({"w": 1}), "w has no dtype, shape or data_offsets"),
        (safetensors({"w": {"dtype": "F32"}}), "w has no dtype, shape or data_offsets"),
        (safetensors({"w": tensor(4)}), "w has no dtype, shape or data_offsets"),
        (safetensors({"w": tensor(shape=[-2])}), "w has an impossible shape or place"),
        (safetensors({"w": tensor(shape=[2.0])}), "w has an impossible shape or place"),
        (safetensors({"w": tensor(shape=[True])}), "w has an impossible shape or place"),
        (safetensors({"w": tensor(shape=[1 << 48])}), "w has an impossible shape or place"),
        (safetensors({"w": tensor(shape=[1] * 9)}), "w has an impossible shape or place"),
        (safetensors({"w": tensor(data_offsets=[0])}), "w has an impossible shape or place"),
        (safetensors({"w": tensor(data_offsets=[8, 0])}), "w has an impossible shape or place"),
        (safetensors({"w": tensor(shape=[3])}), "w has 8 bytes for the shape (3,)"),
        (
            safetensors({"w": tensor(data_offsets=[8, 16])}),
            "has tensors that do not lie one behind the other",
        ),
        (
            safetensors({"v": tensor(), "w": tensor(data_offsets=[4, 12])}),
            "has tensors that do not lie one behind the other",
        ),
    ],
)
def test_a_damaged_or_hostile_header_is_refused(tmp_path, data, found):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(PicogptError) as error:
        list_tensors(path)
    assert str(error.value) == f"{path}: {found}; is damaged or no safetensors file"


@pytest.mark.parametrize("size", [9, 8 + LENGTH - 1])
def test_a_header_cut_short_says_how_many_bytes(tmp_path, size):
    path = tmp_path / "model.safetensors"
    path.write_bytes(SAFETENSORS[:size])
    with pytest.raises(PicogptError) as error:
        list_tensors(path)
    assert str(error.value) == f"{path}: {size} bytes; its header alone has {8 + LENGTH}"


@pytest.mark.parametrize("change", [-1, 1, -20_000])
def test_a_safetensors_file_of_another_length(tmp_path, change):
    path = tmp_path / "model.safetensors"
    size = len(SAFETENSORS) + change
    path.write_bytes((SAFETENSORS + b"x")[:size])
    with pytest.raises(PicogptError) as error:
        list_tensors(path)
    message = f"{size} bytes; expected {len(SAFETENSORS)}; fetch it again"
    assert str(error.value) == f"{path}: {message}"


def test_a_git_lfs_pointer_for_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")
    with pytest.raises(
        PicogptError, match='is a Git LFS pointer, not the file; run "git lfs pull"'
    ):
        list_tensors(path)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, "has no weight_map; expected the shard of each tensor"),
        ({"w": "../x.safetensors"}, "w is in '../x.safetensors'; expected a file beside this"),
        ({"w": 1}, "w is in 1; expected a file beside this"),
        ({"w": "a.safetensors"}, "w is not in a.safetensors; fetch both again"),
    ],
)
def test_a_list_of_shards_that_is_wrong(tmp_path, weights, message):
    (tmp_path / "a.safetensors").write_bytes(safetensors({"v": tensor()}, bytes(8)))
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weights}), encoding="utf-8")
    with pytest.raises(PicogptError) as error:
        list_tensors(path)
    assert str(error.value) == f"{path}: {message}"


def test_shards_cannot_be_listed_without_end(tmp_path, monkeypatch):
    names = {f"w{i}": tensor(shape=(0,), data_offsets=(0, 0)) for i in range(100)}
    (tmp_path / "a.safetensors").write_bytes(safetensors(names))
    shards = {f"w{i}": f"a{i}.safetensors" for i in range(100)}
    for file in shards.values():
        (tmp_path / file).symlink_to(tmp_path / "a.safetensors")
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": shards}), encoding="utf-8")
    assert len(list_tensors(path)) == 100
    monkeypatch.setattr("picogpt.formats.files.MAX_KEYS", 1_000)
    with pytest.raises(PicogptError) as error:
        list_tensors(path)
    assert str(error.value) == f"{path}: its shards have more than 1000 names"
    for file in shards.values():
        (tmp_path / file).unlink()
    shards |= {f"v{i}": f"b{i:03}.safetensors" for i in range(900)}
    path.write_text(json.dumps({"weight_map": shards}), encoding="utf-8")
    with pytest.raises(PicogptError, match=r"a97\.safetensors, .*, and 900 more$"):
        list_tensors(path)


def test_a_file_that_cannot_be_mapped_is_named(monkeypatch):
    def fail(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", fail)
    with pytest.raises(PicogptError) as error:
        read(DATA / "plain")
    path = DATA / "plain" / "model.ckpt.data-00000-of-00001"
    assert str(error.value) == f"{path}: Cannot allocate memory; 47616 bytes to be mapped"


def test_all_missing_shards_are_named(model_folder):
    folder = model_folder("shards")
    for i in (1, 3):
        (folder / f"model-0000{i}-of-00003.safetensors").unlink()
    with pytest.raises(PicogptError) as error:
        list_tensors(folder / "model.safetensors.index.json")
    lost = "model-00001-of-00003.safetensors, model-00003-of-00003.safetensors"
    assert str(error.value) == f"{folder}: lacks {lost}"


def test_fuzzed_headers_end_in_our_error_only(tmp_path):
    rng = random.Random(0)
    path = tmp_path / "model.safetensors"
    n_passed = 0
    for i in range(1_000):
        header = mutate(SAFETENSORS[8 : 8 + LENGTH], rng)
        length = len(header) if i % 4 else rng.choice([0, 1 << 63, len(header) + 1, 1 << 20])
        path.write_bytes(length.to_bytes(8, "little") + header + SAFETENSORS[8 + LENGTH :])
        try:
            read_tensors(list_tensors(path))
            n_passed += 1
        except PicogptError as error:
            assert "\n" not in str(error)
    assert 0 < n_passed < 500


def fuzz(folder, n, seed):
    """Reads n damaged copies of a real index, and the tensors of those that pass.

    Every other copy has its blocks' checksums computed anew, since otherwise only they are tested.
    -> how many were refused, and how many of the resealed ones passed or failed behind a checksum.
    """
    rng = random.Random(seed)
    path = folder / "model.ckpt.index"
    refused = beyond = 0
    for i in range(n):
        data = mutate(INDEX, rng)
        if i % 2 and len(data) >= len(INDEX):
            data = reseal(data)
        path.write_bytes(data)
        try:
            entries = tensorflow.list_tensors(folder / "model.ckpt.index")
            for name, entry in entries.items():
                if not entry.read:
                    read_tensors({name: entry})
        except FileNotFoundError as error:  # of a shard that is not there
            assert "model.ckpt.data-" in error.filename
            beyond += 1
        except PicogptError as error:
            assert "\n" not in str(error)
            refused += 1
            beyond += "checksum" not in str(error) and "magic" not in str(error)
        else:
            beyond += 1
    return refused, beyond


def test_fuzzed_indexes_end_in_our_error_only(model_folder):
    refused, beyond = fuzz(model_folder(), 1_000, seed=0)
    assert refused > 500
    assert beyond > 250


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (r'model_checkpoint_path: "C:\\runs\\117M"', "117M"),
        (r'model_checkpoint_path: "C:\\runs\\1000"', "1000"),
        (r"model_checkpoint_path: 'it\'s'", "it's"),
        (r'model_checkpoint_path: "a\"b"  # not "c"', 'a"b'),
        ('\ufeffmodel_checkpoint_path: "m"', "m"),
    ],
)
def test_a_state_file_is_read_as_protocol_buffers_text(tmp_path, line, name):
    (tmp_path / f"{name}.index").touch()
    (tmp_path / "checkpoint").write_text(line, encoding="utf-8")
    assert find_checkpoint(tmp_path) == tmp_path / f"{name}.index"


def test_names_that_would_break_the_line_are_escaped(tmp_path):
    (tmp_path / "checkpoint").write_text(r'model_checkpoint_path: "\033[31m\n"', encoding="utf-8")
    with pytest.raises(PicogptError) as error:
        find_checkpoint(tmp_path)
    said = r"names \x1b[31m\n; \x1b[31m\n.index is missing; found none"
    assert str(error.value) == f"{tmp_path}/checkpoint: {said}"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
@pytest.mark.parametrize("name", ["model.ckpt.index", "model.ckpt.data-00000-of-00001"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(model_folder, name):
    folder = model_folder()
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(PicogptError):
        read(folder)


def test_a_flood_of_names_is_refused(tmp_path):
    for key in ("a%06d", "\0%06d"):
        pairs = [(key % i).encode() for i in range(50_001)]
        (tmp_path / "x.index").write_bytes(table([[HEADER, *((name, b"") for name in pairs)]]))
        with pytest.raises(PicogptError, match="has more than 50000 names"):
            tensorflow.list_tensors(tmp_path / "x.index")
