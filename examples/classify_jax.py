"""Fine-tune `tales` to tell from which book a passage is: frozen, in part, and as a whole.

    pip install ".[jax]"
    python examples/classify_jax.py grimm.txt alice.txt jungle.txt

A file with `<|endoftext|>` in it counts as several books, those of which too little is left are
left out. Of each book, passages of N_SEQ tokens are drawn, and a fifth of them, which lie beyond
those trained on, are for testing. A linear layer, cls_head, reads the residual stream at the last
token; trained with it are nothing else, the last two blocks, or everything.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from picogpt import gpt2, load, to_backend

N_SEQ = 128  # tokens of a passage
N_PASSAGES = 100  # of each book; a fifth are for testing
N_ROWS = 32  # passages in a step
N_EPOCHS = 5
RATES = {"nothing else": 3e-2, "the last two blocks": 3e-4, "everything": 3e-4}


def passages(books, encoder, n_passages):
    """-> training rows and labels, test rows and labels: [n, N_SEQ] and [n], integers."""
    rng = np.random.default_rng(0)
    sets = [([], []), ([], [])]
    for label, book in enumerate(books):
        ids = np.array(encoder.encode(book), np.int32)
        ids = ids[: len(ids) // N_SEQ * N_SEQ].reshape(-1, N_SEQ)
        chosen = ids[np.sort(rng.permutation(len(ids))[:n_passages])]
        for (rows, labels), part in zip(sets, np.split(chosen, [n_passages * 4 // 5]), strict=True):
            rows.append(part)
            labels += [label] * len(part)
    return [(np.concatenate(rows), np.array(labels)) for rows, labels in sets]


def residual(params, rows, n_head):
    """[n_rows, N_SEQ] -> [n_rows, n_embd]: what the output head would read at the last token."""
    seen = {}
    gpt2(rows, **params, n_head=n_head, last=True, tap=lambda name, x: seen.setdefault(name, x))
    return seen["ln_f"][:, -1]


def train(params, n_head, trained, data, n_classes, n_epochs):
    """-> accuracy on the test passages, and the number of trained parameters."""
    (rows, labels), (test_rows, test_labels) = data
    free = {"cls_head": jnp.zeros((params["ln_f"]["g"].size, n_classes))}
    if trained == "the last two blocks":
        free["blocks"] = params["blocks"][-2:]
    elif trained == "everything":
        free |= params

    def scores(free, rows):
        tree = params | {name: value for name, value in free.items() if name != "cls_head"}
        tree["blocks"] = params["blocks"][: -len(tree["blocks"])] + tree["blocks"]
        tree["blocks"] = tree["blocks"][-len(params["blocks"]) :]
        return residual(tree, rows, n_head) @ free["cls_head"]

    def loss(free, rows, labels):
        return optax.softmax_cross_entropy_with_integer_labels(scores(free, rows), labels).mean()

    n_steps = n_epochs * (len(rows) // N_ROWS)
    optimizer = optax.adam(optax.cosine_decay_schedule(RATES[trained], n_steps))
    state = optimizer.init(free)

    @jax.jit
    def step(free, state, rows, labels):
        updates, state = optimizer.update(jax.grad(loss)(free, rows, labels), state)
        return optax.apply_updates(free, updates), state

    rng = np.random.default_rng(1)
    with tqdm(total=n_steps, desc=trained, leave=False) as bar:
        for _ in range(n_epochs):
            order = rng.permutation(len(rows))
            for at in range(0, len(rows) - N_ROWS + 1, N_ROWS):
                batch = order[at : at + N_ROWS]
                free, state = step(free, state, rows[batch], labels[batch])
                bar.update()
    found = jax.jit(scores)(free, test_rows).argmax(-1)
    return float((found == test_labels).mean()), sum(x.size for x in jax.tree.leaves(free))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path, help="UTF-8 texts")
    parser.add_argument("--books", type=int, default=8, help="use the first so many (default: 8)")
    parser.add_argument("--smoke", action="store_true", help="one short round of each")
    args = parser.parse_args()
    encoder, hparams, params = load("tales")
    n_passages, n_epochs = (40, 1) if args.smoke else (N_PASSAGES, N_EPOCHS)
    texts = [part for file in args.files for part in file.read_text("utf-8").split("<|endoftext|>")]
    books = [text for text in texts if len(encoder.encode(text)) >= n_passages * N_SEQ]
    books = books[: args.books]
    if len(books) < 2:
        parser.error(f"{len(books)} texts of {n_passages * N_SEQ} tokens or more; expected two")
    data = passages(books, encoder, n_passages)
    params = to_backend(params, "jax")
    print(f"{len(books)} books; {len(data[0][0])} passages to train on, {len(data[1][0])} to test")
    print(f"{'trained with cls_head':24}{'parameters':>12}{'accuracy':>10}")
    print(f"{'(guessing)':24}{0:12}{1 / len(books):10.1%}")
    for trained in RATES:
        accuracy, n = train(params, hparams["n_head"], trained, data, len(books), n_epochs)
        print(f"{trained:24}{n:12,}{accuracy:10.1%}", flush=True)


if __name__ == "__main__":
    main()
