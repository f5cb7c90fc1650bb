"""How fast picogpt starts: the import, --help, and a checkpoint of GPT-2 124M's shape.

    python benchmarks/load.py

The checkpoint has random weights and lies in the page cache; TensorFlow, which writes it, must be
installed. Medians, the least and the most, in milliseconds.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from generate import HPARAMS, machine, random_weights, timed, write_checkpoint

from picogpt import Encoder, load
from picogpt.checkpoint import find_checkpoint, read_index, read_tensors


def read(folder, verify):
    prefix = find_checkpoint(folder)
    read_tensors(prefix, read_index(prefix), verify=verify)


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
        cases = {
            "python, nothing": (python, "-c", ""),
            "python -c 'import numpy'": (python, "-c", "import numpy"),
            "python -c 'import picogpt'": (python, "-c", "import picogpt"),
            "picogpt --help": (python, "-m", "picogpt", "--help"),
            "tensors mapped": (read, folder, False),
            "tensors mapped, checksums compared": (read, folder, True),
            "Encoder.gpt2()": (Encoder.gpt2,),
            "load": (load, folder),
        }
        times = {what: [] for what in cases}
        for i in range(-1, args.rounds):  # the first turn warms up
            for what, (function, *arguments) in cases.items():
                seconds = timed(function, *arguments)
                if i >= 0:
                    times[what].append(seconds * 1e3)
    print(machine())
    for what, ms in times.items():
        print(f"{what:36} {statistics.median(ms):8.1f} {min(ms):8.1f} {max(ms):8.1f}")


if __name__ == "__main__":
    main()
