"""llm.c's files of weights, gpt2_*.bin: 256 integers of header, and the tensors in a fixed order.

Source: write_model and write_tensors of train_gpt2.py in karpathy/llm.c, whose names of tensors
these are.
"""

import math
from pathlib import Path

import numpy as np

from ..errors import PicogptError
from .tensors import BYTES_OF, MAX_KEYS, Entry, Listing

SUFFIXES: tuple[str, ...] = ()  # .bin is PyTorch's
MAGIC = 20240326
HEADER_BYTES = 1024
DTYPES = {3: "float32", 5: "bfloat16"}  # by the version
FIELDS = ("max_seq_len", "vocab_size", "num_layers", "num_heads", "channels", "padded_vocab_size")


def matches(head: bytes, tail: bytes) -> bool:
    """Whether a file begins with the magic number."""
    return head.startswith(MAGIC.to_bytes(4, "little"))


def list_tensors(path: Path) -> Listing:
    """Reads which tensors a file holds; the metadata are the header's numbers.

    Raises:
        PicogptError: the file is damaged, cut short, or of another version.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        data = file.read(HEADER_BYTES)
        size = file.seek(0, 2)
    if len(data) < HEADER_BYTES:
        raise PicogptError(f"{path}: {size} bytes; its header alone has {HEADER_BYTES}")
    _, version, *numbers = np.frombuffer(data, "<i4")[: 2 + len(FIELDS)].tolist()
    if version not in DTYPES:
        raise PicogptError(f"{path}: is of version {version}; expected 3 or 5; export it anew")
    metadata = dict(zip(FIELDS, numbers, strict=True))
    shapes = _shapes(**metadata) if min(numbers) > 0 and numbers[2] < MAX_KEYS // 12 else {}
    entries: dict[str, Entry] = {}
    offset = HEADER_BYTES
    for name, shape in shapes.items():
        n_bytes = math.prod(shape) * BYTES_OF[DTYPES[version]]
        entries[name] = Entry(DTYPES[version], shape, path, offset, n_bytes)
        offset += n_bytes
    if not shapes or offset != size:
        said = ", ".join(f"{name}={value}" for name, value in metadata.items())
        needed = f"expected {offset}; fetch it again" if shapes else "expected numbers above 0"
        raise PicogptError(f"{path}: {size} bytes; its header says {said}; {needed}")
    return Listing(entries, metadata)


def _shapes(
    max_seq_len: int,
    vocab_size: int,
    num_layers: int,
    num_heads: int,
    channels: int,
    padded_vocab_size: int,
) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors by their names, in the file's order."""
    n = channels
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (padded_vocab_size, n),
        "transformer.wpe.weight": (max_seq_len, n),
    }
    modules = {"ln_1": (n,), "attn.c_attn": (3 * n, n), "attn.c_proj": (n, n), "ln_2": (n,)}
    modules |= {"mlp.c_fc": (4 * n, n), "mlp.c_proj": (n, 4 * n)}
    for module, shape in modules.items():
        for end, axes in (("weight", shape), ("bias", shape[:1])):
            shapes |= {f"transformer.h.{i}.{module}.{end}": axes for i in range(num_layers)}
    return shapes | {"transformer.ln_f.weight": (n,), "transformer.ln_f.bias": (n,)}
