"""Models that others wrote, each in its own format, make what they make there, or are refused."""

import json
import pickle
import shutil

import numpy as np
import pytest
from conftest import DATA

from picogpt import PicogptError, gpt2, load, save
from picogpt.layouts import load_encoder
from picogpt.loader import verify

GGUFS = ("F32", "F16", "Q8_0", "Q4_0")
MODELS = {  # by the key of the right logits: a folder of tests/data, a file in it
    "torch": ("torch", ""),
    "torch/shards": ("torch_shards", ""),
    "torch/stream": ("torch_stream", ""),
    "torch/file": ("torch", "pytorch_model.bin"),
    "torch/index": ("torch_shards", "pytorch_model.bin.index.json"),
    "exact": ("exact", ""),
    "nanogpt": ("nanogpt", ""),
    "nanogpt_bias": ("nanogpt_bias", "ckpt.pt"),
    "llmc/3": ("llmc", "gpt2_3.bin"),
    "llmc/5": ("llmc", "gpt2_5.bin"),
    **{f"gguf/{kind}": ("gguf", f"tiny-{kind}.gguf") for kind in GGUFS},
}


@pytest.fixture(scope="session")
def theirs():
    """The logits of each model, by torch (see make_formats.py in tests/data)."""
    with np.load(DATA / "formats.npz") as arrays:
        return dict(arrays)


@pytest.fixture
def place(tmp_path, model_folder):
    """A function that copies a model, with the vocabulary that it needs, and returns where."""

    def copy(folder, file=""):
        if folder == "nanogpt":  # which has its own
            return shutil.copytree(DATA / folder, tmp_path / folder) / file
        return model_folder(folder) / file

    return copy


def refusal(model, **options):
    with pytest.raises(PicogptError) as error:
        load(model, **options)
    return str(error.value)


def same(found, wanted):
    return np.abs(found - wanted).max() <= 1e-4 + 2e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("key", MODELS)
def test_logits_are_those_of_the_model_that_was_written(place, theirs, key):
    encoder, hparams, params = load(place(*MODELS[key]))
    ids = theirs["ids"] % encoder.n_vocab
    logits = gpt2(ids, **params, n_head=hparams["n_head"])
    wanted = theirs[key if key in theirs else "torch"]
    assert logits.dtype == np.float32
    assert logits.shape == (12, hparams["n_vocab"])
    assert same(logits, wanted[:, : encoder.n_vocab])
    assert ("erf" in params["blocks"][0]["mlp"]) == key.startswith(("exact", "nanogpt"))
    assert "lm_head" not in params


def test_the_exact_gelu_is_another_model(theirs):
    assert np.abs(theirs["exact"] - theirs["torch"]).max() > 0.002


def test_the_gelu_can_be_chosen_where_a_checkpoint_does_not_say(place, theirs):
    path = place("nanogpt_bias")
    exact, tanh = (load(path, gelu=gelu) for gelu in (None, "tanh"))
    logits = [gpt2(theirs["ids"], **m.params, n_head=2) for m in (exact, tanh)]
    assert np.abs(logits[0] - logits[1]).max() > 1e-4
    assert "erf" not in tanh.params["blocks"][0]["mlp"]
    assert load(path, gelu="erf").params.keys() == exact.params.keys()
    folder = place("torch")
    said = f"{folder / 'config.json'}: says that its gelu is tanh, not erf"
    assert refusal(folder, gelu="erf") == said
    assert load(folder, gelu="tanh")
    assert refusal(folder, gelu="relu") == "gelu: is 'relu'; expected tanh or erf"


def test_a_tree_without_biases_has_zeros(place):
    params = load(place("nanogpt")).params
    block = params["blocks"][1]
    for array in (params["ln_f"]["b"], block["ln_1"]["b"], block["attn"]["c_attn"]["b"]):
        assert array.dtype == np.float32
        assert not array.any()
    assert block["mlp"]["c_fc"]["b"].shape == (32,)


def test_an_exact_model_is_saved_and_read_again(place, theirs, tmp_path):
    model = load(place("nanogpt"))
    save(tmp_path / "new", *model)
    config = json.loads((tmp_path / "new" / "config.json").read_text(encoding="utf-8"))
    assert config["activation_function"] == "gelu"
    again = load(tmp_path / "new")
    ids = theirs["ids"] % 40
    assert same(gpt2(ids, **again.params, n_head=2), theirs["nanogpt"])
    assert again.encoder.encode("The whole\n☃") == model.encoder.encode("The whole\n☃")
    blocks = [dict(block) for block in model.params["blocks"]]
    blocks[0]["mlp"] = {key: blocks[0]["mlp"][key] for key in ("c_fc", "c_proj")}
    with pytest.raises(PicogptError, match="params: have erf in some blocks only"):
        save(tmp_path / "mixed", model.encoder, model.hparams, model.params | {"blocks": blocks})


def test_a_vocabulary_of_characters(place):
    folder = place("nanogpt")
    encoder = load(folder).encoder
    text = "The old woman said: 'A☃!'\n"
    ids = encoder.encode(text)
    assert len(ids) == len(text)
    assert encoder.decode(ids) == text
    assert encoder.decode_bytes(ids) == text.encode()
    assert encoder.token_bytes(encoder.n_vocab - 1) == "☃".encode()
    assert encoder.end_of_text is None
    assert encoder.encode("") == []
    assert encoder.encode_batch(["a", "b"]) == [encoder.encode("a"), encoder.encode("b")]
    assert load_encoder(folder).encoder == load_encoder(folder / "ckpt.pt").encoder
    with pytest.raises(PicogptError) as error:
        encoder.encode("The q")
    assert str(error.value) == "text: character 4 is 'q'; expected one of the model's 40"


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ([], "has no stoi; expected the id of each character"),
        ({"itos": {}}, "has no stoi; expected the id of each character"),
        ({"stoi": [1]}, "has no stoi; expected the id of each character"),
        ({"stoi": {"ab": 0}}, "a token is no single character"),
        ({"stoi": {"a": 0, "b": 2}}, "ids are not 0, 1, 2 and so on, once each"),
        ({"stoi": {"a": 0, "b": "1"}}, "ids are not 0, 1, 2 and so on, once each"),
        ({"stoi": {"a": 0, "b": 0.0}}, "ids are not 0, 1, 2 and so on, once each"),
    ],
)
def test_other_files_of_characters_are_refused(place, meta, said):
    folder = place("nanogpt")
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    assert refusal(folder) == f"{folder / 'meta.pkl'}: {said}"


@pytest.mark.parametrize("n_layer", [3, 28, 2**31 - 1])
def test_more_layers_than_there_are_take_no_time(place, monkeypatch, n_layer):
    """Also where a tree without biases is filled up with zeros."""
    from picogpt.formats import pytorch

    path = place("nanogpt", "ckpt.pt")
    listing = pytorch.list_tensors(path)
    listing.metadata["model_args"]["n_layer"] = n_layer
    monkeypatch.setattr(pytorch, "list_tensors", lambda _: listing)
    message = refusal(path)
    assert "missing " in message if n_layer == 3 else f"says n_layer={n_layer}" in message


@pytest.mark.parametrize("value", [np.int32([1, 2]), ["a"], "x", 0, -1, 1.0, True, 2**40])
def test_a_width_that_is_none(place, monkeypatch, value):
    from picogpt.formats import gguf

    path = place("gguf", "tiny-F32.gguf")
    listing = gguf.list_tensors(path)
    listing.metadata["gpt2.feed_forward_length"] = value
    monkeypatch.setattr(gguf, "list_tensors", lambda _: listing)
    found = f"feed_forward_length is {value!r}; expected a positive integer"
    assert refusal(path) == f"{path}: {found}"


def test_a_model_of_characters_needs_them(place):
    folder = place("nanogpt")
    (folder / "meta.pkl").unlink()
    assert refusal(folder) == (
        f"{folder / 'ckpt.pt'}: has 40 tokens, so its vocabulary is not GPT-2's; expected meta.pkl "
        "or another vocabulary beside it"
    )


def test_one_model_in_several_formats_is_one(place, tmp_path):
    """As folders of the Hub have it: safetensors first, what others write passed over."""
    folder = place("transformers")
    wanted = load(folder).params["wte"]
    for path in (DATA / "torch" / "pytorch_model.bin", DATA / "gguf" / "tiny-F32.gguf"):
        shutil.copy(path, folder)
    (folder / "tf_model.h5").write_bytes(b"\x89HDF\r\n\x1a\n")
    (folder / "flax_model.msgpack").write_bytes(b"\x81")
    assert (load(folder).params["wte"] == wanted).all()
    (folder / "model.safetensors").unlink()
    assert (load(folder).params["wte"] != wanted).any()  # the next best


def test_which_of_two_is_not_guessed(place):
    folder = place("gguf")
    assert refusal(folder) == (
        f"{folder}: holds tiny-F16.gguf, tiny-F32.gguf, tiny-Q4_0.gguf, tiny-Q8_0.gguf; "
        "expected one; name the one that is meant"
    )
    folder = place("plain")
    shutil.copy(DATA / "nanogpt" / "ckpt.pt", folder / "model.bin")
    assert refusal(folder) == (
        f"{folder}: holds two models, hparams.json with *.index and model.bin; "
        "expected one; move the other elsewhere"
    )
    assert load(folder / "model.ckpt.index").params.keys() == load(place("slots")).params.keys()


def test_a_file_without_settings(tmp_path):
    path = shutil.copy(DATA / "torch" / "pytorch_model.bin", tmp_path / "x")
    assert refusal(path) == f"{path}: has no settings; expected config.json beside it"


@pytest.mark.parametrize("key", ["torch", "torch/stream", "nanogpt", "llmc/3", "gguf/Q4_0"])
def test_what_verify_says(place, key):
    path = place(*MODELS[key])
    has_checksums = key in ("torch", "nanogpt")
    checksums = "checksums right" if has_checksums else "no checksums in this format"
    n_layer = 2 if key.startswith(("torch", "nano")) else 1
    assert verify(path) == f"{4 + 12 * n_layer} tensors, {checksums}, all numbers finite"


def test_a_flipped_bit_is_seen_where_there_are_checksums(place):
    folder = place("torch")
    data = bytearray((folder / "pytorch_model.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "pytorch_model.bin").write_bytes(data)
    assert "is damaged (wrong checksum); fetch it again" in refusal(folder)
    load(folder, verify=False)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("general.architecture", "llama", "'gpt2'"),
        ("tokenizer.ggml.model", "llama", "'gpt2'"),
        ("tokenizer.ggml.pre", "llama-bpe", "'gpt-2'"),
        ("tokenizer.ggml.pre", None, "'gpt-2'"),
    ],
)
def test_ggufs_of_other_models_are_refused(place, monkeypatch, name, value, wanted):
    from picogpt.formats import gguf

    path = place("gguf", "tiny-F32.gguf")
    listing = gguf.list_tensors(path)
    listing.metadata[name] = value
    if value is None:
        del listing.metadata[name]
    monkeypatch.setattr(gguf, "list_tensors", lambda _: listing)
    found = value or "nothing"
    assert refusal(path) == f"{path}: {name} is {found!r}; expected {wanted}"
