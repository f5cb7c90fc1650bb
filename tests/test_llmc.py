"""llm.c's files: what their header says, or a refusal with both numbers."""

import struct

import numpy as np
import pytest
from conftest import DATA

from picogpt import Encoder, PicogptError, load
from picogpt.formats.llmc import list_tensors
from picogpt.formats.tensors import read_tensors

FLOAT = (DATA / "llmc" / "gpt2_3.bin").read_bytes()
SIZES = "max_seq_len=32, vocab_size=300, num_layers=1, num_heads=4, channels=16, "


def with_header(*numbers, data=FLOAT):
    return struct.pack(f"<{len(numbers)}i", *numbers) + data[4 * len(numbers) :]


def test_float32_is_mapped_and_bfloat16_widened(model_folder):
    folder = model_folder("llmc")
    listings = [list_tensors(folder / f"gpt2_{version}.bin") for version in (3, 5)]
    assert listings[0].metadata == listings[1].metadata
    assert listings[0].metadata["padded_vocab_size"] == 384
    whole, rounded = map(read_tensors, listings)
    assert whole["transformer.h.0.attn.c_attn.weight"].shape == (48, 16)
    for name, array in whole.items():
        assert not array.flags.owndata
        assert np.allclose(rounded[name], array, rtol=2**-8)
    params = load(folder / "gpt2_3.bin").params
    w = params["blocks"][0]["attn"]["c_attn"]["w"]
    assert np.shares_memory(w, w.base)  # turned round where it lies
    assert (w == whole["transformer.h.0.attn.c_attn.weight"].T).all()


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (FLOAT[:1023], "1023 bytes; its header alone has 1024"),
        (with_header(20240326, 2), "is of version 2; expected 3 or 5; export it anew"),
        (with_header(20240326, 3, 0), "its header says max_seq_len=0, "),
        (with_header(20240326, 3, 32, 300, -1), "num_layers=-1, "),
        (with_header(20240326, 3, 32, 300, 2**31 - 1), "num_layers=2147483647, "),
        (with_header(20240326, 3, 32, 300, 1, 4, 2**31 - 1), "channels=2147483647, "),
        (FLOAT[:-1], f"{len(FLOAT) - 1} bytes; its header says {SIZES}padded_vocab_size=384; "),
        (FLOAT + b"x", f"expected {len(FLOAT)}; fetch it again"),
        (with_header(20240326, 5), f"{len(FLOAT)} bytes; its header says"),
    ],
)
def test_damaged_files_are_refused(tmp_path, data, found):
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    with pytest.raises(PicogptError) as error:
        list_tensors(path)
    assert found in str(error.value)
    assert str(error.value).startswith(f"{path}: ")


def test_with_gpt2s_number_of_tokens_no_vocabulary_is_needed(tmp_path):
    """A model of one channel, padded to 50,304 tokens as llm.c pads it."""
    n, n_ctx, n_vocab = 1, 2, 50304
    header = np.zeros(256, np.int32)
    header[:8] = [20240326, 5, n_ctx, 50257, 1, 1, n, n_vocab]
    numbers = np.zeros((n_vocab + n_ctx) * n + 12 * n * n + 15 * n, np.uint16)
    path = tmp_path / "gpt2.bin"
    path.write_bytes(header.tobytes() + numbers.tobytes())
    encoder, hparams, params = load(tmp_path)
    assert encoder.encoder == Encoder.gpt2().encoder
    assert hparams["n_vocab"] == 50257
    assert params["wte"].shape == (50257, 1)
