"""Damaged copies of real files load or are refused in one line: no hang, no bomb, nothing run."""

import contextlib
import importlib
import random
import shutil
import signal
import struct
import sys
import tracemalloc
import zlib

import pytest
from conftest import DATA

from picogpt import PicogptError, load
from picogpt.layouts import load_encoder

LIMIT_SECONDS = 5
LIMIT_BYTES = 50 << 20
HARMFUL = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")
HARMFUL += ("os.remove", "os.rename", "shutil.rmtree", "pickle.find_class")
FILES = {  # the file that is damaged, and how many of its bytes are the beginning that counts
    "torch/pytorch_model.bin": 4096,
    "torch_stream/pytorch_model.bin": 4096,
    "nanogpt/ckpt.pt": 8192,
    "nanogpt/meta.pkl": 500,
    "llmc/gpt2_3.bin": 32,
    "gguf/tiny-F32.gguf": 10_000,
    "gguf/tiny-Q4_0.gguf": 10_000,
    "transformers/model.safetensors": 2_500,
    "plain/model.ckpt.index": 1_000,
}
NUMBERS = [0, 1, 127, 128, 255, 2**31 - 1, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
watching = []


def watch(event, arguments):
    made_up = event == "exec" and arguments[0].co_filename.startswith("<")  # not a module's
    if watching and (event in HARMFUL or made_up):
        watching.append(f"{event} {arguments}")


sys.addaudithook(watch)  # which stays; it does nothing but in the test below


def give_up(*_):
    raise TimeoutError(f"more than {LIMIT_SECONDS} s")


@contextlib.contextmanager
def limits(size):
    """Raises where what is done meanwhile takes too long or too much, or runs something."""
    signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    watching.append("")
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        seen = watching[1:]
        watching.clear()
    assert seen == []
    assert tracemalloc.get_traced_memory()[1] - before < size + LIMIT_BYTES


def mutate(data, rng, n_counting):
    """A few bytes changed, cut out, copied elsewhere, or set to what a length must not be; most of
    them where the file says what it holds."""
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        end = len(data)
        places = [range(min(n_counting, end)), range(max(0, end - 2_500), end), range(end)]
        at = rng.choice(rng.choices(places, [6, 3, 1])[0] or [0])
        match rng.randrange(7):
            case 0 | 1:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 3:
                data[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
            case 4:
                del data[at : at + rng.choice([1, 2, 8, 64])]
            case 5:
                other = rng.randrange(end)
                piece = data[other : other + rng.choice([1, 8, 100])]
                data[at : at + rng.choice([0, len(piece)])] = piece
            case 6:
                del data[rng.choice([at, end - 1]) :]
        data = data or bytearray(1)
    return bytes(data)


def reseal(data, name=b"/data.pkl"):
    """Computes the checksum of an archive's pickle anew, else only that would be tested."""
    at = data.rfind(name)  # in the list of contents, which comes last
    start = data.rfind(b"PK\x01\x02", 0, at)
    head = data.find(b"PK\x03\x04")
    if at < 0 or start < 0 or at - start > 100 or head < 0 or len(data) < head + 30:
        return data
    n_name, n_extra = struct.unpack_from("<HH", data, head + 26)
    size = struct.unpack_from("<I", data, start + 20)[0]
    first = head + 30 + n_name + n_extra
    crc = zlib.crc32(data[first : first + size])
    return data[: start + 16] + struct.pack("<I", crc) + data[start + 20 :]


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_load_or_are_refused(model_folder, tmp_path, sized, name):
    folder, _, file = name.partition("/")
    if folder == "nanogpt":
        path = shutil.copytree(DATA / folder, tmp_path / folder) / file
    else:
        path = model_folder(folder) / file
    read = load if file != "meta.pkl" else lambda path: load_encoder(path.parent)
    for other in path.parent.glob("tiny-*"):
        if other != path:
            other.unlink()
    data, rng = path.read_bytes(), random.Random(name)
    read(path)  # imports what it needs
    importlib.import_module("gguf")
    n, n_loaded = sized(2_000, 20_000), 0
    tracemalloc.start()
    try:
        for i in range(n):
            damaged = mutate(data, rng, FILES[name])
            path.write_bytes(reseal(damaged) if i % 2 else damaged)
            with limits(len(data)):
                try:
                    read(path)
                    n_loaded += 1
                except PicogptError as error:
                    assert "\n" not in str(error)
                    assert len(str(error)) < 20_000
    finally:
        tracemalloc.stop()
    assert n // 100 < n_loaded < n * 9 // 10  # the limits were tried on both
