"""What the parts of the benchmark share: weights, a clock, who takes part, the machine.

A part is a module with a function `measure(setup, note)`, which calls note(table, what, who, value)
for each single measurement, in the unit that the table's name ends with.
"""

import datetime
import os
import platform
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import picogpt
from picogpt import layouts

HPARAMS = {"n_vocab": 50257, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12}  # 124M's
PACKAGES = ("numpy", "transformers", "torch", "ctranslate2", "tiktoken", "tokenizers")
PACKAGES += ("safetensors", "tensorflow", "tensorflow-cpu")


class Setup(NamedTuple):
    """What all parts measure with."""

    rounds: int
    is_smoke: bool  # all is small, to see that it works
    threads: int
    hparams: dict[str, int]
    params: dict[str, Any]  # random weights
    model: Path  # a folder with the same weights and GPT-2's vocabulary, as safetensors
    folder: Path  # for other files
    text: str  # to encode


def random_params(hparams):
    """-> a parameter tree of random weights, large enough for logits that are not flat."""
    rng = np.random.default_rng(0)

    def leaf(name, shape):
        scale = 0.1 if len(shape) > 1 else 0.01
        values = rng.standard_normal(shape, np.float32) * np.float32(scale)
        return values + np.float32(1) if name.endswith("g") else values

    return layouts.parameter_tree(hparams, leaf)


def installed(makers, *arguments):
    """-> {name: what its maker makes}, without those whose packages are not there; says which."""
    made = {}
    for name, make in makers.items():
        try:
            made[name] = make(*arguments)
        except ImportError as error:
            print(f"left out: {name} ({error})", file=sys.stderr)
    return made


def timed(function, *arguments, **options):
    """-> seconds."""
    start = time.perf_counter()
    function(*arguments, **options)
    return time.perf_counter() - start


def median(function, n):
    """-> the median of n calls, in seconds."""
    return statistics.median(timed(function) for _ in range(n))


def count_threads():
    """How many threads NumPy's BLAS takes, which all others are given, too."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        if os.environ.get(name):
            return int(os.environ[name])
    return count_cores()


def count_cores():
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine():
    """-> {what: which}, in words."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
        cpu = names[0] if names else cpu
    config = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    versions = {"picogpt": picogpt.__version__}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "machine": f"{cpu}, {count_cores()} cores",
        "SIMD": ", ".join(config["SIMD Extensions"]["found"][-1:]),
        "system": f"{platform.system()}, Python {platform.python_version()}",
        "BLAS": f"{blas['name']} {blas['version']}",
        "threads": f"{count_threads()}",
        "settings": {
            name: value
            for name, value in os.environ.items()
            if name.endswith("_NUM_THREADS") or name.startswith("OPENBLAS_")
        },
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }
