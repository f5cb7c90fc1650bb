"""Make the small checkpoints of this folder and the right values for them, with the originals.

    python tests/data/make.py

A GPT-2 of random weights, so large that a wrong mask, position, head count or transpose changes
the likeliest token, written by TensorFlow's Saver and by transformers in several ways, one folder
each; the first of GPT-2's merges as its vocabulary; and what transformers makes of the same
weights. Needs picogpt[reference].
"""

import json
import os
import shutil
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import numpy as np
import tensorflow as tf
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

HERE = Path(__file__).parent
GPT2 = HERE.parent.parent / "picogpt" / "vocabulary"
HPARAMS = {"n_vocab": 300, "n_ctx": 32, "n_embd": 16, "n_head": 4, "n_layer": 2}
v1 = tf.compat.v1


def make_vocabulary():
    """Writes the 256 bytes, GPT-2's first merges and the end of text."""
    lines = (GPT2 / "vocab.bpe").read_text(encoding="utf-8").splitlines()[:44]
    everything = json.loads((GPT2 / "encoder.json").read_text(encoding="utf-8"))
    pieces = [*list(everything)[: HPARAMS["n_vocab"] - 1], "<|endoftext|>"]
    folder = HERE / "vocabulary"
    folder.mkdir(exist_ok=True)
    encoder = {piece: i for i, piece in enumerate(pieces)}
    (folder / "encoder.json").write_text(json.dumps(encoder), encoding="utf-8")
    (folder / "vocab.bpe").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_model(**settings):
    """-> a transformers model, and its weights by their names in a TensorFlow checkpoint."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=HPARAMS["n_vocab"],
        n_positions=HPARAMS["n_ctx"],
        n_embd=HPARAMS["n_embd"],
        n_head=HPARAMS["n_head"],
        n_layer=HPARAMS["n_layer"],
        bos_token_id=HPARAMS["n_vocab"] - 1,
        eos_token_id=HPARAMS["n_vocab"] - 1,
        **settings,
    )
    model = GPT2LMHeadModel(config).eval()
    tensors = {}
    with torch.no_grad():
        for name, tensor in model.transformer.named_parameters():
            gain = "ln_" in name and "weight" in name
            tensor.normal_(float(gain), 0.1 if "bias" in name else 0.6)
            name = "model/" + name.replace("h.", "h").replace(".", "/")
            value = tensor.numpy()
            if "/ln_" in name:
                name = name.replace("weight", "g")
            elif "/wte/" in name or "/wpe/" in name:
                name = name.removesuffix("/weight")
            elif name.endswith("weight"):
                name, value = name.replace("weight", "w"), value[None]
            tensors[name.replace("bias", "b")] = value
    return model, tensors


def save(folder, tensors, prefixes=("model.ckpt",), optimizer=False, sharded=False, sliced=False):
    """Writes tensors with TensorFlow's Saver, once for each prefix."""
    folder = HERE / folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "hparams.json").write_text(json.dumps(HPARAMS), encoding="utf-8")
    with tf.Graph().as_default():
        for i, (name, value) in enumerate(tensors.items()):
            slices = v1.fixed_size_partitioner(2) if sliced and name == "model/wte" else None

            def initial(shape, value=value, partition_info=None, **_):
                start = partition_info.var_offset[0] if partition_info else 0
                return tf.constant(value[start : start + shape[0]])

            with tf.device(f"/cpu:{i % 2 if sharded else 0}"):
                v1.get_variable(name, value.shape, value.dtype, initial, partitioner=slices)
        if optimizer:
            step = v1.train.get_or_create_global_step()
            loss = tf.add_n([tf.reduce_sum(v) for v in v1.trainable_variables()])
            train = v1.train.AdamOptimizer().minimize(loss, step)
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(v1.global_variables_initializer())
            for prefix in prefixes:
                saver = v1.train.Saver(sharded=sharded, save_relative_paths=True)
                saver.save(session, str(folder / prefix), write_meta_graph=False)
                if optimizer:
                    session.run(train)


def save_pretrained(folder, model, **options):
    """Writes a model with transformers."""
    shutil.rmtree(HERE / folder, ignore_errors=True)
    model.save_pretrained(HERE / folder, **options)
    (HERE / folder / "generation_config.json").unlink()


def save_as_of_old(folder, model):
    """Writes a model as older versions did: no prefix, masks as tensors, the head once more."""
    shutil.copytree(HERE / "transformers", HERE / folder, dirs_exist_ok=True)
    tensors = dict(model.transformer.state_dict())
    mask = torch.tril(torch.ones(HPARAMS["n_ctx"], HPARAMS["n_ctx"], dtype=torch.bool))
    for i in range(HPARAMS["n_layer"]):
        tensors[f"h.{i}.attn.bias"] = mask[None, None].clone()
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, HERE / folder / "model.safetensors")


def make_transformers_folders(ids):
    """-> the logits that transformers computes for those of other weights, by folder."""
    model, _ = make_model()
    save_pretrained("transformers", model)
    save_pretrained("shards", model, max_shard_size="20KB")
    save_as_of_old("old", model)
    logits = {}
    for name, settings in {
        "eps": {"layer_norm_epsilon": 0.1},
        "narrow": {"n_inner": 24},
        "untied": {"tie_word_embeddings": False},
        "half": {},
        "bfloat": {},
    }.items():
        model, _ = make_model(**settings)
        if name == "untied":
            with torch.no_grad():
                model.lm_head.weight.normal_(0, 0.6)
        if name in ("half", "bfloat"):
            model = model.to(torch.float16 if name == "half" else torch.bfloat16)
        save_pretrained(name, model)
        with torch.inference_mode():
            logits[f"logits/{name}"] = model.float()(ids[None]).logits[0].numpy()
    return logits


def make_adapter(ids):
    """Writes a LoRA adapter with PEFT -> the logits of the model with it."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=["c_attn", "mlp.c_proj"],
        rank_pattern={"mlp.c_proj": 1},
        alpha_pattern={"h.1.attn.c_attn": 5},
        init_lora_weights=False,
    )
    model = get_peft_model(make_model()[0], config).eval()
    shutil.rmtree(HERE / "adapter", ignore_errors=True)
    model.save_pretrained(HERE / "adapter")
    (HERE / "adapter" / "README.md").unlink()
    with torch.inference_mode():
        return model.merge_and_unload()(ids[None]).logits[0].numpy()


def main():
    make_vocabulary()
    model, tensors = make_model()
    save("plain", tensors)
    save("sharded", tensors, sharded=True)
    save("slots", tensors, ("model-1000", "model-500"), optimizer=True)
    # As it was left by a machine on which the folder had another name.
    state = 'model_checkpoint_path: "/content/checkpoint/run1/model-1000"\n'
    (HERE / "slots" / "checkpoint").write_text(state, encoding="utf-8")
    save("float16", {name: value.astype(np.float16) for name, value in tensors.items()})
    to_bfloat16 = tf.bfloat16.as_numpy_dtype
    save("bfloat16", {name: value.astype(to_bfloat16) for name, value in tensors.items()})
    save("sliced", tensors, sliced=True)
    save("flat", {name: v[0] if v.ndim == 3 else v for name, v in tensors.items()})

    ids = np.random.default_rng(0).integers(HPARAMS["n_vocab"], size=24)
    with torch.inference_mode():
        logits = model(torch.from_numpy(ids)[None]).logits[0].numpy()
        new = model.generate(
            torch.from_numpy(ids)[None],
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(ids) :].numpy()
        model.set_attn_implementation("eager")
        inside = model(
            torch.from_numpy(ids)[None], output_attentions=True, output_hidden_states=True
        )
    names = {"ids": ids, "logits": logits, "greedy": new}
    names["attentions"] = torch.stack(inside.attentions)[:, 0].numpy()  # [layer, head, from, to]
    names["hidden_states"] = torch.stack(inside.hidden_states)[:, 0].numpy()  # the last after ln_f
    others = make_transformers_folders(torch.from_numpy(ids))
    others["logits/adapter"] = make_adapter(torch.from_numpy(ids))
    np.savez_compressed(HERE / "expected.npz", **names, **tensors, **others)


if __name__ == "__main__":
    main()
