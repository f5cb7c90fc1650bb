"""Make small models in the formats that others write, with their writers, and the right values.

    python tests/data/make.py && python tests/data/make_formats.py

Random weights, large enough that a wrong mask, position, head count, transpose or gelu changes the
logits: written by torch.save in both of its layouts, by nanoGPT's train.py and llm.c's
train_gpt2.py as far as they write files (the model, the checkpoint and the tensors' order are
restated here from their descriptions), and by gguf's writer. formats.npz holds what torch makes of
each. Needs picogpt[reference]. Written by torch 2.13.0, transformers 5.25.0 and gguf 0.19.0.
"""

import json
import pickle
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel

HERE = Path(__file__).parent
SIZES = {"vocab_size": 300, "n_positions": 32, "n_embd": 16, "n_head": 4, "n_layer": 2}
CHARACTERS = "\n !',.:;?ABEHIOTWabcdefghiklmnoprstuvwy☃"
MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def new_folder(name):
    shutil.rmtree(HERE / name, ignore_errors=True)
    (HERE / name).mkdir()
    return HERE / name


@torch.no_grad()
def shake(model, seed):
    """Gives a model random weights that are large."""
    torch.manual_seed(seed)
    for name, tensor in model.named_parameters():
        gain = "ln_" in name and "weight" in name
        tensor.normal_(float(gain), 0.1 if "bias" in name else 0.6)
    return model.eval()


def make_transformers(**settings):
    config = GPT2Config(**(SIZES | settings), bos_token_id=299, eos_token_id=299)
    return shake(GPT2LMHeadModel(config), 1)


def save_torch(ids):
    """-> the logits of a state dict in PyTorch's layouts."""
    model = make_transformers()
    state = model.state_dict()
    folder = new_folder("torch")
    model.config.save_pretrained(folder)
    torch.save(state, folder / "pytorch_model.bin")

    shutil.copytree(folder, new_folder("torch_shards"), dirs_exist_ok=True)
    shards, weight_map = HERE / "torch_shards", {}
    (shards / "pytorch_model.bin").unlink()
    for i in (1, 2):
        name = f"pytorch_model-0000{i}-of-00002.bin"
        part = {key: tensor for key, tensor in state.items() if ("h.1." in key) == (i == 2)}
        torch.save(part, shards / name)
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (shards / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")

    shutil.copytree(folder, new_folder("torch_stream"), dirs_exist_ok=True)
    old = dict(model.transformer.state_dict())  # as the first files on the Hub: masks, no prefix
    mask = torch.tril(torch.ones(32, 32, dtype=torch.uint8))
    for i in range(2):
        old[f"h.{i}.attn.bias"] = mask[None, None]
    place = HERE / "torch_stream" / "pytorch_model.bin"
    torch.save(old, place, _use_new_zipfile_serialization=False)

    exact = make_transformers(activation_function="gelu")
    shutil.rmtree(HERE / "exact", ignore_errors=True)
    exact.save_pretrained(HERE / "exact")
    (HERE / "exact" / "generation_config.json").unlink()
    with torch.inference_mode():
        return {"torch": model(ids[None]).logits[0], "exact": exact(ids[None]).logits[0]}


def save_adapter():
    """Writes the LoRA adapter of make.py as PEFT did before it had safetensors."""
    folder = new_folder("adapter_bin")
    shutil.copy(HERE / "adapter" / "adapter_config.json", folder)
    torch.save(
        load_file(HERE / "adapter" / "adapter_model.safetensors"), folder / "adapter_model.bin"
    )


class Norm(nn.Module):
    """nanoGPT's layer norm, with or without a bias."""

    def __init__(self, n, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.bias = nn.Parameter(torch.zeros(n)) if bias else None

    def forward(self, x):
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_attn = nn.Linear(c["n_embd"], 3 * c["n_embd"], bias=c["bias"])
        self.c_proj = nn.Linear(c["n_embd"], c["n_embd"], bias=c["bias"])
        self.n_head = c["n_head"]

    def forward(self, x):
        batch, n_seq, n_embd = x.shape
        heads = (y.view(batch, n_seq, self.n_head, -1).transpose(1, 2)
                 for y in self.c_attn(x).split(n_embd, dim=2))  # fmt: skip
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, n_seq, n_embd))


class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c["n_embd"], 4 * c["n_embd"], bias=c["bias"])
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * c["n_embd"], c["n_embd"], bias=c["bias"])

    def forward(self, x):
        return self.c_proj(self.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.attn = Norm(c["n_embd"], c["bias"]), Attention(c)
        self.ln_2, self.mlp = Norm(c["n_embd"], c["bias"]), Mlp(c)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """The model of nanoGPT's model.py, by its description."""

    def __init__(self, c):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(c["vocab_size"], c["n_embd"]),
                "wpe": nn.Embedding(c["block_size"], c["n_embd"]),
                "h": nn.ModuleList([Block(c) for _ in range(c["n_layer"])]),
                "ln_f": Norm(c["n_embd"], c["bias"]),
            }
        )
        self.lm_head = nn.Linear(c["n_embd"], c["vocab_size"], bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids):
        t = self.transformer
        x = t.wte(ids) + t.wpe(torch.arange(ids.shape[-1]))
        for block in t.h:
            x = block(x)
        return self.lm_head(t.ln_f(x))


def save_nanogpt(name, ids, prefix="", **args):
    """Writes out_dir/ckpt.pt as train.py does -> the logits."""
    args = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 32, "dropout": 0.0} | args
    model = shake(NanoGPT(args), 2)
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == decay],
               "weight_decay": 0.1 * decay} for decay in (True, False)]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95))
    model(ids[None]).sum().backward()
    optimizer.step()
    checkpoint = {
        "model": {f"{prefix}{key}": value for key, value in model.state_dict().items()},
        "optimizer": optimizer.state_dict(),
        "model_args": args,
        "iter_num": 250,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "learning_rate": 1e-3, "device": "cpu", "compile": True},
    }
    torch.save(checkpoint, new_folder(name) / "ckpt.pt")
    with torch.inference_mode():
        return model(ids[None])[0]


def save_nanogpts(ids):
    """-> the logits of a model of characters, and of one with biases and a padded vocabulary."""
    n = len(CHARACTERS)
    few = ids % n
    logits = {
        "nanogpt": save_nanogpt("nanogpt", few, "_orig_mod.", vocab_size=n, bias=False),
        "nanogpt_bias": save_nanogpt("nanogpt_bias", ids, vocab_size=304, bias=True, n_layer=1),
    }
    stoi = {c: i for i, c in enumerate(CHARACTERS)}
    meta = {"vocab_size": n, "itos": {i: c for c, i in stoi.items()}, "stoi": stoi}
    with (HERE / "nanogpt" / "meta.pkl").open("wb") as file:
        pickle.dump(meta, file)
    return logits


def save_llmc(ids):
    """Writes gpt2_*.bin as train_gpt2.py's write_model does -> the logits, by version."""
    model = make_transformers(n_layer=1)
    state = model.transformer.state_dict()
    names = ["wte.weight", "wpe.weight"]
    for part in ("ln_1.weight", "ln_1.bias", "attn.c_attn.weight", "attn.c_attn.bias",
                 "attn.c_proj.weight", "attn.c_proj.bias", "ln_2.weight", "ln_2.bias",
                 "mlp.c_fc.weight", "mlp.c_fc.bias",
                 "mlp.c_proj.weight", "mlp.c_proj.bias"):  # fmt: skip
        names += [f"h.{i}.{part}" for i in range(1)]
    names += ["ln_f.weight", "ln_f.bias"]
    logits, folder = {}, new_folder("llmc")
    for version, dtype in ((3, torch.float32), (5, torch.bfloat16)):
        header = torch.zeros(256, dtype=torch.int32)
        header[:8] = torch.tensor([20240326, version, 32, 300, 1, 4, 16, 384])
        with (folder / f"gpt2_{version}.bin").open("wb") as file:
            file.write(header.numpy().tobytes())
            for name in names:
                tensor = state[name]
                if name == "wte.weight":
                    tensor = functional.pad(tensor, (0, 0, 0, 84))
                if name.split(".", 2)[-1].removesuffix(".weight") in MATRICES:
                    tensor = tensor.t()  # nn.Linear's
                file.write(tensor.contiguous().to(dtype).view(torch.uint8).numpy().tobytes())
        rounded = make_transformers(n_layer=1)
        rounded.load_state_dict({k: v.to(dtype).float() for k, v in model.state_dict().items()})
        with torch.inference_mode():
            logits[f"llmc/{version}"] = rounded(ids[None]).logits[0]
    return logits


def save_gguf(ids):
    """Writes what llama.cpp's converter does, with gguf -> the logits of the widened weights."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_positions": 24}
    model = make_transformers(**sizes)
    names = {"transformer.wte": "token_embd", "transformer.wpe": "position_embd"}
    names |= {"transformer.ln_f": "output_norm"}
    theirs = ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down")
    ours = ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    names |= {f"transformer.h.0.{a}": f"blk.0.{b}" for a, b in zip(ours, theirs, strict=True)}
    vocabulary = json.loads((HERE / "vocabulary" / "encoder.json").read_text(encoding="utf-8"))
    merges = (HERE / "vocabulary" / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    folder, logits = new_folder("gguf"), {}
    kinds = gguf.GGMLQuantizationType
    for kind in (kinds.F32, kinds.F16, kinds.Q8_0, kinds.Q4_0):
        path = folder / f"tiny-{kind.name}.gguf"
        writer = gguf.GGUFWriter(path, "gpt2")
        writer.add_name("tiny")
        writer.add_block_count(1)
        writer.add_context_length(24)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(128)
        writer.add_head_count(4)
        writer.add_layer_norm_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(list(vocabulary))
        control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
        writer.add_token_types([normal] * 299 + [control])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(299)
        writer.add_eos_token_id(299)
        widened = {}
        for key, tensor in model.state_dict().items():
            if key == "lm_head.weight":
                continue
            module, end = key.rsplit(".", 1)
            array = tensor.numpy()
            turns = module.split(".", 3)[-1] in MATRICES and end == "weight"
            array = np.ascontiguousarray(array.T) if turns else array
            as_ = kinds.F32 if array.ndim == 1 or "wpe" in key else kind
            data = gguf.quants.quantize(array, as_)
            writer.add_tensor(f"{names[module]}.{end}", data, raw_dtype=as_)
            wide = gguf.quants.dequantize(data, as_)
            widened[key] = torch.from_numpy(wide.T.copy() if turns else wide.copy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        widened["lm_head.weight"] = widened["transformer.wte.weight"]
        rounded = make_transformers(**sizes)
        rounded.load_state_dict(widened)
        with torch.inference_mode():
            logits[f"gguf/{kind.name}"] = rounded(ids[None]).logits[0]
    return logits


def main():
    save_adapter()
    ids = torch.from_numpy(np.random.default_rng(0).integers(SIZES["vocab_size"], size=12))
    logits = {**save_torch(ids), **save_nanogpts(ids), **save_llmc(ids), **save_gguf(ids)}
    arrays = {name: value.detach().numpy() for name, value in logits.items()}
    np.savez_compressed(HERE / "formats.npz", ids=ids.numpy(), **arrays)


if __name__ == "__main__":
    main()
