"""How fast picogpt starts and loads, and how much memory it takes.

Processes are timed from their start to their end; those of others end at once, without tidying up.
The files have random weights and lie in the page cache. What is loaded is mapped from its file, or
copied out of it, as each of them does by itself.
"""

import json
import os
import re
import subprocess
import sys
from importlib import resources

import encode
import numpy as np
from common import installed, timed
from generate import convert

from picogpt import layouts, load, loader
from picogpt.formats import safetensors, tensorflow
from picogpt.formats.tensors import read_tensors

STARTING, LOADING, MEMORY = "starting, s", "loading, ms", "memory, MB"
FILE = "the file of weights"
PROMPT = "Once upon a time"

# Without TensorFlow in this process, since it takes memory, and threads.
WRITE = """
import sys, numpy as np, tensorflow as tf
v1 = tf.compat.v1
v1.disable_eager_execution()
session = v1.Session()
for name, value in np.load(sys.argv[1] + "/tensors.npz").items():
    place = v1.placeholder(tf.float32, value.shape)
    variable = v1.get_variable(name, value.shape)
    session.run(variable.assign(place), {place: value})
saver = v1.train.Saver(save_relative_paths=True)
saver.save(session, sys.argv[1] + "/model.ckpt", write_meta_graph=False)
"""
TRANSFORMERS = """
import os, sys
from transformers import GPT2LMHeadModel, GPT2Tokenizer
tokenizer = GPT2Tokenizer.from_pretrained(sys.argv[1])
model = GPT2LMHeadModel.from_pretrained(sys.argv[1])
model.generation_config.eos_token_id = None
prompt = tokenizer(sys.argv[2], return_tensors="pt")
new = model.generate(**prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)
print(tokenizer.decode(new[0]), flush=True)
os._exit(0)
"""
# The largest the process has been, against what it was before. The vocabulary, some 20 MB, is
# not the weights', so one has been there before.
GROWTH = """
import sys
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
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def run_python(*arguments):
    """-> what a Python of its own prints; it keeps bytecode, as there is after an installation."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return done.stdout


def can_run(who, *arguments):
    """Whether a Python finds all that it imports; says so if not."""
    try:
        run_python(*arguments)
    except subprocess.CalledProcessError as error:
        reason = re.search(r"^(ImportError|ModuleNotFoundError): .*", error.stderr, re.MULTILINE)
        if not reason:
            raise
        print(f"left out: {who} ({reason[0]})", file=sys.stderr)
        return False
    return True


def continue_text(model, n_tokens):
    return "-m", "picogpt", PROMPT, "--model", model, "--n-tokens", n_tokens, "--no-stop"


def write_checkpoint(folder, setup):
    """Writes a folder in the release's layout, if TensorFlow is there. -> whether it is."""
    folder.mkdir()
    names = layouts.parameter_tree(setup.hparams, lambda name, _: name)
    leaves = loader.leaves(names, setup.params)
    tensors = {name: x[None] if name.endswith("/w") else x for _, name, x in leaves}
    np.savez(folder / "tensors.npz", **tensors)
    has_written = can_run("a TensorFlow checkpoint", "-c", WRITE, folder)
    (folder / "tensors.npz").unlink()
    (folder / "hparams.json").write_text(json.dumps(setup.hparams), encoding="utf-8")
    vocabulary = resources.files("picogpt") / "vocabulary"
    for name in ("encoder.json", "vocab.bpe"):
        (folder / name).write_bytes((vocabulary / name).read_bytes())
    return has_written


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


def measure(setup, note):
    folders = {"safetensors": setup.model}
    for dtype, name in (("F16", "float16"), ("BF16", "bfloat16")):
        folders[f"safetensors in {name}"] = setup.folder / name
        write_halves(setup.model, setup.folder / name, dtype)
    if write_checkpoint(setup.folder / "tensorflow", setup):
        folders["a TensorFlow checkpoint"] = setup.folder / "tensorflow"
    measure_start(setup, note, folders)
    measure_load(setup, note, folders)
    measure_memory(setup, note, folders)


def measure_start(setup, note, folders):
    transformers = "from transformers import GPT2LMHeadModel, GPT2Tokenizer"
    cases = {
        ("imports", "picogpt"): ("-c", "import picogpt"),
        ("imports", "Python alone"): ("-c", ""),
        ("imports", "NumPy"): ("-c", "import numpy"),
        ("imports", "transformers"): ("-c", f"import os\n{transformers}\nos._exit(0)"),
        ("imports", "TensorFlow"): ("-c", "import os, tensorflow\nos._exit(0)"),
        ("`picogpt --help`", "picogpt"): ("-m", "picogpt", "--help"),
        ("40 tokens of `tales`", "picogpt"): continue_text("tales", 40),
    }
    for kind in ("safetensors", "a TensorFlow checkpoint"):
        if kind in folders:
            cases[f"40 tokens of {kind}", "picogpt"] = continue_text(folders[kind], 40)
    cases["40 tokens of safetensors", "transformers"] = ("-c", TRANSFORMERS, setup.model, PROMPT)
    cases = {(what, who): run for (what, who), run in cases.items() if can_run(who, *run)}
    for _ in range(setup.rounds):
        for (what, who), arguments in cases.items():
            note(STARTING, what, who, timed(run_python, *arguments))


def map_tensorflow(folder, verify):
    read_tensors(tensorflow.list_tensors(tensorflow.find_checkpoint(folder)), verify=verify)


def map_safetensors(folder):
    read_tensors(safetensors.list_tensors(folder / "model.safetensors"))


def make_transformers(setup):
    import torch  # noqa: F401  which must be there
    from transformers import GPT2LMHeadModel, GPT2Tokenizer, logging

    logging.disable_progress_bar()

    def load_both():
        GPT2LMHeadModel.from_pretrained(setup.model)
        GPT2Tokenizer.from_pretrained(setup.model)

    return {
        "safetensors": lambda: GPT2LMHeadModel.from_pretrained(setup.model),
        "safetensors, and the vocabulary": load_both,
    }


def make_ctranslate2(setup):
    import ctranslate2

    path = str(convert(setup))
    return {"its own format": lambda: ctranslate2.Generator(path, intra_threads=setup.threads)}


def measure_load(setup, note, folders):
    own = {
        "safetensors": lambda: map_safetensors(setup.model),
        "safetensors, and the vocabulary": lambda: load(setup.model),
    }
    half = folders["safetensors in float16"]
    own["safetensors in float16, widened, and the vocabulary"] = lambda: load(half)
    if released := folders.get("a TensorFlow checkpoint"):
        own |= {
            "a TensorFlow checkpoint, no checksums": lambda: map_tensorflow(released, False),
            "a TensorFlow checkpoint, all checksums": lambda: map_tensorflow(released, True),
            "the same, and the vocabulary: `load`": lambda: load(released),
        }
    others = {"transformers": make_transformers, "CTranslate2": make_ctranslate2}
    functions = {"picogpt": own} | installed(others, setup)
    for who in installed(encode.MAKERS):
        if who != encode.OPENAI:
            functions.setdefault(who, {})["GPT-2's vocabulary"] = encode.MAKERS[who]
    for i in range(-1, setup.rounds):  # the first turn warms up
        for who, by_what in functions.items():
            for what, function in by_what.items():
                seconds = timed(function)
                if i >= 0:
                    note(LOADING, what, who, seconds * 1e3)


def measure_memory(setup, note, folders):
    """Notes each beside the size of the file with the weights."""

    def largest(folder):
        return max(path.stat().st_size for path in folder.iterdir()) / 1e6

    peak = int(run_python("-c", PEAK, sys.executable, *continue_text(setup.model, 200)))
    note(MEMORY, "200 tokens on the command line", "picogpt", peak / 1e6)
    note(MEMORY, "200 tokens on the command line", FILE, largest(setup.model))
    for kind, folder in folders.items():
        note(MEMORY, f"`load` of {kind}", "picogpt", int(run_python("-c", GROWTH, folder)) / 1e6)
        note(MEMORY, f"`load` of {kind}", FILE, largest(folder))
