"""How fast picogpt starts: the import, --help, and checkpoints of GPT-2 124M's shape.

    python benchmarks/load.py

The checkpoints have random weights and lie in the page cache; TensorFlow and safetensors, which
write them, must be installed. Medians, the least and the most, in milliseconds; then by how much
`load` grows the process at most, in files' sizes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from generate import HPARAMS, machine, random_weights, timed, write_checkpoint

from picogpt import Encoder, load, save
from picogpt.checkpoint import find_checkpoint, read_header, read_index, read_tensors

# The largest the process has been, against what it was before. The vocabulary, some 20 MB, is
# not the weights', so one has been there before.
GROWTH = """
import resource, sys
from picogpt import Encoder, load
Encoder.gpt2()
load("tales")
def memory(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
before = memory("VmRSS")
model = load(sys.argv[1])
print(memory("VmHWM") - before)
"""


def read(folder, verify):
    read_tensors(read_index(find_checkpoint(folder)), verify=verify)


def read_safetensors(path):
    read_tensors(read_header(path))


def write_halves(source, folder, dtype):
    """Writes the same model in another type."""
    from safetensors.numpy import load_file

    folder.mkdir()
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    header, data = {}, bytearray()
    for name, tensor in load_file(source / "model.safetensors").items():
        upper = (tensor.view(np.uint32) >> 16).astype(np.uint16)
        start = len(data)
        data += (upper if dtype == "BF16" else tensor.astype(np.float16)).tobytes()
        fields = {"dtype": dtype, "shape": tensor.shape, "data_offsets": [start, len(data)]}
        header[name] = fields
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)


def growth(folder):
    """-> by how much `load` grows a process at most, in sizes of the file with the weights."""
    size = max(path.stat().st_size for path in folder.iterdir())
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, str(folder)], check=True, capture_output=True, text=True
    )
    return int(done.stdout) / size


def python(*arguments):
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11, help="turns of each (default: 11)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            write_checkpoint(folder, HPARAMS, random_weights(HPARAMS))
        except subprocess.CalledProcessError:
            sys.exit("load.py: its checkpoint needs TensorFlow; run pip install tensorflow-cpu")
        saved, kinds = folder / "safetensors", {"TensorFlow": folder}
        save(saved, *load(folder))
        kinds["safetensors"] = saved
        for dtype in ("F16", "BF16"):
            kinds[f"safetensors, {dtype}"] = folder / dtype
            write_halves(saved, folder / dtype, dtype)
        cases = {
            "python, nothing": (python, "-c", ""),
            "python -c 'import numpy'": (python, "-c", "import numpy"),
            "python -c 'import picogpt'": (python, "-c", "import picogpt"),
            "picogpt --help": (python, "-m", "picogpt", "--help"),
            "tensors mapped": (read, folder, False),
            "tensors mapped, checksums compared": (read, folder, True),
            "Encoder.gpt2()": (Encoder.gpt2,),
            "load": (load, folder),
            "safetensors mapped": (read_safetensors, saved / "model.safetensors"),
            "load, safetensors": (load, saved),
            "load, F16": (load, folder / "F16"),
        }
        times = {what: [] for what in cases}
        for i in range(-1, args.rounds):  # the first turn warms up
            for what, (function, *arguments) in cases.items():
                seconds = timed(function, *arguments)
                if i >= 0:
                    times[what].append(seconds * 1e3)
        grown = {kind: growth(path) for kind, path in kinds.items()}
    print(machine())
    for what, ms in times.items():
        print(f"{what:36} {statistics.median(ms):8.1f} {min(ms):8.1f} {max(ms):8.1f}")
    for kind, sizes in grown.items():
        print(f"memory for {kind:25} {sizes:8.3f} x the file")


if __name__ == "__main__":
    main()
