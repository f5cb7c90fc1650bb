"""How fast picogpt generates, beside transformers and CTranslate2.

All have the same random weights, in float32, and must give the same ids, of which the first are
compared; for each task they take turns in one process, after one turn that is not counted. The
bound is what no decoder can beat: a row multiplied with each weight matrix once.
"""

import json
import time

import numpy as np
from common import installed, median, timed

from picogpt import generate, generate_batch, gpt2, load, new_cache
from picogpt.generation import generate_many

TABLE = "generating, tokens/s"
ALONE = "picogpt alone, tokens/s"
LOOKAHEAD = "looking ahead, tokens/s"
PROMPT = [464, 2068, 7586, 21831, 18045, 625, 262, 16931, 3290, 13]
COMPARED = 8  # ids of each text; further on, two that are as good as equal may change places
PAUSE = 0.3  # seconds; OpenBLAS's threads stay awake for 0.1, which would slow who comes next


class Picogpt:
    def __init__(self, setup):
        self.params, self.n_head = setup.params, setup.hparams["n_head"]

    def decode(self, n, n_rows=1, prompt=PROMPT):
        if n_rows == 1:
            return [generate(prompt, self.params, self.n_head, n)]
        return generate_batch([prompt] * n_rows, self.params, self.n_head, n)

    def prompt(self, ids):
        return self.decode(1, prompt=ids)


class Transformers:
    def __init__(self, setup):
        import torch
        import transformers

        self.torch = torch
        torch.set_grad_enabled(False)
        torch.set_num_threads(setup.threads)
        transformers.logging.disable_progress_bar()
        self.model = transformers.GPT2LMHeadModel.from_pretrained(setup.model).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def decode(self, n, n_rows=1):
        ids = self.torch.tensor([PROMPT] * n_rows)
        mask = self.torch.ones_like(ids)
        new = self.model.generate(ids, attention_mask=mask, max_new_tokens=n, do_sample=False)
        return new[:, len(PROMPT) :].tolist()

    def prompt(self, ids):
        logits = self.model(self.torch.tensor([ids]), logits_to_keep=1).logits
        return [[int(logits[0, -1].argmax())]]


def convert(setup):
    """-> the folder with the model in CTranslate2's format, which is written if need be."""
    from ctranslate2.converters import TransformersConverter

    folder = setup.folder / "ctranslate2"
    if not folder.exists():
        TransformersConverter(str(setup.model)).convert(str(folder))
    return folder


class CTranslate2:
    def __init__(self, setup):
        import ctranslate2

        self.generator = ctranslate2.Generator(
            str(convert(setup)), compute_type="float32", intra_threads=setup.threads
        )
        vocabulary = json.loads((setup.model / "vocab.json").read_text(encoding="utf-8"))
        self.tokens = {i: token for token, i in vocabulary.items()}

    def decode(self, n, n_rows=1, prompt=PROMPT):
        results = self.generator.generate_batch(
            [[self.tokens[i] for i in prompt]] * n_rows,
            max_length=n,
            min_length=n,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in results]

    def prompt(self, ids):
        return self.decode(1, prompt=ids)


def measure(setup, note):
    makers = {"picogpt": Picogpt, "transformers": Transformers, "CTranslate2": CTranslate2}
    engines = installed(makers, setup)
    ids = np.random.default_rng(1).integers(setup.hparams["n_vocab"], size=1024).tolist()
    for what, n_tokens, method, *arguments in (
        ("40 new tokens", 40, "decode", 40),
        ("200 new tokens", 200, "decode", 200),
        ("16 rows, 40 new tokens each", 640, "decode", 40, 16),
        ("a prompt of 1,024 tokens", 1024, "prompt", ids),
    ):
        found = {}
        for who, engine in engines.items():
            found[who] = [new[:COMPARED] for new in getattr(engine, method)(*arguments)]
            assert found[who] == found["picogpt"], f"{what}: {found}"
        for _ in range(setup.rounds):
            for who, engine in engines.items():
                time.sleep(PAUSE)
                note(TABLE, what, who, n_tokens / timed(getattr(engine, method), *arguments))
    engines.clear()
    measure_alone(setup, note)
    measure_lookahead(setup, note)


def measure_alone(setup, note):
    params, n_head = setup.params, setup.hparams["n_head"]
    caches = {position: new_cache(params, n_head) for position in (10, 1000)}
    for position, cache in caches.items():
        gpt2([1] * position, **params, n_head=n_head, cache=cache, last=True)

    def step(position):
        caches[position]["n_past"] = position
        gpt2([1], **params, n_head=n_head, cache=caches[position], last=True)

    def decode_uncached(n):
        ids = list(PROMPT)
        for _ in range(n):
            ids.append(int(gpt2(ids, **params, n_head=n_head, last=True)[-1].argmax()))

    matrices = [params["wte"].T]
    for block in params["blocks"]:
        matrices += [layer["w"] for part in ("attn", "mlp") for layer in block[part].values()]
    rows = [np.ones((1, len(w)), np.float32) for w in matrices]

    def bound():
        for row, w in zip(rows, matrices, strict=True):
            row @ w

    prompts = np.random.default_rng(2).integers(setup.hparams["n_vocab"], size=(200, 20)).tolist()
    n = 40
    for _ in range(setup.rounds):
        seconds = median(bound, 30)
        note(ALONE, "a row times each weight matrix once: the bound", "picogpt", 1 / seconds)
        for position in caches:
            seconds = median(lambda position=position: step(position), 30)
            note(ALONE, f"one token, at position {position:,}", "picogpt", 1 / seconds)
        seconds = timed(decode_uncached, n)
        note(ALONE, "40 new tokens, without a cache", "picogpt", n / seconds)
        seconds = timed(lambda: list(generate_many(prompts, params, n_head, n)))
        note(ALONE, "200 prompts, side by side", "picogpt", 200 * n / seconds)
        seconds = timed(lambda: [generate(ids, params, n_head, n) for ids in prompts[:10]])
        note(ALONE, "10 of these prompts, one by one", "picogpt", 10 * n / seconds)


def measure_lookahead(setup, note):
    encoder, hparams, tales = load("tales")
    n_head, n = setup.hparams["n_head"], 200
    tale = encoder.encode("Once upon a time")
    cases = {
        "text that does not repeat itself": (PROMPT, setup.params, n_head),
        "text that is a loop": (PROMPT, looping(setup.params, n_head), n_head),
        '`tales`, after "Once upon a time"': (tale, tales, hparams["n_head"]),
    }
    for _ in range(setup.rounds):
        for what, arguments in cases.items():
            for lookahead in (0, 31):
                seconds = timed(generate, *arguments, n, lookahead=lookahead)
                note(LOOKAHEAD, what, f"`lookahead={lookahead}`", n / seconds)


def looping(params, n_head):
    """The same weights, damped until greedy text is a loop of tokens that are far the best."""

    def damped(part, by):
        if "c_proj" not in part:
            return part
        return part | {"c_proj": {name: by * x for name, x in part["c_proj"].items()}}

    for power in range(10):
        by = 4.0**-power
        blocks = [{name: damped(part, by) for name, part in b.items()} for b in params["blocks"]]
        loop = {**params, "wpe": by * params["wpe"], "blocks": blocks}
        new = generate(PROMPT, loop, n_head, 40)
        logits = gpt2(PROMPT + new, **loop, n_head=n_head)[len(PROMPT) :]
        second, best = np.sort(logits, -1)[:, -2:].T
        if len(set(new)) <= 4 and (best - second).min() > 1e-3:
            return loop
    raise RuntimeError("no damping makes a loop")
