"""How far picogpt is from the originals, in numbers: transformers, PyTorch, PEFT and tiktoken.

    python benchmarks/agree.py

Needs picogpt[reference]. Each line compares the two on the same weights or the same text, and says
how much they differ at most, and how much they may; where it is more, it ends with an error.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import peft
import torch
import transformers
from encode import make_tiktoken

from picogpt import Encoder, generate, gpt2, lm_loss, load, save, to_backend


def logits_of(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].numpy()


def line(what, n, difference, allowed):
    """Prints one line of the table, and ends the run where the difference is too large."""
    shown = [f"{x:.1e}" if isinstance(x, float) else str(x) for x in (difference, allowed)]
    print(f"| {what} | {n} | {' | '.join(shown)} |")
    if not difference <= allowed:
        sys.exit(f"{what}: differs by {shown[0]}; allowed is {shown[1]}")


def compare_logits(what, model, params, n_head, ids):
    found, wanted = gpt2(ids, **params, n_head=n_head), logits_of(model, ids)
    allowed = 1e-4 + 2e-6 * float(np.abs(wanted).max())
    line(what, f"{found.size:,} logits", float(np.abs(found - wanted).max()), allowed)


def greedy(model, ids, n):
    options = {"max_new_tokens": n, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = torch.tensor([ids])
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, -n:].tolist()


def random_text(rng, n):
    """Characters of all planes that can be written, and words between them."""
    points = [rng.choice([rng.randrange(32, 0x250), rng.randrange(0x110000)]) for _ in range(n)]
    return "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)


def main():
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    rng = random.Random(0)
    print("| what | how much of it | largest difference | allowed |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        encoder, hparams, params = load("tales")
        n_vocab, n_head = hparams["n_vocab"], hparams["n_head"]
        save(folder / "tales", encoder, hparams, params)
        tales = transformers.GPT2LMHeadModel.from_pretrained(folder / "tales").eval()
        window = [rng.randrange(n_vocab) for _ in range(hparams["n_ctx"])]
        compare_logits("`tales`, a full window: transformers", tales, params, n_head, window)

        prompts = [[rng.randrange(n_vocab) for _ in range(10)] for _ in range(20)]
        pairs = [(generate(p, params, n_head, 100), greedy(tales, p, 100)) for p in prompts]
        wrong = sum(found != wanted for found, wanted in pairs)
        line("`tales`, greedy texts of 100 tokens: transformers", "20 texts", wrong, 0)

        rows = np.array([window])
        tree = to_backend(params, "jax")
        gradient = jax.grad(lm_loss)(tree, rows, n_head)["blocks"][0]["attn"]["c_attn"]["w"]
        tales(torch.tensor(rows), labels=torch.tensor(rows)).loss.backward()
        wanted = tales.transformer.h[0].attn.c_attn.weight.grad.numpy()
        difference = float(np.abs(np.asarray(gradient) - wanted).max() / np.abs(wanted).max())
        line(
            "`tales`, a gradient of the loss on JAX: PyTorch", f"{wanted.size:,}", difference, 1e-4
        )

        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(tales, config)
        adapted.save_pretrained(folder / "lora")
        adapted = adapted.merge_and_unload().eval()
        merged = load("tales", adapter=folder / "lora").params
        compare_logits("`tales` with a LoRA adapter: PEFT", adapted, merged, n_head, window)

        model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
        model.save_pretrained(folder / "large")
        large = load(folder / "large")
        ids = [rng.randrange(large.hparams["n_vocab"]) for _ in range(256)]
        compare_logits("new weights of 124M's shape: transformers", model, large.params, 12, ids)

    own, theirs = Encoder.gpt2().encode, make_tiktoken()
    texts = [random_text(rng, 1000) for _ in range(100)] + [encoder.decode(p) for p in prompts]
    wrong = sum(own(text) != theirs(text) for text in texts)
    n_tokens = sum(len(own(text)) for text in texts)
    line("token ids of random text of all planes: tiktoken", f"{n_tokens:,} ids", wrong, 0)


if __name__ == "__main__":
    main()
