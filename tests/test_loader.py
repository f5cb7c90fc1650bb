"""Which folder a name means, and checkpoints that fit or are refused in one line."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import DATA

import picogpt
from picogpt import PicogptError, gpt2, load, loader
from picogpt.loader import OFFICIAL_FILES, default_model, find_model, weights_folder

SIZES = "n_vocab=300, n_ctx=32, n_embd=16, n_head=4, n_layer=2"


def change(folder, **values):
    path = folder / "hparams.json"
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


@pytest.mark.parametrize("name", ["plain", "sharded", "slots"])
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


def test_float16_is_widened(model_folder, expected):
    params = load(model_folder("float16")).params
    for _, tensor in leaves(params):
        assert tensor.dtype == np.float32
    assert (params["wte"] == expected["model/wte"].astype(np.float16)).all()


def test_only_the_leading_1_of_a_weight_is_dropped(model_folder, monkeypatch):
    """A model of one channel a head, one layer and one token keeps its other axes of length 1."""
    hparams = {"n_vocab": 1, "n_ctx": 1, "n_embd": 1, "n_head": 1, "n_layer": 1}
    tree = loader._parameter_tree(hparams, lambda name, shape: np.zeros(shape, np.float32))
    params = loader._parameter_tree(
        hparams, lambda name, shape: loader._to_float32(np.zeros(shape, np.float32), name)
    )
    assert tree["blocks"][0]["attn"]["c_attn"]["w"].shape == (1, 1, 3)
    assert params["blocks"][0]["attn"]["c_attn"]["w"].shape == (1, 3)
    assert params["wte"].shape == (1, 1)


def test_a_load_writes_nothing(model_folder):
    folder = model_folder()
    (folder / "checkpoint").unlink()
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
    prefix = folder / "model.ckpt"
    real = loader.checkpoint.read_index
    index = real(prefix)
    wte = index.pop("model/wte")
    index["model/h0/mlp/c_fc/bias"] = index.pop("model/h0/mlp/c_fc/b")
    index["model/h1/ln_1/g"] = index["model/h1/ln_1/g"]._replace(shape=(1, 16))
    index["model/h1/ln_1/g/Adam"] = wte  # below a tensor
    index["global_step"] = wte  # outside model/
    index["model_ema/wte"] = wte
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader.checkpoint, "read_index", lambda _: index)
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


@pytest.mark.parametrize("name", ["hparams.json", "encoder.json"])
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
    folder = model_folder()
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
    assert "lacks encoder.json or vocab.json" in refusal(folder)
    # With a vocabulary of 300 for GPT-2's, this one fits.
    monkeypatch.setattr(loader, "GPT2_N_VOCAB", 300)
    borrowed = loader.Encoder.from_folder(DATA / "vocabulary")
    monkeypatch.setattr(loader.Encoder, "gpt2", lambda: borrowed)
    assert load(folder).encoder is borrowed
    (folder / "vocab.bpe").touch()
    assert "lacks encoder.json or vocab.json" in refusal(folder)


def test_a_vocabulary_of_another_model(model_folder):
    folder = model_folder()
    path = folder / "encoder.json"
    tokens = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(tokens | {"<pad>": 300}), encoding="utf-8")
    said = "the vocabulary has 301 tokens; hparams.json and the weights have 300"
    assert refusal(folder) == f"{folder}: {said}"


def test_a_wrong_folder_says_what_it_lacks(tmp_path):
    lacks = (
        "hparams.json, checkpoint or *.index, encoder.json or vocab.json or tokenizer.json, "
        "vocab.bpe or merges.txt or tokenizer.json"
    )
    assert refusal(tmp_path) == f"{tmp_path}: lacks {lacks}"
    no_folder = f"{tmp_path}/x: no such folder; expected one with {lacks}"
    assert refusal(tmp_path / "x") == no_folder
    (tmp_path / "hparams.json").write_text('{"n_vocab": 300}', encoding="utf-8")
    file = tmp_path / "hparams.json"
    assert refusal(file) == f"{file}: is a file; expected a folder with {lacks}"
    assert refusal(tmp_path) == f"{tmp_path}: lacks {lacks.partition(', ')[2]}"


def test_messages_have_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal("./124M").startswith(f"{tmp_path}/124M: no such folder; ")


def test_an_unusual_number_of_heads_is_warned_of(model_folder, monkeypatch):
    folder = model_folder()
    monkeypatch.setitem(loader.HEADS, 16, 2)
    with pytest.warns(UserWarning) as warned:
        load(folder)
    assert str(warned[0].message) == (
        f"{folder}/hparams.json: n_head=4 is unusual for n_embd=16, official models have 2; "
        "shapes cannot tell which is right"
    )
    assert loader.HEADS == {768: 12, 1024: 16, 1280: 20, 1600: 25, 16: 2}


def test_a_name_is_a_model_and_a_path_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "124M").mkdir()
    (tmp_path / "mine").mkdir()
    assert find_model("./124M") == find_model(Path("124M")) == tmp_path / "124M"
    assert find_model("mine") == tmp_path / "mine"
    with pytest.raises(PicogptError) as error:
        find_model("124M")
    files = ", ".join(OFFICIAL_FILES)
    assert str(error.value) == (
        f"{weights_folder()}/124M: no such folder; expected one with {files}; "
        "put the files of OpenAI's release there"
    )


@pytest.mark.parametrize("name", ["335M", "", "gpt2"])
def test_a_name_that_is_none_lists_the_names(name):
    with pytest.raises(PicogptError) as error:
        find_model(name)
    names = "tales, 124M, 355M, 774M, 1558M"
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
    monkeypatch.delenv("PICOGPT_WEIGHTS")
    assert weights_folder() == platformdirs.user_cache_path("picogpt", appauthor=False)


def fill(folder, names=OFFICIAL_FILES):
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()


def test_an_official_model_in_the_weights_folder_is_found(tmp_path):
    fill(tmp_path / "weights" / "355M")
    fill(tmp_path / "other" / "124M")
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
