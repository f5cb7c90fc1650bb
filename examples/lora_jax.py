"""Teach tales the style of one author's book: LoRA of rank 4, with JAX's gradients.

    pip install ".[jax]"
    python examples/lora_jax.py book.txt -o book-lora --minutes 5
    picogpt "Once upon a time" --model tales --adapter book-lora

The model's own weights stay as they are. Beside each matrix w [n_in, n_out] two small ones are
trained, A [4, n_in] and B [n_out, 4], and the model computes with w + A.T @ B.T * (alpha / 4). The
last twentieth of the text is held out. Of a book that tales was trained on there is nothing left to
learn; take another. Writes the folder of an adapter, for PEFT and for picogpt; Ctrl-C ends the
training early and writes what there is.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file
from tqdm import tqdm

from picogpt import lm_loss, load, merge_adapter, to_backend, token_logprobs

RANK, ALPHA = 4, 8
N_ROWS, N_TOKENS = 8, 128  # of a step
LEARNING_RATE = 3e-3  # at first; it falls to nothing towards the end
MATRICES = {"attn": ("c_attn", "c_proj"), "mlp": ("c_fc", "c_proj")}


def initial_lora(rng, params):
    """A and B by the names that PEFT gives their modules. B is zero: at first nothing changes."""
    lora = {}
    for i, block in enumerate(params["blocks"]):
        for owner, names in MATRICES.items():
            for name in names:
                n_in, n_out = block[owner][name]["w"].shape
                a = rng.standard_normal((RANK, n_in)) / n_in**0.5
                module = f"transformer.h.{i}.{owner}.{name}"
                lora[module] = {"A": jnp.asarray(a, "float32"), "B": jnp.zeros((n_out, RANK))}
    return lora


def adapted(params, lora):
    """The parameters with A.T @ B.T added to each matrix."""

    def block(i, owners):
        def linear(owner, name, w, b):
            little = lora[f"transformer.h.{i}.{owner}.{name}"]
            return {"w": w + ALPHA / RANK * (little["A"].T @ little["B"].T), "b": b}

        return owners | {
            owner: {name: linear(owner, name, **owners[owner][name]) for name in names}
            for owner, names in MATRICES.items()
        }

    return params | {"blocks": [block(i, owners) for i, owners in enumerate(params["blocks"])]}


def write_adapter(folder, lora):
    """Writes what PEFT's save_pretrained would."""
    tensors = {
        f"base_model.model.{module}.lora_{letter}.weight": np.asarray(x)
        for module, little in lora.items()
        for letter, x in little.items()
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": ["c_attn", "c_proj", "c_fc"],
        "fan_in_fan_out": True,
        "inference_mode": True,
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path, help="UTF-8 text")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the adapter's folder")
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
    encoder, hparams, base = load("tales")
    n_head = hparams["n_head"]
    ids = np.array(encoder.encode(text), np.int32)
    train, held_out = np.split(ids, [len(ids) * 19 // 20])
    if len(train) <= N_TOKENS:
        parser.error(f"{args.text}: {len(ids)} tokens; expected {N_TOKENS * 20 // 19 + 2} or more")
    rng = np.random.default_rng(0)
    params = to_backend(base, "jax")
    lora = initial_lora(rng, params)
    trained, everything = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (lora, params))
    print(f"trains {trained:,} parameters of {everything + trained:,}, {trained / everything:.1%}")
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.0)
    state = optimizer.init(lora)

    @jax.jit
    def step(lora, state, rows):
        loss_of = lambda lora: lm_loss(adapted(params, lora), rows, n_head)  # noqa: E731
        loss, gradient = jax.value_and_grad(loss_of)(lora)
        updates, state = optimizer.update(gradient, state, lora)
        return optax.apply_updates(lora, updates), state, loss

    losses = []
    seconds, start = 60 * args.minutes, time.monotonic()
    with tqdm(total=round(seconds), unit="s", bar_format="{l_bar}{bar}|{postfix}") as bar:
        try:
            while (done := time.monotonic() - start) < seconds and not (
                args.smoke and len(losses) == 3
            ):
                state.hyperparams["learning_rate"] = jnp.asarray(
                    LEARNING_RATE * (1 - done / seconds)
                )
                starts = rng.integers(len(train) - N_TOKENS, size=N_ROWS)
                rows = np.stack([train[i : i + N_TOKENS + 1] for i in starts])
                lora, state, loss = step(lora, state, rows)
                losses.append(float(loss))
                bar.n = round(done)
                bar.set_postfix_str(f"step {len(losses)}, loss {np.mean(losses[-50:]):.3f}")
        except KeyboardInterrupt:
            pass
    write_adapter(args.output, lora)
    after = merge_adapter(base, args.output)
    before, after = (-np.nanmean(token_logprobs(held_out, x, n_head)) for x in (base, after))
    print(f"{len(losses)} steps; held-out loss {before:.4f} -> {after:.4f} nats per token")


if __name__ == "__main__":
    main()
