"""How fast picogpt scores a long text, and how much memory that takes.

    python benchmarks/score.py

The rate is that of random weights of GPT-2 124M's shape, for the windows of a text of 2,560 tokens
(longer ones only have more of them), beside passes of `gpt2` over the same windows that compute all
logits and nothing else; in turns. Memory is that of a process that scores 1 MB and then 10 MB of
what `tales` says, with its vocabulary and a window of 1,024, but one small layer, so that it takes
minutes and not hours.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from generate import HPARAMS, machine, random_weights, timed

from picogpt import generate, gpt2, load, loader, save, token_logprobs
from picogpt.scoring import _windows

MEMORY = """
import sys
from picogpt.cli import main
main(["score", sys.argv[1], "--model", sys.argv[2]])
lines = open("/proc/self/status").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
"""


def passes(ids, params, n_head):
    for start, _, end in _windows(len(ids), HPARAMS["n_ctx"], HPARAMS["n_ctx"] // 2):
        gpt2(ids[start:end], **params, n_head=n_head)


def peak(text, n_bytes, model, folder):
    path = folder / "text.txt"
    path.write_text((text * (n_bytes // len(text) + 1))[:n_bytes], encoding="utf-8")
    command = [sys.executable, "-c", MEMORY, str(path), str(model)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1]) * 1024 / 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each (default: 3)")
    args = parser.parse_args()
    weights = random_weights(HPARAMS)
    params = loader._parameter_tree(HPARAMS, lambda name, _: weights[name])
    ids = np.random.default_rng(0).integers(HPARAMS["n_vocab"], size=2560)
    times = {"token_logprobs": [], "passes alone": []}
    for i in range(-1, args.rounds):  # the first turn warms up
        for what, function in (("token_logprobs", token_logprobs), ("passes alone", passes)):
            seconds = timed(function, ids, params, HPARAMS["n_head"])
            if i >= 0:
                times[what].append(seconds)
    print(machine())
    for what, seconds in times.items():
        rate = len(ids) / statistics.median(seconds)
        print(f"{what:16} {rate:8.1f} tokens/s  {min(seconds):.2f} to {max(seconds):.2f} s")
    del params
    encoder, hparams, params = load("tales")
    new = generate([encoder.end_of_text], params, hparams["n_head"], 200, seed=0)
    hparams = {"n_vocab": encoder.n_vocab, "n_ctx": 1024, "n_embd": 16, "n_head": 1, "n_layer": 1}
    weights = random_weights(hparams)
    small = loader._parameter_tree(hparams, lambda name, _: weights[name])
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save(folder / "model", encoder, hparams, small)
        for n_bytes in (1_000_000, 10_000_000):
            found = peak(encoder.decode(new), n_bytes, folder / "model", folder)
            print(f"peak memory, {n_bytes // 1_000_000:2} MB of text: {found:.0f} MB")


if __name__ == "__main__":
    main()
