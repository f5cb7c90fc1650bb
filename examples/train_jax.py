"""Train a small GPT-2 on a text file: `picogpt.gpt2` is the model, JAX takes the gradients.

    pip install ".[jax,plot]"
    python examples/train_jax.py story.txt -o story --minutes 5
    picogpt "Once upon a time" --model ./story

The last tenth of the text is held out. Writes the model's folder, and beside it a picture of the
losses, story.png. Ctrl-C ends the training early and writes what there is.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

from picogpt import lm_loss, load, save, to_backend, token_logprobs

HPARAMS = {"n_ctx": 128, "n_embd": 160, "n_head": 5, "n_layer": 4}
N_ROWS = 16  # of n_ctx tokens each in a step
LEARNING_RATE = 2e-3  # at its highest, after WARM_UP steps; it falls to nothing towards the end
WARM_UP = 50


def initial_params(rng, n_vocab, n_ctx, n_embd, n_head, n_layer):
    """Small random weights, smaller yet where a block adds to the residual stream, as in GPT-2."""

    def random(*shape, scale=0.02):
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    def norm():
        return {"g": np.ones(n_embd, np.float32), "b": np.zeros(n_embd, np.float32)}

    def linear(n_in, n_out, scale=0.02):
        return {"w": random(n_in, n_out, scale=scale), "b": np.zeros(n_out, np.float32)}

    small = 0.02 / (2 * n_layer) ** 0.5
    blocks = [
        {
            "ln_1": norm(),
            "attn": {
                "c_attn": linear(n_embd, 3 * n_embd),
                "c_proj": linear(n_embd, n_embd, small),
            },
            "ln_2": norm(),
            "mlp": {
                "c_fc": linear(n_embd, 4 * n_embd),
                "c_proj": linear(4 * n_embd, n_embd, small),
            },
        }
        for _ in range(n_layer)
    ]
    wte, wpe = random(n_vocab, n_embd), random(n_ctx, n_embd)
    return {"wte": wte, "wpe": wpe, "blocks": blocks, "ln_f": norm()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path, help="UTF-8 text")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the model's folder")
    parser.add_argument("--minutes", type=float, default=5, help="of training (default: 5)")
    parser.add_argument("--smoke", action="store_true", help="three steps, to see that it works")
    args = parser.parse_args()
    if not 0 < args.minutes < 1e6:
        parser.error(f"--minutes: {args.minutes}; expected a positive number")
    try:
        text = args.text.read_text(encoding="utf-8")
        args.output.mkdir(parents=True)
    except (OSError, UnicodeDecodeError) as error:
        parser.error(str(error))
    n_head, n_ctx = HPARAMS["n_head"], HPARAMS["n_ctx"]
    encoder = load("tales").encoder
    hparams = {"n_vocab": encoder.n_vocab, **HPARAMS}
    ids = np.array(encoder.encode(text), np.int32)
    train, held_out = np.split(ids, [len(ids) * 9 // 10])
    if len(train) <= n_ctx:
        parser.error(f"{args.text}: {len(ids)} tokens; expected {n_ctx * 10 // 9 + 2} or more")
    rng = np.random.default_rng(0)
    params = to_backend(initial_params(rng, **hparams), "jax")
    optimizer = optax.inject_hyperparams(optax.adamw)(learning_rate=0.0, weight_decay=0.1)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, rows):
        loss, gradient = jax.value_and_grad(lm_loss)(params, rows, n_head)
        gradient, _ = optax.clip_by_global_norm(1.0).update(gradient, optax.EmptyState())
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    def loss_of(tokens):
        return -np.nanmean(token_logprobs(tokens, to_backend(params, "numpy"), n_head))

    losses, before = [], loss_of(held_out)
    seconds, start = 60 * args.minutes, time.monotonic()
    with tqdm(total=round(seconds), unit="s", bar_format="{l_bar}{bar}|{postfix}") as bar:
        try:
            while (done := time.monotonic() - start) < seconds and not (
                args.smoke and len(losses) == 3
            ):
                rate = LEARNING_RATE * min(1, (len(losses) + 1) / WARM_UP) * (1 - done / seconds)
                state.hyperparams["learning_rate"] = jnp.asarray(rate)
                starts = rng.integers(len(train) - n_ctx, size=N_ROWS)
                rows = np.stack([train[i : i + n_ctx + 1] for i in starts])
                params, state, loss = step(params, state, rows)
                losses.append(float(loss))
                bar.n = round(done)
                bar.set_postfix_str(f"step {len(losses)}, loss {np.mean(losses[-50:]):.3f}")
        except KeyboardInterrupt:
            pass
    after = loss_of(held_out)
    save(args.output, encoder, hparams, to_backend(params, "numpy"))
    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    axes.plot(losses, color="0.75", label="training, each step")
    axes.plot([0, len(losses) - 1], [before, after], "o", label="held out")
    axes.set(xlabel="step", ylabel="loss, nats per token", title=args.text.name)
    axes.legend()
    figure.savefig(args.output.with_name(f"{args.output.name}.png"), dpi=150)
    print(f"{len(losses)} steps; held-out loss {before:.4f} -> {after:.4f} nats per token")


if __name__ == "__main__":
    main()
