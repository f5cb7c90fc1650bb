"""How fast picogpt generates, beside transformers and CTranslate2 where they are installed.

    python benchmarks/generate.py --json generate.json

All run the same random weights of GPT-2 124M's shape, in float32, on all cores, in turns in one
process; the table has medians, the least and the most. The bound is what no decoder can beat: a row
multiplied with each weight matrix once. The command is measured with a checkpoint on disk, which
TensorFlow writes.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata, resources
from pathlib import Path

import numpy as np

from picogpt import generate, generate_batch, gpt2, load, loader, new_cache
from picogpt.generation import generate_many

HPARAMS = {"n_vocab": 50257, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12}
PROMPT = [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290, 13]


def random_weights(hparams):
    """-> {tensor name: array}. Large enough for logits that are not flat."""
    rng = np.random.default_rng(0)
    tensors = {}

    def leaf(name, shape):
        scale = 0.1 if len(shape) > 1 else 0.01
        tensors[name] = rng.standard_normal(shape, np.float32) * np.float32(scale)
        if name.endswith("g"):
            tensors[name] += np.float32(1)

    loader._parameter_tree(hparams, leaf)
    return tensors


class Picogpt:
    name = "picogpt"

    def __init__(self, hparams, tensors, folder):
        self.params = loader._parameter_tree(hparams, lambda name, _: tensors[name])
        self.n_head = hparams["n_head"]

    def decode(self, n, params=None, **options):
        assert len(generate(PROMPT, params or self.params, self.n_head, n, **options)) == n

    def looping(self):
        """The same weights, damped until greedy text is a loop of tokens that are far the best."""
        blocks, damping = self.params["blocks"], 1.0
        while damping > 1e-6:
            damped = [
                {
                    name: part
                    | (
                        {"c_proj": {k: damping * x for k, x in part["c_proj"].items()}}
                        if "c_proj" in part
                        else {}
                    )
                    for name, part in block.items()
                }
                for block in blocks
            ]
            params = {**self.params, "wpe": damping * self.params["wpe"], "blocks": damped}
            new = generate(PROMPT, params, self.n_head, 40)
            logits = gpt2(PROMPT + new, **params, n_head=self.n_head)[len(PROMPT) :]
            second, best = np.sort(logits, -1)[:, -2:].T
            if len(set(new)) <= 4 and (best - second).min() > 1e-3:
                return params
            damping /= 4
        raise RuntimeError("no damping makes a loop")

    def decode_batch(self, n, n_rows):
        rows = generate_batch([PROMPT] * n_rows, self.params, self.n_head, n)
        assert [len(row) for row in rows] == [n] * n_rows

    def prompt(self, ids):
        generate(ids, self.params, self.n_head, 1)

    def step_at(self, positions):
        """-> seconds of a single step at each position, in turns; medians."""
        caches, times = [], [[] for _ in positions]
        for position in positions:
            caches.append(new_cache(self.params, self.n_head))
            gpt2([1] * position, **self.params, n_head=self.n_head, cache=caches[-1], last=True)
        for _ in range(30):
            for cache, position, seconds in zip(caches, positions, times, strict=True):
                cache["n_past"] = position
                start = time.perf_counter()
                gpt2([1], **self.params, n_head=self.n_head, cache=cache, last=True)
                seconds.append(time.perf_counter() - start)
        return [statistics.median(seconds) for seconds in times]

    def decode_uncached(self, n):
        ids = list(PROMPT)
        for _ in range(n):
            ids.append(int(gpt2(ids, **self.params, n_head=self.n_head, last=True)[-1].argmax()))

    def bound(self):
        """One product of a row with each weight matrix: -> seconds."""
        matrices = [self.params["wte"].T]
        for block in self.params["blocks"]:
            matrices += [layer["w"] for part in ("attn", "mlp") for layer in block[part].values()]
        rows = [np.ones((1, len(w)), np.float32) for w in matrices]
        start = time.perf_counter()
        for row, w in zip(rows, matrices, strict=True):
            row @ w
        return time.perf_counter() - start


class Transformers:
    name = "transformers"

    def __init__(self, hparams, tensors, folder):
        import torch
        import transformers

        self.torch = torch
        torch.set_grad_enabled(False)
        config = transformers.GPT2Config(
            vocab_size=hparams["n_vocab"],
            n_positions=hparams["n_ctx"],
            n_embd=hparams["n_embd"],
            n_head=hparams["n_head"],
            n_layer=hparams["n_layer"],
        )
        self.model = transformers.GPT2LMHeadModel(config).eval()
        own = dict(self.model.transformer.named_parameters())
        for name, value in tensors.items():
            path = name.removeprefix("model/").replace("/", ".")
            path = f"h.{path[1:]}" if path.startswith("h") else path
            head, _, last = path.rpartition(".")
            last = {"g": "weight", "w": "weight", "b": "bias"}.get(last, f"{last}.weight")
            target = own[f"{head}.{last}".lstrip(".")]
            target.copy_(torch.from_numpy(value).reshape(target.shape))
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def decode(self, n):
        self.decode_batch(n, 1)

    def decode_batch(self, n, n_rows):
        ids = self.torch.tensor([PROMPT] * n_rows)
        mask = self.torch.ones_like(ids)
        new = self.model.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False)
        assert new.shape == (n_rows, len(PROMPT) + n)

    def prompt(self, ids):
        self.model(self.torch.tensor([ids]), logits_to_keep=1)


class CTranslate2:
    name = "CTranslate2"

    def __init__(self, hparams, tensors, folder):
        import ctranslate2

        model = Transformers(hparams, tensors, folder).model
        source, target = folder / "hf", folder / "ct2"
        model.save_pretrained(source)
        vocabulary = resources.files("picogpt") / "vocabulary"
        for old, new in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
            (source / new).write_bytes((vocabulary / old).read_bytes())
        ctranslate2.converters.TransformersConverter(str(source)).convert(str(target), force=True)
        self.generator = ctranslate2.Generator(
            str(target), compute_type="float32", intra_threads=os.cpu_count()
        )
        encoder = json.loads((source / "vocab.json").read_text(encoding="utf-8"))
        self.tokens = {i: token for token, i in encoder.items()}

    def decode(self, n):
        self.decode_batch(n, 1)

    def decode_batch(self, n, n_rows):
        tokens = [self.tokens[i] for i in PROMPT]
        results = self.generator.generate_batch(
            [tokens] * n_rows,
            max_length=n,
            min_length=n,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        assert [len(result.sequences_ids[0]) for result in results] == [n] * n_rows

    def prompt(self, ids):
        tokens = [self.tokens[i] for i in ids]
        self.generator.generate_batch([tokens], max_length=1, include_prompt_in_result=False)


def timed(function, *args, **options):
    start = time.perf_counter()
    function(*args, **options)
    return time.perf_counter() - start


def write_checkpoint(folder, hparams, tensors):
    """Writes a folder in the release's layout with TensorFlow, in a process of its own."""
    tensors = {n: value[None] if n.endswith("/w") else value for n, value in tensors.items()}
    np.savez(folder / "tensors.npz", **tensors)
    script = (
        "import sys, numpy as np, tensorflow as tf\n"
        "v1 = tf.compat.v1\n"
        "v1.disable_eager_execution()\n"
        "session = v1.Session()\n"
        "for name, value in np.load(sys.argv[1] + '/tensors.npz').items():\n"
        "    place = v1.placeholder(tf.float32, value.shape)\n"
        "    variable = v1.get_variable(name, value.shape)\n"
        "    session.run(variable.assign(place), {place: value})\n"
        "saver = v1.train.Saver(save_relative_paths=True)\n"
        "saver.save(session, sys.argv[1] + '/model.ckpt', write_meta_graph=False)\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(folder)], check=True, stderr=subprocess.DEVNULL
    )
    (folder / "tensors.npz").unlink()
    (folder / "hparams.json").write_text(json.dumps(hparams), encoding="utf-8")
    vocabulary = resources.files("picogpt") / "vocabulary"
    for name in ("encoder.json", "vocab.bpe"):
        (folder / name).write_bytes((vocabulary / name).read_bytes())


def command(folder, n_tokens):
    """-> seconds from the start of the command to its end, and the most memory it had, in bytes."""
    run = (
        "import resource, subprocess, sys, time; start = time.perf_counter()\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(time.perf_counter() - start)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)\n"
    )
    picogpt = [sys.executable, "-m", "picogpt", "Once upon a time", "--model", str(folder)]
    arguments = [*picogpt, "--n-tokens", str(n_tokens), "--no-stop"]
    done = subprocess.run(
        [sys.executable, "-c", run, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return [float(line) for line in done.stdout.split()]


def machine():
    def version(name):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(
            (line.partition(": ")[2] for line in lines if line.startswith("model name")), cpu
        )
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    names = ["picogpt", "numpy", "torch", "transformers", "ctranslate2"]
    return {
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "simd": ", ".join(np.show_config(mode="dicts")["SIMD Extensions"]["found"]),
        "python": platform.python_version(),
        "blas": f"{blas['name']} {blas['version']}",
        "settings": {
            k: v for k, v in os.environ.items() if k.endswith("_NUM_THREADS") or "OPENBLAS" in k
        },
        "versions": {name: version(name) for name in names},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--smoke", action="store_true", help="a small shape, to see that it works")
    args = parser.parse_args()
    hparams = HPARAMS | ({"n_embd": 96, "n_layer": 2} if args.smoke else {})
    tensors = random_weights(hparams)
    rows = {}  # what: {who: seconds, a list}

    def note(what, who, seconds):
        rows.setdefault(what, {}).setdefault(who, []).append(seconds)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        engines = []
        for engine in (Picogpt, Transformers, CTranslate2):
            try:
                engines.append(engine(hparams, tensors, folder))
            except ImportError as error:
                print(f"left out: {engine.name} ({error})", file=sys.stderr)
        own = engines[0]
        loop, tales = own.looping(), load("tales")
        tale = tales.encoder.encode("Once upon a time")
        long_prompt = np.random.default_rng(1).integers(hparams["n_vocab"], size=1024).tolist()
        for i in range(-1, args.rounds):  # the first turn warms up
            for engine in engines:
                for what, function, *arguments in (
                    ("decode, 40 tokens", engine.decode, 40),
                    ("decode, 200 tokens", engine.decode, 200),
                    ("decode, 40 tokens, batch of 16", engine.decode_batch, 40, 16),
                    ("prompt of 1,024 tokens", engine.prompt, long_prompt),
                ):
                    seconds = timed(function, *arguments)
                    if i >= 0:
                        note(what, engine.name, seconds)
            if i >= 0:
                note("one token, the bound", "picogpt", own.bound())
                note("decode, 40 tokens", "picogpt without a cache", timed(own.decode_uncached, 40))
                early, late = own.step_at([10, 1000])
                note("one token at position 10", "picogpt", early)
                note("one token at position 1,000", "picogpt", late)
                for lookahead in (0, 31):
                    who = f"lookahead={lookahead}"
                    for what, params in (("no loop", own.params), ("a loop", loop)):
                        seconds = timed(own.decode, 200, params, lookahead=lookahead)
                        note(f"200 tokens, {what}", who, seconds)
                    seconds = timed(generate, tale, tales.params, 8, 200, lookahead=lookahead)
                    note("200 tokens of tales", who, seconds)
        prompts = np.random.default_rng(2).integers(hparams["n_vocab"], size=(200, 20)).tolist()
        for _ in range(2):
            seconds = timed(lambda: list(generate_many(prompts, own.params, own.n_head, 40)))
            note("200 prompts, 40 tokens each", "side by side", seconds)
            seconds = timed(lambda: [generate(p, own.params, own.n_head, 40) for p in prompts[:10]])
            note("200 prompts, 40 tokens each", "one by one (20 x 10)", 20 * seconds)
        del engines
        try:
            write_checkpoint(folder, hparams, tensors)
        except subprocess.CalledProcessError:
            print(
                "left out: the command (writing its checkpoint needs TensorFlow)", file=sys.stderr
            )
        else:
            weights = sum(tensor.nbytes for tensor in tensors.values())
            for _ in range(args.rounds):
                note("process start to 40th token", "picogpt", command(folder, 40)[0])
            peak = command(folder, 200)[1]
            print(f"peak memory, 200 tokens: {peak / 1e6:.0f} MB; weights {weights / 1e6:.0f} MB")
    where = machine()
    print(json.dumps(where, indent=2))
    print(f"{'what':34} {'who':24} {'median s':>9} {'least':>8} {'most':>8} {'tok/s':>8}")
    tokens = {"decode, 40 tokens": 40, "decode, 200 tokens": 200}
    tokens |= {"decode, 40 tokens, batch of 16": 640, "prompt of 1,024 tokens": 1024}
    tokens |= {"200 prompts, 40 tokens each": 8000}
    tokens |= {f"200 tokens{what}": 200 for what in (", no loop", ", a loop", " of tales")}
    for what, by in rows.items():
        for who, seconds in by.items():
            median = statistics.median(seconds)
            rate = f"{tokens.get(what, 1) / median:8.1f}"
            print(
                f"{what:34} {who:24} {median:9.4f} {min(seconds):8.4f} {max(seconds):8.4f} {rate}"
            )
    if args.json:
        figures = {"machine": where, "hparams": hparams, "seconds": rows}
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
