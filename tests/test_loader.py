"""Which folder a name means, and checkpoints that fit or are refused in one line."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA

import picogpt
from picogpt import PicogptError, gpt2, layouts, load, loader
from picogpt.catalog import default_model, find_model, weights_folder
from picogpt.download import FILES
from picogpt.loader import measure, verify

SIZES = "n_vocab=300, n_ctx=32, n_embd=16, n_head=4, n_layer=2"


def change(folder, file="hparams.json", **values):
    path = folder / file
    old = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(old | values), encoding="utf-8")


def refusal(folder, **options):
    with pytest.raises(PicogptError) as error:
        load(folder, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def leaves(tree, path=()):
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list):
        for i, value in enumerate(tree):
            yield from leaves(value, (*path, i))
    else:
        yield path, tree


@pytest.mark.parametrize(
    "name", ["plain", "sharded", "slots", "flat", "transformers", "shards", "old"]
)
def test_the_tree_holds_the_checkpoints_tensors(model_folder, expected, name):
    encoder, hparams, params = load(model_folder(name))
    assert encoder.n_vocab == 300
    assert hparams == {"n_vocab": 300, "n_ctx": 32, "n_embd": 16, "n_head": 4, "n_layer": 2}
    found = dict(leaves(params))
    assert len(found) == 28
    for path, tensor in found.items():
        name = "/".join(map(str, path)).replace("blocks/", "h")
        wanted = expected[f"model/{name}"]
        wanted = wanted[0] if name.endswith("w") else wanted
        assert tensor.shape == wanted.shape
        assert tensor.tobytes() == wanted.tobytes()
        assert not tensor.flags.owndata  # it lies where the file is mapped


def to_bfloat16(array):
    """Rounds float32 to the nearest numbers whose lower 16 bits are 0, halves to even ones."""
    bits = array.view(np.uint32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("name", ["float16", "half", "bfloat16", "bfloat"])
def test_smaller_types_are_widened(model_folder, expected, name):
    params = load(model_folder(name)).params
    for _, tensor in leaves(params):
        assert tensor.dtype == np.float32
    wte = expected["model/wte"]
    wanted = to_bfloat16(wte) if name.startswith("b") else wte.astype(np.float16)
    assert (params["wte"] == wanted).all()


@pytest.mark.parametrize("name", ["eps", "narrow", "untied", "half", "bfloat"])
def test_other_weights_give_transformers_logits(model_folder, expected, name):
    params = load(model_folder(name)).params
    assert ("lm_head" in params) == (name == "untied")
    assert [path for path, value in leaves(params) if path[-1] == "eps"] == (
        [("blocks", i, ln, "eps") for i in range(2) for ln in ("ln_1", "ln_2")] + [("ln_f", "eps")]
        if name == "eps"
        else []
    )
    logits = gpt2(expected["ids"], **params, n_head=4)
    wanted = expected[f"logits/{name}"]
    assert np.abs(wanted - expected["logits"]).max() > 0.005  # it is another model indeed
    assert logits.dtype == np.float32
    assert np.abs(logits - wanted).max() <= 1e-4 + 2e-6 * np.abs(wanted).max()


def test_only_the_leading_1_of_a_weight_is_dropped(tmp_path, monkeypatch):
    """A model of one channel, layer and token keeps its other axes of length 1."""
    hparams = {"n_vocab": 1, "n_ctx": 1, "n_embd": 1, "n_head": 1, "n_layer": 1}
    entries = {}

    def entry(name, shape):
        entries[name] = layouts.Entry("float32", (1, *shape) if name[-1] == "w" else shape, 0, 0, 0)

    source = layouts.Source(tmp_path, hparams, tmp_path, entries, lambda name: name)
    source.tree(entry)
    assert entries["model/h0/attn/c_attn/w"].shape == (1, 1, 3)
    shapes = loader._tensor_shapes(source)
    assert shapes["model/h0/attn/c_attn/w"] == (1, 3)
    assert shapes["model/wte"] == (1, 1)


@pytest.mark.parametrize("name", ["plain", "transformers"])
def test_a_load_writes_nothing(model_folder, name):
    folder = model_folder(name)
    (folder / "checkpoint").unlink(missing_ok=True)
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.iterdir())
    load(folder)
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    ("values", "problems"),
    [
        ({"n_layer": 3}, "missing model/h2"),
        ({"n_layer": 1}, "unexpected model/h1"),
        ({"n_ctx": 64}, "model/wpe is (32, 16), expected (64, 16)"),
        ({"n_vocab": 299}, "model/wte is (300, 16), expected (299, 16)"),
    ],
)
def test_hparams_that_do_not_fit(model_folder, values, problems):
    folder = model_folder()
    change(folder, **values)
    sizes = ", ".join(
        f"{name}={value}" for name, value in (load(model_folder("slots")).hparams | values).items()
    )
    where = f"{folder}/model.ckpt.index: does not fit hparams.json ({sizes})"
    assert refusal(folder) == f"{where}: {problems}"


def test_a_shape_that_is_wrong_in_every_layer_is_told_once(model_folder):
    folder = model_folder()
    change(folder, n_embd=32)
    message = refusal(folder)
    assert "model/h*/attn/c_attn/w is (1, 16, 48), expected (1, 32, 96); " in message
    assert message.count("; ") == 15  # 12 of a layer, wte, wpe and 2 of ln_f


def test_all_missing_unexpected_and_misshapen_tensors_are_in_one_message(model_folder):
    folder = model_folder()
    path = folder / "model.ckpt.index"
    index = layouts.tensorflow.list_tensors(path)
    wte = index.pop("model/wte")
    index["model/h0/mlp/c_fc/bias"] = index.pop("model/h0/mlp/c_fc/b")
    index["model/h1/ln_1/g"] = index["model/h1/ln_1/g"]._replace(shape=(1, 16))
    index["model/h1/ln_1/g/Adam"] = wte  # below a tensor
    index["global_step"] = wte  # outside model/
    index["model_ema/wte"] = wte
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts.tensorflow, "list_tensors", lambda _: index)
        message = refusal(folder)
    assert message == (
        f"{path}: does not fit hparams.json ({SIZES}): missing model/wte; "
        "missing model/h0/mlp/c_fc/b; unexpected model/h0/mlp/c_fc/bias; "
        "model/h1/ln_1/g is (1, 16), expected (16,)"
    )


def test_more_layers_than_tensors_are_not_even_counted_up(model_folder):
    folder = model_folder()
    change(folder, n_layer=2**31 - 1)
    said = "28 tensors; hparams.json says n_layer=2147483647"
    assert refusal(folder) == f"{folder}/model.ckpt.index: {said}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_head": 5}, "n_head=5 does not divide n_embd=16"),
        ({"n_head": 0}, "n_head is 0; expected a positive integer"),
        ({"n_ctx": "32"}, "n_ctx is '32'; expected a positive integer"),
        ({"n_layer": True}, "n_layer is True; expected a positive integer"),
        ({"n_embd": None}, "n_embd is None; expected a positive integer"),
    ],
)
def test_impossible_hparams(model_folder, values, message):
    folder = model_folder()
    change(folder, **values)
    assert refusal(folder) == f"{folder}/hparams.json: {message}"


def test_other_hparams_are_ignored(model_folder):
    folder = model_folder()
    change(folder, n_words=5)
    assert "n_words" not in load(folder).hparams


@pytest.mark.parametrize("name", ["hparams.json", "encoder.json", "config.json"])
@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("\ufeff <?xml version='1.0'?><Error>", """starts with "<?xml version='1.0'?"""),
        ("<!DOCTYPE html><html>", "starts with '<!DOCTYPE html><html"),
        ("[" * 100_000, "starts with '[[[[[[[[[[[[[[[[[[[["),
        ("", "is empty"),
    ],
)
def test_an_error_page_saved_as_a_file(model_folder, name, content, found):
    folder = model_folder("transformers" if name == "config.json" else "plain")
    (folder / name).write_text(content, encoding="utf-8")
    message = refusal(folder)
    assert message.startswith(f"{folder / name}: {found}")
    assert message.endswith("; most likely a failed download; fetch it again")
    assert ("is not JSON" in message) == bool(content)


def test_json_of_another_kind(model_folder):
    folder = model_folder()
    (folder / "hparams.json").write_text("[1]", encoding="utf-8")
    message = "holds a list; expected a JSON object; fetch it again"
    assert refusal(folder) == f"{folder}/hparams.json: {message}"


def test_a_git_lfs_pointer(model_folder):
    folder = model_folder()
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1042301\n"
    (folder / "encoder.json").write_text(text, encoding="utf-8")
    message = 'is a Git LFS pointer, not the file; run "git lfs pull"'
    assert refusal(folder) == f"{folder}/encoder.json: {message}"


def test_a_folder_without_a_vocabulary_borrows_gpt2s_if_it_fits(model_folder, monkeypatch):
    folder = model_folder()
    for name in ("encoder.json", "vocab.bpe"):
        (folder / name).unlink()
    assert "lacks encoder.json or tokenizer.json" in refusal(folder)
    # With a vocabulary of 300 for GPT-2's, this one fits.
    monkeypatch.setattr(layouts, "GPT2_N_VOCAB", 300)
    borrowed = layouts.Encoder.from_folder(DATA / "vocabulary")
    monkeypatch.setattr(layouts.Encoder, "gpt2", lambda: borrowed)
    assert load(folder).encoder is borrowed
    (folder / "vocab.bpe").touch()
    assert "lacks encoder.json or tokenizer.json" in refusal(folder)


@pytest.mark.parametrize(("name", "settings"), [("plain", "hparams"), ("transformers", "config")])
def test_a_vocabulary_of_another_model(model_folder, monkeypatch, name, settings):
    folder = model_folder(name)
    path = folder / "encoder.json"
    tokens = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(tokens | {"<pad>": 300}), encoding="utf-8")
    said = f"the vocabulary has 301 tokens; {settings}.json and the weights have 300"
    assert refusal(folder) == f"{folder}: {said}"
    path.write_text(json.dumps(dict(list(tokens.items())[:299])), encoding="utf-8")
    assert load(folder).hparams["n_vocab"] == 299  # one row of padding
    monkeypatch.setattr(loader, "MAX_PADDING", 1)
    said = f"the vocabulary has 299 tokens; {settings}.json and the weights have 300"
    assert refusal(folder) == f"{folder}: {said}"


@pytest.mark.parametrize("name", ["plain", "transformers", "untied"])
def test_rows_that_pad_the_vocabulary_are_cut(model_folder, expected, name):
    folder = model_folder(name)
    path = folder / "encoder.json"
    tokens = json.loads(path.read_text(encoding="utf-8"))
    del tokens["<|endoftext|>"]
    path.write_text(json.dumps(tokens), encoding="utf-8")
    encoder, hparams, params = load(folder)
    assert encoder.n_vocab == hparams["n_vocab"] == 299
    assert len(params["wte"]) == len(params.get("lm_head", params["wte"])) == 299
    assert not params["wte"].flags.owndata
    wanted = expected["logits/untied" if name == "untied" else "logits"]
    ids = expected["ids"]
    assert 299 not in ids
    logits = gpt2(ids, **params, n_head=4)
    assert np.abs(logits - wanted[:, :299]).max() < 1e-4


def test_a_wrong_folder_says_what_it_lacks(tmp_path):
    lacks = (
        "hparams.json or config.json, "
        "checkpoint or *.index or model.safetensors or model.safetensors.index.json or "
        "pytorch_model.bin or pytorch_model.bin.index.json, "
        "encoder.json or tokenizer.json or vocab.json, vocab.bpe or tokenizer.json or merges.txt"
    )
    assert refusal(tmp_path) == f"{tmp_path}: lacks {lacks}"
    no_folder = f"{tmp_path}/x: no such folder; expected one with {lacks}"
    assert refusal(tmp_path / "x") == no_folder
    file = tmp_path / "hparams.json"
    file.write_text('{"n_vocab": 300}', encoding="utf-8")
    formats = "gguf, llmc, pytorch, safetensors, tensorflow"
    assert refusal(file) == f"{file}: holds no tensors; expected one of the formats {formats}"
    vocabulary = lacks.partition(".bin.index.json, ")[2]
    assert refusal(tmp_path) == f"{tmp_path}: lacks checkpoint or *.index, {vocabulary}"
    file.rename(tmp_path / "config.json")
    weights = lacks.partition("*.index or ")[2].partition(", ")[0]
    assert refusal(tmp_path) == f"{tmp_path}: lacks {weights}, {vocabulary}"
    (tmp_path / "config.json").write_text('{"vocab_size": 50257}', encoding="utf-8")
    assert refusal(tmp_path) == f"{tmp_path}: lacks {weights}"


def test_two_models_in_a_folder(model_folder):
    folder = model_folder("transformers")
    model_folder("plain")
    for path in (folder.parent / "plain").iterdir():
        path.replace(folder / path.name)
    assert refusal(folder) == (
        f"{folder}: holds two models, hparams.json with *.index and config.json with "
        "model.safetensors; expected one; move the other elsewhere"
    )
    (folder / "model.safetensors").unlink()
    assert load(folder).hparams["n_layer"] == 2  # a config.json alone does no harm


def test_what_a_file_holds_counts_not_its_name(model_folder, expected):
    folder = model_folder("transformers")
    for name in ("pytorch_model.bin", "weights.txt"):
        path = folder / "model.safetensors"
        (path if path.exists() else folder / "pytorch_model.bin").rename(folder / name)
        for model in (folder, folder / name):
            logits = gpt2(expected["ids"], **load(model).params, n_head=4)
            assert np.abs(logits - expected["logits"]).max() < 1e-4


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("model_type", "gpt_neo", "'gpt2'"),
        ("activation_function", "relu", "'gelu_new'"),
        ("activation_function", "gelu_10", "'gelu_new'"),
        ("activation_function", None, "'gelu_new'"),
        ("scale_attn_weights", False, "True"),
        ("scale_attn_by_inverse_layer_idx", True, "False"),
        ("add_cross_attention", True, "False"),
        ("quantization_config", {"bits": 4}, "None"),
    ],
)
def test_settings_that_change_the_model_are_refused(model_folder, name, value, wanted):
    folder = model_folder("transformers")
    change(folder, "config.json", **{name: value})
    assert refusal(folder) == f"{folder}/config.json: {name} is {value!r}; expected {wanted}"


@pytest.mark.parametrize("eps", [0, -1e-5, "1e-5", None, float("nan"), 2])
def test_an_impossible_eps(model_folder, eps):
    folder = model_folder("transformers")
    change(folder, "config.json", layer_norm_epsilon=eps)
    said = f"layer_norm_epsilon is {eps!r}; expected 1e-5 or so"
    assert refusal(folder) == f"{folder}/config.json: {said}"


def test_settings_may_be_left_out(model_folder, expected):
    folder = model_folder("transformers")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    needed = ("vocab_size", "n_positions", "n_embd", "n_head", "n_layer")
    path.write_text(json.dumps({name: config[name] for name in needed}), encoding="utf-8")
    logits = gpt2(expected["ids"], **load(folder).params, n_head=4)
    assert np.abs(logits - expected["logits"]).max() < 1e-4
    del config["n_positions"]
    path.write_text(json.dumps(config), encoding="utf-8")
    said = "n_positions is None; expected a positive integer"
    assert refusal(folder) == f"{folder}/config.json: {said}"


def rewrite(folder, change):
    """Changes the tensors of a safetensors file, a dict, in place."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def no_prefix(tensors):
    for name in list(tensors):
        tensors[name.removeprefix("transformer.")] = tensors.pop(name)


def head_alone(tensors):
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")


def head_twice(tensors):
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()


def other_heads(tensors):
    tensors["v_head.summary.weight"] = np.zeros((1, 16), np.float32)
    tensors["score.weight"] = np.zeros((2, 16), np.float32)


def test_other_names_of_settings(model_folder):
    """transformers takes both; where both are there and differ, there is no telling."""
    folder = model_folder("transformers")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for name, alias in layouts.ALIASES.items():
        config[alias] = config.pop(name)
    path.write_text(json.dumps(config), encoding="utf-8")
    assert load(folder).hparams["n_head"] == 4
    change(folder, "config.json", n_head=4)
    assert load(folder).hparams["n_head"] == 4
    change(folder, "config.json", n_head=2)
    both = "n_head is 2 and num_attention_heads is 4; expected one"
    assert refusal(folder) == f"{path}: {both}"


@pytest.mark.parametrize("variant", [no_prefix, head_alone, head_twice, other_heads])
def test_variants_of_names_are_the_same_model(model_folder, expected, variant):
    folder = model_folder("transformers")
    rewrite(folder, variant)
    params = load(folder).params
    assert "lm_head" not in params
    logits = gpt2(expected["ids"], **params, n_head=4)
    assert np.abs(logits - expected["logits"]).max() < 1e-4


def test_a_head_that_differs_is_used_whatever_the_settings_say(model_folder, expected):
    folder = model_folder("untied")
    change(folder, "config.json", tie_word_embeddings=True)
    logits = gpt2(expected["ids"], **load(folder).params, n_head=4)
    assert np.abs(logits - expected["logits/untied"]).max() < 1e-4


def test_a_head_of_its_own_that_is_missing(model_folder):
    folder = model_folder("transformers")
    change(folder, "config.json", tie_word_embeddings=False)
    fits = f"{folder}/model.safetensors: does not fit config.json ({SIZES})"
    assert refusal(folder) == f"{fits}: missing lm_head.weight"


def test_what_is_wrong_with_names_is_told_in_the_files_own(model_folder):
    folder = model_folder("transformers")

    def spoil(tensors):
        del tensors["transformer.wpe.weight"]
        tensors["transformer.h.0.crossattention.c_attn.weight"] = np.zeros(1, np.float32)
        tensors["transformer.h.1.ln_1.bias"] = np.zeros(8, np.float32)
        for name in [name for name in tensors if ".h.1.mlp." in name]:
            del tensors[name]

    rewrite(folder, spoil)
    assert refusal(folder) == (
        f"{folder}/model.safetensors: does not fit config.json ({SIZES}): "
        "missing transformer.wpe.weight; missing transformer.h.1.mlp.c_fc.weight; "
        "missing transformer.h.1.mlp.c_fc.bias; missing transformer.h.1.mlp.c_proj.weight; "
        "missing transformer.h.1.mlp.c_proj.bias; "
        "unexpected transformer.h.0.crossattention.c_attn.weight; "
        "transformer.h.1.ln_1.bias is (8,), expected (16,)"
    )
    change(folder, "config.json", n_layer=3)
    assert "missing transformer.h.2; unexpected" in refusal(folder)


def test_weights_of_linear_layers_are_recognised(model_folder):
    """The square ones too lie the other way round, which no shape can tell."""
    folder = model_folder("transformers")

    def transpose(tensors):
        for name in tensors:
            if ".c_" in name and name.endswith("weight"):
                tensors[name] = np.ascontiguousarray(tensors[name].T)

    rewrite(folder, transpose)
    assert refusal(folder) == (
        f"{folder}/model.safetensors: does not fit config.json ({SIZES}): "
        "transformer.h.*.attn.c_attn.weight is (48, 16), expected (16, 48); "
        "transformer.h.*.mlp.c_fc.weight is (64, 16), expected (16, 64); "
        "transformer.h.*.mlp.c_proj.weight is (16, 64), expected (64, 16); "
        "the weights lie as in torch.nn.Linear: transpose each, the square ones too"
    )


def test_safetensors_with_a_vocabulary_of_openais_names_and_the_reverse(model_folder, expected):
    for name in ("plain", "transformers"):
        folder = model_folder(name)
        assert (folder / "encoder.json").is_file()
        assert load(folder).encoder.n_vocab == 300
        (folder / "encoder.json").rename(folder / "vocab.json")
        (folder / "vocab.bpe").rename(folder / "merges.txt")
        assert load(folder).encoder.n_vocab == 300


def test_verify_says_what_it_checked(model_folder):
    end = "all numbers finite"
    assert verify(model_folder("plain")) == f"28 tensors, checksums right, {end}"
    folder = model_folder("transformers")
    assert verify(folder) == f"28 tensors, no checksums in this format, {end}"
    rewrite(folder, lambda tensors: tensors["transformer.h.1.mlp.c_fc.bias"].fill(np.nan))
    with pytest.raises(PicogptError) as error:
        verify(folder)
    said = "params/blocks/1/mlp/c_fc/b holds nan or infinity; fetch it again"
    assert str(error.value) == f"{folder}: {said}"


def test_measure(model_folder):
    folder = model_folder("untied")
    n_bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert measure(folder) == (16_704, n_bytes)  # 300 x 16 of them in the head
    change(folder, "config.json", n_layer=2**31 - 1)
    with pytest.raises(PicogptError, match=r"29 tensors; config\.json says n_layer=2147483647"):
        measure(folder)


def test_messages_have_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal("./124M").startswith(f"{tmp_path}/124M: no such folder; ")


def test_an_unusual_number_of_heads_is_warned_of(model_folder, monkeypatch):
    folder = model_folder()
    monkeypatch.setitem(layouts.HEADS, 16, 2)
    with pytest.warns(UserWarning) as warned:
        load(folder)
    assert str(warned[0].message) == (
        f"{folder}/hparams.json: n_head=4 is unusual for n_embd=16, official models have 2; "
        "shapes cannot tell which is right"
    )
    assert layouts.HEADS == {768: 12, 1024: 16, 1280: 20, 1600: 25, 16: 2}


def test_a_name_is_a_model_and_a_path_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "124M").mkdir()
    (tmp_path / "mine").mkdir()
    assert find_model("./124M") == find_model(Path("124M")) == tmp_path / "124M"
    assert find_model("mine") == tmp_path / "mine"
    assert find_model("124M", fetch=False) == weights_folder() / "124M"


@pytest.mark.parametrize("name", ["335M", "", "gpt3"])
def test_a_name_that_is_none_lists_the_names(name):
    with pytest.raises(PicogptError) as error:
        find_model(name)
    names = "tales, 124M, 355M, 774M, 1558M, distilgpt2, and owner/name of the Hub"
    assert str(error.value) == f"{name}: neither a model nor a folder; the models are {names}"


@pytest.mark.parametrize(("old", "new"), [("117M", "124M"), ("345M", "355M")])
def test_old_names_are_explained(old, new):
    with pytest.raises(PicogptError) as error:
        find_model(old)
    assert str(error.value) == f"{old}: was renamed; use {new}"


def test_the_weights_folder(tmp_path, monkeypatch):
    import platformdirs

    assert weights_folder() == tmp_path / "weights"
    assert weights_folder(tmp_path) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert weights_folder("x") == tmp_path / "x"
    assert weights_folder("~/x") == Path.home() / "x"
    monkeypatch.delenv("PICOGPT_WEIGHTS")
    assert weights_folder() == platformdirs.user_cache_path("picogpt", appauthor=False)


def fill(folder, source="openai"):
    folder.mkdir(parents=True)
    for name in FILES[source]:
        (folder / name).touch()


def test_an_official_model_in_the_weights_folder_is_found(tmp_path):
    fill(tmp_path / "weights" / "355M")
    fill(tmp_path / "other" / "124M", "huggingface")
    assert find_model("355M") == tmp_path / "weights" / "355M"
    assert find_model("124M", tmp_path / "other") == tmp_path / "other" / "124M"


def test_the_default_model(tmp_path, monkeypatch):
    assert default_model() == "tales"
    fill(tmp_path / "weights" / "124M")
    assert default_model() == "124M"
    (tmp_path / "weights" / "124M" / "vocab.bpe").unlink()
    assert default_model() == "tales"
    monkeypatch.setenv("PICOGPT_MODEL", "some/folder")
    assert default_model() == "some/folder"


def test_the_bundled_model_is_found_in_a_source_tree_too(monkeypatch):
    installed = find_model("tales")
    monkeypatch.setitem(sys.modules, "picogpt.weights", None)
    assert find_model("tales") == Path(picogpt.__path__[0]).parent / "weights" / "tales"
    assert installed.name == "tales"


def test_the_bundled_model():
    encoder, hparams, params = load("tales")
    assert hparams == {"n_vocab": 4096, "n_ctx": 256, "n_embd": 256, "n_head": 8, "n_layer": 6}
    assert encoder.end_of_text == 4095
    assert 5e6 < sum(tensor.size for _, tensor in leaves(params)) < 7e6
    assert sum(path.stat().st_size for path in find_model("tales").iterdir()) <= 25e6
    text = "Once upon a time there was a king who had three sons."
    assert encoder.decode(encoder.encode(text)) == text
    # It has learnt English: each token of this is far likelier than one in 4,096.
    ids = encoder.encode(text)
    logits = gpt2(ids, **params, n_head=8)
    losses = np.log(np.exp(logits).sum(-1))[:-1] - logits[range(len(ids) - 1), ids[1:]]
    assert losses.mean() < 3.0


def test_a_byte_order_mark_does_no_harm(model_folder):
    folder = model_folder()
    for name in ("hparams.json", "encoder.json", "vocab.bpe", "checkpoint"):
        path = folder / name
        path.write_text("\ufeff" + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert load(folder).hparams["n_layer"] == 2


def test_a_long_list_of_problems_is_cut(model_folder, monkeypatch):
    folder = model_folder()
    change(folder, n_embd=32)
    monkeypatch.setattr(loader, "MAX_TOLD", 2)
    message = refusal(folder)
    assert message.endswith("; model/wpe is (32, 16), expected (32, 32); and 14 more")


@pytest.mark.parametrize(
    ("n_inner", "message"),
    [
        (77, r"c_fc.weight is \(16, 24\), expected \(16, 77\)"),
        (0, "config.json: n_inner is 0; expected a positive integer"),
        ("24", "config.json: n_inner is '24'; expected a positive integer"),
    ],
)
def test_a_width_that_is_not_that_of_the_weights(model_folder, n_inner, message):
    folder = model_folder("narrow")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["n_inner"] == 24
    (folder / "config.json").write_text(json.dumps(config | {"n_inner": n_inner}))
    with pytest.raises(PicogptError, match=message):
        load(folder)
