r"""Train the bundled model `tales` and write it in the layout of OpenAI's GPT-2 release.

    python scripts/train_tales.py fairytales.txt --minutes 90 --out weights/tales
    python scripts/train_tales.py fairytales.txt --evaluate weights/tales

The text is a sequence of books separated by `<|endoftext|>`. The last 5% of each book is held out.
From the rest the script learns a byte-level BPE of 4,096 entries (GPT-2's scheme), then trains
transformers' `GPT2LMHeadModel`: matrices by Muon (Jordan et al., 2024), everything else by AdamW,
both at rates that fall linearly to zero as the time runs out. Every few minutes, and at the end, it
measures the held-out loss and writes the folder with TensorFlow's own Saver.

On Linux, a step takes a fifth less time where freed memory is kept:
GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:\
glibc.malloc.trim_threshold=8589934592

`--evaluate` measures a written folder on the held-out text with picogpt itself.

Needs picogpt with the extra [reference].
"""

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np

END = "<|endoftext|>"
N_VOCAB, N_CTX, N_EMBD, N_HEAD, N_LAYER = 4096, 256, 256, 8, 6
BATCH = 16  # rows of N_CTX tokens
HELD_OUT = 0.05  # of each book, its end
MUON_RATE, ADAM_RATE, WEIGHT_DECAY, WARM_UP = 0.02, 3e-3, 0.1, 100  # WARM_UP in steps


def split_books(text):
    """Cuts each book at a paragraph: -> (training texts, held-out texts)."""
    train, held_out = [], []
    for book in text.split(END):
        book = book.strip("\n")
        cut = book.rindex("\n\n", 0, int(len(book) * (1 - HELD_OUT)))
        train.append(book[:cut])
        held_out.append(book[cut:].strip("\n"))
    return train, held_out


def train_bpe(texts, out):
    """Learns GPT-2's kind of BPE and writes `encoder.json` and `vocab.bpe`."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB - 1, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    # The ids follow GPT-2's order: the 256 bytes, the merges by rank, the end of text last.
    pieces = alphabet + ["".join(pair) for pair in merges] + [END]
    assert len(set(pieces)) == N_VOCAB
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (out / "vocab.bpe").write_text("\n".join(lines) + "\n", encoding="utf-8")
    encoder = {piece: i for i, piece in enumerate(pieces)}
    (out / "encoder.json").write_text(json.dumps(encoder), encoding="utf-8")


def encode_books(texts, folder):
    """-> ids of all texts, each led by the end-of-text id, with transformers' tokenizer."""
    from transformers import GPT2Tokenizer

    tokenizer = GPT2Tokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    ids = []
    for text in texts:
        ids += [N_VOCAB - 1, *tokenizer.encode(text)]
    return np.array(ids)


def windows(ids, start=0):
    """Cuts ids into rows of N_CTX inputs and one more, the last target: [n, N_CTX + 1]."""
    n = (len(ids) - start - 1) // N_CTX
    return np.stack([ids[start + i * N_CTX : start + (i + 1) * N_CTX + 1] for i in range(n)])


def orthogonalise(x, steps=5):
    """The nearest orthogonal matrix, roughly, by Newton-Schulz: [n, rows <= cols] -> same."""
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


class Muon:
    """Momentum whose step is orthogonalised. (torch's own works in bfloat16, slow on many CPUs.)

    `matrices` are parameters of one shape, views of bigger ones allowed: [n_in, n_out] each.
    """

    def __init__(self, matrices):
        self.matrices = matrices
        self.momentum = None

    def step(self, gradients, rate):
        import torch

        g = torch.stack(gradients)
        self.momentum = g.clone() if self.momentum is None else self.momentum.lerp_(g, 0.05)
        update = g.lerp(self.momentum, 0.95)
        rows, cols = g.shape[-2:]
        wide = rows <= cols
        update = orthogonalise(update if wide else update.mT)
        update = update if wide else update.mT
        for w, u in zip(self.matrices, update, strict=True):
            w.mul_(1 - rate * WEIGHT_DECAY).add_(u, alpha=-rate * max(1, cols / rows) ** 0.5)


def export(model, out):
    """Writes `hparams.json` and the checkpoint, named and shaped as in the release."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    sizes = (N_VOCAB, N_CTX, N_EMBD, N_HEAD, N_LAYER)
    hparams = dict(zip(("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer"), sizes, strict=True))
    (out / "hparams.json").write_text(json.dumps(hparams) + "\n", encoding="utf-8")
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        placeholders, values, assign = [], [], []
        for name, tensor in model.transformer.named_parameters():
            value = tensor.detach().numpy()
            name = name.replace("h.", "h").replace(".", "/")
            if name in ("wte/weight", "wpe/weight"):
                name = name.removesuffix("/weight")
            elif "/ln_" in name or name.startswith("ln_f"):
                name = name.replace("weight", "g").replace("bias", "b")
            else:
                name = name.replace("weight", "w").replace("bias", "b")
                value = value[None] if value.ndim == 2 else value
            variable = v1.get_variable("model/" + name, value.shape, tf.float32)
            placeholders.append(v1.placeholder(tf.float32, value.shape))
            values.append(value)
            assign.append(variable.assign(placeholders[-1]))
        session.run(assign, dict(zip(placeholders, values, strict=True)))
        saver = v1.train.Saver(save_relative_paths=True)
        saver.save(session, str(out / "model.ckpt"), write_meta_graph=False)


def held_out_loss(model, rows):
    """Mean loss in nats over all targets, each window on its own."""
    import torch

    model.eval()
    total = 0.0
    with torch.inference_mode():
        for batch in torch.from_numpy(rows).split(BATCH):
            logits = model(batch[:, :-1]).logits
            total += torch.nn.functional.cross_entropy(
                logits.reshape(-1, N_VOCAB), batch[:, 1:].reshape(-1), reduction="sum"
            ).item()
    model.train()
    return total / rows[:, 1:].size


def report(loss, ids, texts):
    """-> the figures of the model card. Bits per character: loss x tokens / characters / ln 2."""
    bits = loss * len(ids) / (sum(map(len, texts)) + len(texts)) / math.log(2)
    return f"held-out loss {loss:.4f} nats per token, {bits:.4f} bits per character"


def train(text, out, minutes, save_every, dtype, dropout):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    out.mkdir(parents=True, exist_ok=True)
    train_texts, held_texts = split_books(text)
    train_bpe(train_texts, out)
    ids, held_ids = encode_books(train_texts, out), encode_books(held_texts, out)
    held_rows = windows(held_ids)
    print(f"{len(ids)} training tokens, {len(held_ids)} held out", flush=True)

    config = GPT2Config(
        vocab_size=N_VOCAB,
        n_positions=N_CTX,
        n_embd=N_EMBD,
        n_layer=N_LAYER,
        n_head=N_HEAD,
        activation_function="gelu_pytorch_tanh",  # GPT-2's gelu, in one fast operation
        attn_pdrop=0.0,  # keeps attention in one fast operation
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=N_VOCAB - 1,
        eos_token_id=N_VOCAB - 1,
    )
    model = GPT2LMHeadModel(config)
    blocks = model.transformer.h
    squares = [m for b in blocks for m in (*b.attn.c_attn.weight.data.split(N_EMBD, 1),)]
    squares += [b.attn.c_proj.weight.data for b in blocks]
    muons = [
        Muon(squares),
        Muon([b.mlp.c_fc.weight.data for b in blocks]),
        Muon([b.mlp.c_proj.weight.data for b in blocks]),
    ]

    def muon_gradients():
        square = [g for b in blocks for g in b.attn.c_attn.weight.grad.split(N_EMBD, 1)]
        yield square + [b.attn.c_proj.weight.grad for b in blocks]
        yield [b.mlp.c_fc.weight.grad for b in blocks]
        yield [b.mlp.c_proj.weight.grad for b in blocks]

    others = [p for n, p in model.named_parameters() if not (".h." in n and p.ndim == 2)]
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    start = saved = time.monotonic()
    step, mean = 0, None
    queue = iter(())
    while (elapsed := (time.monotonic() - start) / 60 / minutes) < 1:
        rate = min((step + 1) / WARM_UP, 1.0) * (1 - elapsed)
        batch = next(queue, None)
        if batch is None:  # an epoch: each token once, cut at new places, in a new order
            rows = rng.permutation(windows(ids, rng.integers(N_CTX)))
            rows = rows[: len(rows) // BATCH * BATCH]
            queue = iter(torch.from_numpy(rows).split(BATCH))
            batch = next(queue)
        with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
            logits = model(batch[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(
                logits.reshape(-1, N_VOCAB).float(), batch[:, 1:].reshape(-1)
            )
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        adam.param_groups[0]["lr"] = ADAM_RATE * rate
        adam.step()
        with torch.no_grad():
            for muon, gradients in zip(muons, muon_gradients(), strict=True):
                muon.step(gradients, MUON_RATE * rate)
        step += 1
        mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
        if step % 25 == 0:
            seconds = time.monotonic() - start
            print(
                f"{seconds / 60:5.1f} min, step {step}, {step * BATCH * N_CTX / seconds:.0f} tok/s,"
                f" rate {rate:.3f}, loss {mean:.3f}",
                flush=True,
            )
        if time.monotonic() - saved > save_every * 60:
            print(report(held_out_loss(model, held_rows), held_ids, held_texts), flush=True)
            export(model, out)
            saved = time.monotonic()
    print(f"{step} steps of {BATCH * N_CTX} tokens, training loss {mean:.4f}")
    print(report(held_out_loss(model, held_rows), held_ids, held_texts))
    export(model, out)


def evaluate(text, folder):
    from picogpt import gpt2, load

    encoder, hparams, params = load(folder)
    _, texts = split_books(text)
    ids = []
    for book in texts:
        ids += [encoder.encoder[END], *encoder.encode(book)]
    total, rows = 0.0, windows(np.array(ids))
    for row in rows:
        logits = gpt2(row[:-1], **params, n_head=hparams["n_head"]).astype(np.float64)
        logits -= logits.max(-1, keepdims=True)
        picked = np.take_along_axis(logits, row[1:, None], -1)[:, 0]
        total += (np.log(np.exp(logits).sum(-1)) - picked).sum()
    print(report(total / rows[:, 1:].size, ids, texts))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path, help="books in UTF-8, separated by <|endoftext|>")
    parser.add_argument("--out", type=Path, default=Path("weights/tales"), help="folder to write")
    parser.add_argument("--minutes", type=float, default=90, help="training time (default: 90)")
    parser.add_argument("--save-every", type=float, default=10, help="minutes (default: 10)")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="bfloat16 pays only on a CPU that has it in hardware",
    )
    parser.add_argument("--evaluate", type=Path, metavar="FOLDER", help="measure, do not train")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    if args.evaluate:
        evaluate(text, args.evaluate)
    else:
        train(text, args.out, args.minutes, args.save_every, args.dtype, args.dropout)


if __name__ == "__main__":
    main()
