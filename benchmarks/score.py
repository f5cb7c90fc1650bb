"""How fast picogpt scores a long text, and how much memory that takes.

The rate is that for the windows of a text of 2,560 tokens (longer ones only have more of them),
beside passes of `gpt2` over the same windows that compute all logits and nothing else. Memory is
that of a process that scores 1 MB and then 10 MB of what `tales` says, with its vocabulary and a
window of 1,024, but one small layer, so that it takes minutes and not hours.
"""

import sys

import numpy as np
from common import random_params, timed
from generate import ALONE
from load import MEMORY, PEAK, run_python

from picogpt import generate, gpt2, load, save, token_logprobs
from picogpt.scoring import _windows


def passes(ids, params, n_head):
    n_ctx = len(params["wpe"])
    for start, _, end in _windows(len(ids), n_ctx, n_ctx // 2):
        gpt2(ids[start:end], **params, n_head=n_head)


def measure(setup, note):
    params, n_head = setup.params, setup.hparams["n_head"]
    ids = np.random.default_rng(0).integers(setup.hparams["n_vocab"], size=2560)
    for i in range(-1, setup.rounds):  # the first turn warms up
        for what, function in (
            ("2,560 tokens scored: `token_logprobs`", token_logprobs),
            ("`gpt2` alone, over the same windows", passes),
        ):
            seconds = timed(function, ids, params, n_head)
            if i >= 0:
                note(ALONE, what, "picogpt", len(ids) / seconds)
    encoder, hparams, params = load("tales")
    new = generate([encoder.end_of_text], params, hparams["n_head"], 200, seed=0)
    text = encoder.decode(new)
    hparams = {"n_vocab": encoder.n_vocab, "n_ctx": 1024, "n_embd": 16, "n_head": 1, "n_layer": 1}
    model, path = setup.folder / "small", setup.folder / "text.txt"
    save(model, encoder, hparams, random_params(hparams))
    for n_bytes in (10_000, 100_000) if setup.is_smoke else (1_000_000, 10_000_000):
        path.write_text((text * (n_bytes // len(text) + 1))[:n_bytes], encoding="utf-8")
        command = [sys.executable, "-m", "picogpt", "score", path, "--model", model]
        peak = int(run_python("-c", PEAK, *command))
        note(MEMORY, f"`picogpt score` of {n_bytes / 1e6:g} MB of text", "picogpt", peak / 1e6)
