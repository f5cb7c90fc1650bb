"""What is saved is read again; what does not fit is refused, and leaves nothing."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA

from picogpt import Encoder, PicogptError, generate, gpt2, load, save
from picogpt.cli import main
from picogpt.formats.files import list_tensors


def leaves(tree, path=()):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from leaves(value, (*path, i))
    else:
        yield path, tree


@pytest.mark.parametrize("name", ["transformers", "untied", "eps", "narrow"])
def test_what_save_writes_is_loaded_again(model_folder, tmp_path, name):
    model = load(model_folder(name))
    folder = tmp_path / "some" / "where"
    save(folder, *model)
    assert sorted(path.name for path in folder.iterdir()) == (
        ["config.json", "merges.txt", "model.safetensors", "vocab.json"]
    )
    assert list(folder.parent.iterdir()) == [folder]
    encoder, hparams, params = load(folder)
    assert encoder.encoder == model.encoder.encoder
    assert hparams == model.hparams
    wanted = dict(leaves(model.params))
    assert dict(leaves(params)).keys() == wanted.keys()
    for path, value in leaves(params):
        assert np.array_equal(value, wanted[path])


def test_save_writes_added_tokens_apart(model_folder, tmp_path):
    folder = model_folder("transformers")
    path = folder / "encoder.json"
    tokens = list(json.loads(path.read_text(encoding="utf-8")))
    path.write_text(json.dumps({t: i for i, t in enumerate(tokens[:298])}), encoding="utf-8")
    merges = folder / "vocab.bpe"
    lines = merges.read_text(encoding="utf-8").splitlines()[:-1]
    merges.write_text("\n".join(lines), encoding="utf-8")
    added = {"[PAD]": 298, "<|a b|>": 299}
    (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    model = load(folder)
    assert model.encoder.decode([299, 298]) == "<|a b|>[PAD]"
    save(tmp_path / "saved", *model)
    assert json.loads((tmp_path / "saved" / "added_tokens.json").read_text("utf-8")) == added
    assert load(tmp_path / "saved").encoder.encoder == model.encoder.encoder


def test_save_refuses_what_does_not_fit(model_folder, tmp_path):
    encoder, hparams, params = load(model_folder())
    folder = tmp_path / "saved"

    def check(message, encoder=encoder, hparams=hparams, params=params):
        with pytest.raises(PicogptError) as error:
            save(folder, encoder, hparams, params)
        assert str(error.value) == message
        assert sorted(tmp_path.iterdir()) == [tmp_path / "plain"]

    check("encoder: has 300 tokens; hparams have 299", hparams=hparams | {"n_vocab": 299})
    check("params/blocks: has 2 layers; expected 1", hparams=hparams | {"n_layer": 1})
    other = params | {"wpe": params["wpe"][:8]}
    wanted = "expected floating-point (32, 16) by hparams"
    check(f"params/wpe: is float32 (8, 16); {wanted}", params=other)
    other = params | {"wpe": params["wpe"].astype(np.int64)}
    check(f"params/wpe: is int64 (32, 16); {wanted}", params=other)
    other = params | {"ln_f": {"g": params["ln_f"]["g"]}}
    check("params/ln_f: holds g; expected g, b", params=other)
    other = params | {"blocks": []}
    check("params/blocks: has 0 layers; expected 2", params=other)
    other = params | {"blocks": [{}, {}]}
    what = "holds nothing; expected ln_1, attn, ln_2, mlp"
    check(f"params/blocks/0: {what}", params=other)
    one, two = (
        {**block, "ln_1": {**block["ln_1"], "eps": eps}}
        for block, eps in zip(params["blocks"], (1e-5, 0.1), strict=True)
    )
    other = params | {"blocks": [one, two]}
    what = "have the eps [1e-05, 0.1]; a file has one"
    check(f"params: {what}", params=other)
    check("hparams: n_head=5 does not divide n_embd=16", hparams=hparams | {"n_head": 5})
    check(
        "hparams: n_ctx is None; expected a positive integer",
        hparams={name: value for name, value in hparams.items() if name != "n_ctx"},
    )
    folder = tmp_path / "plain"
    check(f"{folder}: holds something already; choose a new folder")


def test_save_takes_other_numbers_and_folders(model_folder, tmp_path, monkeypatch):
    encoder, hparams, params = load(model_folder())
    hparams = {name: np.int64(value) for name, value in hparams.items()}
    other = {**params, "lm_head": None, "wpe": np.asfortranarray(params["wpe"].astype(np.float64))}
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(empty)
    save(tmp_path / "link", encoder, hparams, other)
    assert (load(empty).params["wpe"] == params["wpe"]).all()
    assert empty.stat().st_mode & 0o777 == 0o700
    modes = {path.stat().st_mode for path in empty.iterdir()}
    assert len(modes) == 1
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    save(".", encoder, hparams, params)
    assert load(".").hparams["n_layer"] == 2
    assert Path.cwd() == here


def test_added_tokens_keep_their_ids_wherever_they_are(model_folder, tmp_path):
    """transformers gives added tokens the ids behind the vocabulary's."""
    encoder, hparams, params = load(model_folder())
    tokens = ["<pad>", *list(encoder.encoder)[:298], "<sep>"]
    other = Encoder({token: i for i, token in enumerate(tokens)}, list(encoder._ranks)[:-1])
    save(tmp_path / "saved", other, hparams, params)
    vocabulary = json.loads((tmp_path / "saved" / "vocab.json").read_text(encoding="utf-8"))
    assert vocabulary == {token: i for i, token in enumerate(tokens[:-1])}
    added = json.loads((tmp_path / "saved" / "added_tokens.json").read_text(encoding="utf-8"))
    assert added == {"<sep>": 299}
    assert load(tmp_path / "saved").encoder.encoder == other.encoder


def test_save_without_safetensors(model_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(PicogptError) as error:
        save(tmp_path / "saved", *load(model_folder()))
    message = 'is not installed; run "pip install safetensors"'
    assert str(error.value) == f"safetensors: {message}"


def test_a_save_that_fails_leaves_nothing(model_folder, tmp_path, monkeypatch):
    model = load(model_folder())

    def fail(self, folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Encoder, "save", fail)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "saved", *model)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "plain"]


@pytest.mark.parametrize("name", ["plain", "untied", "eps", "narrow"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gguf_is_loaded_again(model_folder, tmp_path, name, dtype):
    model = load(model_folder(name))
    place = tmp_path / "some" / "model.gguf"
    save(place, *model, dtype=dtype)
    assert list(place.parent.iterdir()) == [place]
    encoder, hparams, params = load(place)
    assert encoder.encoder == model.encoder.encoder
    assert encoder.merges == model.encoder.merges
    assert encoder.end_of_text == model.encoder.end_of_text
    assert hparams == model.hparams
    wanted = dict(leaves(model.params))
    assert dict(leaves(params)).keys() == wanted.keys()
    for path, value in leaves(params):
        is_half = dtype == "float16" and np.ndim(value) == 2 and path != ("wpe",)
        rounded = np.float16(wanted[path]) if is_half else np.float32(wanted[path])
        assert np.allclose(value, rounded, rtol=1e-6, atol=0)
    types = {entry.dtype for entry in list_tensors(place).values()}
    assert types == {"float32", dtype}


def test_what_gguf_reads_of_ours(model_folder, tmp_path):
    """The package's own reader, which is not used here, finds what its writer was given."""
    import gguf

    encoder, hparams, params = load(model_folder("plain"))
    save(tmp_path / "folder", encoder, hparams, params, format="gguf")
    reader = gguf.GGUFReader(tmp_path / "folder" / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "gpt2"
    assert fields["gpt2.context_length"] == 32
    assert fields["gpt2.feed_forward_length"] == 64
    assert fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.ggml.eos_token_id"] == 299
    assert fields["tokenizer.ggml.tokens"][-1] == "<|endoftext|>"
    assert fields["tokenizer.ggml.token_type"][-2:] == [1, 3]
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert len(tensors) == 28
    w = params["blocks"][1]["mlp"]["c_fc"]["w"]
    assert np.array_equal(tensors["blk.1.ffn_up.weight"], w.T)
    assert np.array_equal(tensors["token_embd.weight"], params["wte"])


def test_added_tokens_of_a_gguf_keep_their_text(model_folder, tmp_path):
    encoder, hparams, params = load(model_folder())
    tokens = [*list(encoder.encoder)[:298], "<|aĠb|>", "<Ã©>"]
    lines = encoder.merges[:-1]
    other = Encoder({token: i for i, token in enumerate(tokens)}, lines)
    save(tmp_path / "x.gguf", other, hparams, params)
    again = load(tmp_path / "x.gguf").encoder
    assert again.encoder == other.encoder
    assert again.encode("<|a b|><é>", allow_special=True) == [298, 299]


def test_what_a_gguf_cannot_hold(model_folder, tmp_path):
    exact = load(DATA / "nanogpt")
    place = tmp_path / "x.gguf"

    def check(message, *model, path=place, **options):
        with pytest.raises(PicogptError) as error:
            save(path, *model, **options)
        assert str(error.value) == message
        assert not list(tmp_path.glob("*.gguf*"))

    said = "params: have erf, the exact gelu, which llama.cpp's gpt2 does not compute"
    check(said, *exact)
    tanh = load(DATA / "nanogpt", gelu="tanh")
    check("encoder: has single characters and no merges, which a GGUF must have", *tanh)
    model = load(model_folder("plain"))
    check("format: is 'onnx'; expected safetensors or gguf", *model, format="onnx")
    check("dtype: is 'int8'; expected float32 or float16", *model, dtype="int8")
    check(
        f"{place}: ends in .gguf; expected a folder for safetensors", *model, format="safetensors"
    )
    large = model.params | {"wte": model.params["wte"] * 1e6}
    said = "model/wte: holds numbers that float16 has no room for; use float32"
    check(said, model.encoder, model.hparams, large, dtype="float16")
    for kind, path in (("folder", tmp_path / "plain"), ("file", tmp_path / "plain" / "x.gguf")):
        if kind == "file":
            path.touch()
        check(f"{path}: holds something already; choose a new {kind}", *model, path=path)


def test_a_gguf_that_fails_leaves_nothing(model_folder, tmp_path, monkeypatch):
    import gguf

    model = load(model_folder())

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fail)
    for path in (tmp_path / "x.gguf", tmp_path / "new" / "x.gguf"):
        with pytest.raises(OSError, match="No space"):
            save(path, *model)
        assert sorted(tmp_path.iterdir()) == [tmp_path / "plain"]
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(PicogptError) as error:
        save(tmp_path / "x.gguf", *model)
    assert str(error.value) == 'gguf: is not installed; run "pip install gguf"'


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_convert(model_folder, tmp_path, capsys, dtype):
    source = model_folder("torch")
    for path, end in ((tmp_path / "x.gguf", ""), (tmp_path / "folder", "model.safetensors")):
        arguments = ["convert", str(source), str(path), "--dtype", dtype]
        assert main(arguments) == 0
        assert capsys.readouterr() == ("", "")
        types = {entry.dtype for entry in list_tensors(path / end).values()}
        assert dtype in types
        logits = [gpt2(range(9), **load(model).params, n_head=4) for model in (source, path)]
        tolerance = 1e-4 if dtype == "float32" else 0.1
        assert np.abs(logits[0] - logits[1]).max() < tolerance
        assert main(arguments) == 1
        assert "holds something already; choose a new f" in capsys.readouterr().err
    arguments = ["convert", str(source), str(tmp_path / "y"), "--to", "gguf"]
    assert main(arguments) == 0
    assert load(tmp_path / "y").hparams["n_layer"] == 2
    assert main(["convert", "nosuch", str(tmp_path / "z")]) == 1
    assert not (tmp_path / "z").exists()


@pytest.mark.reference
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_llama_cpp_runs_what_convert_writes(tmp_path, dtype):
    pytest.importorskip("xllamacpp")
    prompt, path = "Once upon a time there was", tmp_path / "tales.gguf"
    assert main(["convert", "tales", str(path), "--dtype", dtype]) == 0
    script = (
        "import json, os, sys, xllamacpp\n"
        "params = xllamacpp.CommonParams()\n"
        "params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 256, 1\n"
        "asked = {'prompt': sys.argv[2], 'max_tokens': 30, 'temperature': 0, 'n_probs': 1}\n"
        "answer = xllamacpp.Server(params).handle_completions(asked)['choices'][0]\n"
        "print(json.dumps([answer['text'], answer['logprobs']['content'][0]]), flush=True)\n"
        "os._exit(0)\n"
    )
    command = [sys.executable, "-c", script, str(path), prompt]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text, first = json.loads(done.stdout)
    encoder, hparams, params = load("tales")
    ids = encoder.encode(prompt)
    new = generate(ids, params, hparams["n_head"], 30)
    assert text == encoder.decode(new)
    logits = gpt2(ids, **params, n_head=hparams["n_head"])[-1].astype(np.float64)
    wanted = logits.max() - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    assert first["id"] == new[0]
    assert abs(first["logprob"] - wanted) < (1e-3 if dtype == "float32" else 0.01)
