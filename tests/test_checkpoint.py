"""TensorFlow's files, read right, or refused in one line."""

import os
import random
import struct
import warnings

import google_crc32c
import numpy as np
import pytest
from conftest import DATA

from picogpt import PicogptError
from picogpt.checkpoint import _masked_crc, find_checkpoint, read_index, read_tensors

INDEX = (DATA / "plain" / "model.ckpt.index").read_bytes()


def read(folder, **options):
    prefix = find_checkpoint(folder)
    index = read_index(prefix)
    return read_tensors(prefix, {n: e for n, e in index.items() if "model/" in n}, **options)


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


def test_float16_stays_as_it_is(expected):
    for name, tensor in read(DATA / "float16").items():
        assert tensor.dtype == np.float16
        assert tensor.tobytes() == expected[name].astype(np.float16).tobytes()


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
    prefix = folder / "model.ckpt"
    old, new = read_index(prefix), bytearray(INDEX)
    for entry in old.values():
        raw = swapped.view(np.uint8)[entry.offset : entry.offset + entry.size]
        at = new.index(struct.pack("<I", entry.crc))
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
    prefix = folder / "model.ckpt"
    entries = {n: e._replace(offset=e.offset + 1) for n, e in read_index(prefix).items()}
    for name, tensor in read_tensors(prefix, entries).items():
        assert tensor.flags.aligned
        assert (tensor == expected[name]).all()


def test_a_flipped_bit_names_tensor_and_file(model_folder):
    folder = model_folder()
    path = folder / "model.ckpt.data-00000-of-00001"
    data = bytearray(path.read_bytes())
    entry = read_index(folder / "model.ckpt")["model/h1/mlp/c_fc/w"]
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


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("bfloat16", "model/h0/attn/c_attn/b has the type bfloat16"),
        ("sliced", "model/wte is stored in slices"),
    ],
)
def test_what_needs_tensorflow_says_how_to_get_it(name, what, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorflow", None)
    with pytest.raises(PicogptError) as error:
        read(DATA / name)
    message = f'{what}, which only TensorFlow reads; run "pip install picogpt[tensorflow]"'
    assert str(error.value) == f"{DATA / name}/model.ckpt.index: {message}"


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
    assert find_checkpoint(tmp_path) == tmp_path / "model-1000"


def test_a_state_file_holds_utf8_as_octal_escapes(tmp_path):
    (tmp_path / "modèle.index").touch()
    line = r'model_checkpoint_path: "/é/mod\303\250le"'
    (tmp_path / "checkpoint").write_text(line, encoding="utf-8")
    assert find_checkpoint(tmp_path) == tmp_path / "modèle"


def test_the_only_checkpoint_needs_no_state_file(tmp_path):
    (tmp_path / "model.ckpt.index").touch()
    assert find_checkpoint(tmp_path) == tmp_path / "model.ckpt"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "{0}: found a, b of the files *.index; expected one, or a file `checkpoint` that "
               "names one"),
        ('model_checkpoint_path: "c"', "{0}/checkpoint: names c; c.index is missing; found a, b"),
        ('model_checkpoint_path: ""', "{0}/checkpoint: names ; .index is missing; found a, b"),
        ("<html>", "{0}/checkpoint: names no model_checkpoint_path; found a, b"),
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
    entry = read_index(tmp_path / "x")["model/w"]
    assert (entry.dtype, entry.shape, entry.offset, entry.size) == ("<f4", (2,), 0, 8)


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
        read_index(tmp_path / "x")
    assert str(error.value) == f"{path}: {found}; is damaged or no index; fetch it again"


def test_a_compressed_block_is_refused(tmp_path):
    data = bytearray(table([[HEADER], [W]]))
    end = 5 + len(HEADER[1]) - 2 + 8  # of the first block: 3 lengths, the header, two numbers
    assert data[end] == 0
    data[end] = 1
    data[end + 1 : end + 5] = struct.pack("<I", _masked_crc(bytes(data[: end + 1])))
    (tmp_path / "x.index").write_bytes(data)
    with pytest.raises(PicogptError, match=r"has a compressed block \(type 1\)"):
        read_index(tmp_path / "x")


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
            entries = read_index(folder / "model.ckpt")
            for name, entry in entries.items():
                if not entry.unusual:
                    read_tensors(folder / "model.ckpt", {name: entry})
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
    assert find_checkpoint(tmp_path) == tmp_path / name


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
            read_index(tmp_path / "x")
