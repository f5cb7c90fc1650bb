"""Comparisons with the originals: transformers and TensorFlow, on the same weights and files."""

import functools
import json
import os
import re
import subprocess
import sys
import unicodedata
from importlib import resources
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picogpt import (
    Encoder,
    PicogptError,
    generate,
    generate_batch,
    gpt2,
    load,
    save,
    score,
    token_logprobs,
    trace,
)
from picogpt.formats import tensorflow
from picogpt.formats.tensors import BYTES_OF, read_tensors
from picogpt.generation import _candidates

EXAMPLES = Path(__file__).parent.parent / "examples"
pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("default"),  # the originals' own
]


@pytest.fixture(scope="session")
def tf():
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return pytest.importorskip("tensorflow")


@pytest.fixture(scope="session")
def torch():
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)  # its threads and NumPy's get in each other's way
    return torch


@pytest.fixture(scope="session")
def make_model(torch):
    """A function that makes a transformers model, of random weights or of a parameter tree."""
    transformers = pytest.importorskip("transformers")

    def make(n_vocab, n_ctx, n_embd, n_head, n_layer, params=None, seed=0):
        torch.manual_seed(seed)
        config = transformers.GPT2Config(
            vocab_size=n_vocab,
            n_positions=n_ctx,
            n_embd=n_embd,
            n_head=n_head,
            n_layer=n_layer,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = transformers.GPT2LMHeadModel(config).eval()
        if params:
            weights = {f"transformer.{name}": value for name, value in flatten(params)}
            weights = {name: torch.tensor(value) for name, value in weights.items()}
            missing, unexpected = model.load_state_dict(weights, strict=False)
            assert (missing, unexpected) == (["lm_head.weight"], [])
            model.tie_weights()
        return model

    return make


def flatten(tree, path=""):
    """Yields the arrays of a parameter tree under transformers' names."""
    names = {"g": "weight", "w": "weight", "b": "bias", "blocks": "h"}
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        name = f"{path}.{names.get(key, key)}".lstrip(".")
        if isinstance(value, dict | list):
            yield from flatten(value, name)
        else:
            yield name if key not in ("wte", "wpe") else f"{name}.weight", value


def to_params(model):
    """The parameter tree of a transformers model."""
    params = {"blocks": [{} for _ in model.transformer.h]}
    for name, tensor in model.transformer.named_parameters():
        *path, last = name.split(".")
        node = params
        if path[0] == "h":
            node, path = params["blocks"][int(path[1])], path[2:]
        elif path[0] in ("wte", "wpe"):
            params[path[0]] = tensor.detach().numpy()
            continue
        for key in path:
            node = node.setdefault(key, {})
        matrix = "w" if tensor.ndim == 2 else "g"
        node[matrix if last == "weight" else "b"] = tensor.detach().numpy()
    return params


def check_against(torch, model, params, n_head, ids, n_tokens):
    """Logits within 1e-4 + 2e-6 of the largest; greedy ids the same where two are not as good."""
    with torch.inference_mode():
        wanted = model(torch.tensor([ids])).logits[0].numpy()
        new = generate(ids, params, n_head, n_tokens)
        after = model(torch.tensor([ids + new[:-1]])).logits[0, len(ids) - 1 :].numpy()
    found = gpt2(ids, **params, n_head=n_head)
    assert np.abs(found - wanted).max() <= 1e-4 + 2e-6 * np.abs(wanted).max()
    second, best = np.sort(after, -1)[:, -2:].T
    sure = best - second > 1e-3
    assert len(new) == n_tokens
    assert sure.mean() > 0.9
    assert (np.array(new) == after.argmax(-1))[sure].all()


SHAPES = [(50, 80, 8, 1, 1), (211, 96, 24, 3, 2), (999, 128, 64, 8, 3), (64, 70, 40, 20, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_random_models_equal_transformers(torch, make_model, shape, seed):
    model = make_model(*shape, seed=seed)
    ids = np.random.default_rng(seed).integers(shape[0], size=6).tolist()
    check_against(torch, model, to_params(model), shape[3], ids, 64)


@pytest.mark.parametrize("text", ["Once upon a time", "The wolf said to the little pig,"])
def test_tales_equals_transformers(torch, make_model, text):
    encoder, hparams, params = load("tales")
    model = make_model(**hparams, params=params)
    check_against(torch, model, params, hparams["n_head"], encoder.encode(text), 64)


def test_tales_in_a_full_window_equals_transformers(torch, make_model):
    _, hparams, params = load("tales")
    model = make_model(**hparams, params=params)
    ids = np.random.default_rng(0).integers(4096, size=256).tolist()
    check_against(torch, model, params, hparams["n_head"], ids, 1)


def write(tf, folder, variables, n_devices=1, **options):
    """Writes {name: array} with TensorFlow's Saver."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        for i, (name, value) in enumerate(variables.items()):
            with tf.device(f"/cpu:{i % n_devices}"):
                v1.get_variable(name, initializer=tf.constant(value))
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": n_devices})) as session:
            session.run(v1.global_variables_initializer())
            saver = v1.train.Saver(sharded=n_devices > 1, **options)
            saver.save(session, f"{folder}/model.ckpt")


def check_files(tf, folder):
    """Every tensor is what TensorFlow reads, bit for bit."""
    found = tensorflow.find_checkpoint(folder)
    reader = tf.train.load_checkpoint(str(found.with_suffix("")))
    index = tensorflow.list_tensors(found)
    shapes = reader.get_variable_to_shape_map()
    assert {name: list(entry.shape) for name, entry in index.items()} == shapes
    assert all(a < b for a, b in pairwise(index))
    floats = {name: e for name, e in index.items() if e.read or e.dtype in BYTES_OF}
    for name, tensor in read_tensors(floats).items():
        wanted = np.asarray(tf.cast(reader.get_tensor(name), tf.float32))
        assert tensor.dtype == np.float32
        assert tensor.shape == wanted.shape
        assert tensor.tobytes() == wanted.tobytes()
    for name in index.keys() - floats.keys():
        with pytest.raises(PicogptError, match=f"{name} has the type int"):
            read_tensors({name: index[name]})
    return index


@pytest.mark.parametrize("name", ["plain", "sharded", "slots", "float16", "bfloat16", "sliced"])
def test_committed_checkpoints_equal_tensorflows_reading(tf, model_folder, name):
    assert len(check_files(tf, model_folder(name))) >= 28


def test_what_is_sliced_loads_through_tensorflow(tf, model_folder, expected):
    params = load(model_folder("sliced")).params
    assert params["wte"].dtype == np.float32
    assert (params["wte"] == expected["model/wte"]).all()


def test_integers_for_weights_are_refused(tf, model_folder, expected):
    folder = model_folder()
    tensors = {name: value for name, value in expected.items() if name.startswith("model/")}
    tensors["model/wpe"] = tensors["model/wpe"].astype(np.int32)
    write(tf, folder, tensors)
    with pytest.raises(PicogptError) as error:
        load(folder)
    message = "model/wpe has the type int32; expected a floating-point type"
    assert str(error.value) == f"{folder}/model.ckpt.data-00000-of-00001: {message}"


@pytest.mark.parametrize("n_devices", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_random_checkpoints_equal_tensorflows_reading(tf, tmp_path, n_devices, seed):
    """Many names that share beginnings, odd shapes, empty and 0-d tensors, misaligned ones."""
    rng = np.random.default_rng(seed)
    variables = {}
    for i in range(rng.integers(1, 120)):
        name = "/".join("abc"[c] * n for c, n in rng.integers(1, 3, size=(rng.integers(1, 9), 2)))
        shape = rng.integers(0 if i % 7 == 0 else 1, 6, size=rng.integers(0, 5))
        dtype = rng.choice(
            ["float32", "float16", "float64", "int32", "int64"], p=[0.5, 0.2, 0.1, 0.1, 0.1]
        )
        variables[f"{name}_{i}"] = (100 * rng.normal(size=shape)).astype(dtype)
    write(tf, tmp_path, variables, n_devices)
    assert len(check_files(tf, tmp_path)) == len(variables)


def agree(torch, folder, seed=0):
    """What `load` makes of a folder gives the logits that transformers makes of it."""
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    _, hparams, params = load(folder)
    ids = np.random.default_rng(seed).integers(300, size=hparams["n_ctx"])
    with torch.inference_mode():
        wanted = model(torch.from_numpy(ids)[None]).logits[0].numpy()[:, : hparams["n_vocab"]]
    found = gpt2(ids, **params, n_head=hparams["n_head"])
    return np.abs(found - wanted).max() <= 1e-4 + 2e-6 * np.abs(wanted).max()


COMMITTED = ["transformers", "shards", "old", "eps", "narrow", "untied", "half", "bfloat", "exact"]


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_folders_equal_transformers_reading(torch, model_folder, name):
    assert agree(torch, model_folder(name))


SETTINGS = {
    "plain": {},
    "reordered": {"reorder_and_upcast_attn": True},
    "pytorch's gelu": {"activation_function": "gelu_pytorch_tanh"},
    "fast gelu": {"activation_function": "gelu_fast"},
    "accurate gelu": {"activation_function": "gelu_accurate"},
    "exact gelu": {"activation_function": "gelu"},
    "untied": {"tie_word_embeddings": False},
    "wide": {"n_inner": 200, "layer_norm_epsilon": 1e-3},
    "padded": {"vocab_size": 512},
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("body", [False, True], ids=["with head", "body"])
def test_what_transformers_saves_is_loaded(torch, model_folder, settings, dtype, body):
    """A body alone, as GPT2Model saves it, has names without the prefix."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "n_positions": 40, "n_embd": 24, "n_layer": 3, "n_head": 6}
    special = {"bos_token_id": 299, "eos_token_id": 299}
    config = transformers.GPT2Config(**{**shape, "initializer_range": 0.2, **special, **settings})
    model = transformers.GPT2LMHeadModel(config)
    if body:
        config.tie_word_embeddings = True
        model = model.transformer
    folder = model_folder("transformers")
    (folder / "model.safetensors").unlink()
    size = "50KB" if body else "1GB"
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=size)
    assert agree(torch, folder)


def test_a_head_stored_twice_and_differing_is_what_transformers_uses(torch, model_folder):
    folder = model_folder("untied")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"tie_word_embeddings": True}), encoding="utf-8")
    assert agree(torch, folder)


@pytest.mark.parametrize("name", ["transformers", "untied", "eps", "narrow", "plain", "exact"])
def test_what_save_writes_transformers_loads(torch, model_folder, tmp_path, name):
    transformers = pytest.importorskip("transformers")
    model = load(model_folder(name))
    save(tmp_path / "saved", *model)
    assert agree(torch, tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = "The wolf and\n the  seven little goats<|endoftext|>. naïve 日本"
    wanted = model.encoder.encode(text, allow_special=True)
    assert tokenizer.encode(text) == wanted
    assert tokenizer.decode(wanted) == text


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_weights_without_a_leading_axis(tf, model_folder, expected, dtype):
    folder = model_folder()
    tensors = {n: v for n, v in expected.items() if n.startswith("model/")}
    tensors = {n: (v[0] if v.ndim == 3 else v).astype(dtype) for n, v in tensors.items()}
    write(tf, folder, tensors)
    logits = gpt2(expected["ids"], **load(folder).params, n_head=4)
    assert np.abs(logits - expected["logits"]).max() < (0.1 if dtype == np.float16 else 1e-4)


@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 10_000])
@pytest.mark.parametrize("top_p", [0.0, 0.05, 0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("temperature", [0.2, 1.0, 3.0])
def test_the_kept_ids_equal_transformers_warpers(torch, temperature, top_k, top_p):
    """And so do the probabilities that are left. No ties here: in those, ours keep exactly k."""
    from transformers.generation import logits_process as warpers

    for seed in range(10):
        logits = np.random.default_rng(seed).normal(0, 3, 5000).astype(np.float32)
        scores = warpers.TemperatureLogitsWarper(temperature)(None, torch.tensor(logits)[None])
        if top_k:
            scores = warpers.TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1.0:
            scores = warpers.TopPLogitsWarper(top_p)(None, scores)
        wanted = scores.softmax(-1)[0].numpy()
        ids, probabilities = _candidates(logits, temperature, top_k, top_p)
        assert sorted(ids.tolist()) == np.isfinite(scores[0].numpy()).nonzero()[0].tolist()
        assert np.abs(probabilities / probabilities.sum() - wanted[ids]).max() < 1e-5


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_the_repetition_penalty_equals_transformers(torch, make_model, penalty):
    model = make_model(211, 96, 24, 3, 2)
    ids = [3, 141, 59, 26]
    new = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, 4, dtype=torch.int64),
        max_new_tokens=40,
        do_sample=False,
        repetition_penalty=penalty,
        pad_token_id=0,
    )[0, 4:].tolist()
    assert generate(ids, to_params(model), 3, 40, repetition_penalty=penalty) == new


def test_a_batch_of_tales_equals_transformers(torch, make_model):
    encoder, hparams, params = load("tales")
    model = make_model(**hparams, params=params)
    texts = ["Once upon a time", "The wolf", "There was a poor miller who had three daughters, and"]
    prompts = [encoder.encode(text) for text in texts]
    rows = generate_batch(prompts, params, hparams["n_head"], 64)
    for ids, row in zip(prompts, rows, strict=True):
        with torch.inference_mode():
            after = model(torch.tensor([ids + row[:-1]])).logits[0, len(ids) - 1 :].numpy()
        second, best = np.sort(after, -1)[:, -2:].T
        sure = best - second > 1e-3
        assert sure.mean() > 0.9
        assert (np.array(row) == after.argmax(-1))[sure].all()


@pytest.fixture(scope="session")
def tiktoken_gpt2():
    """tiktoken's gpt2, with its pattern, made of the same two files."""
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    folder = resources.files("picogpt") / "vocabulary"
    files = (str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    ranks = data_gym_to_mergeable_bpe_ranks(*files)
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 50256},
    )


GPT2 = Encoder.gpt2()
# Lone surrogates too; but characters that are newer than Python's tables may be newer than
# tiktoken's, which then takes them for neither letters nor numbers.
ANY_CHARACTER = st.characters(exclude_categories=["Cn"])
NASTY = (
    " \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u3000\u180e\u200b\ufeff'\u2019"
    "sStTmdlLrve'aZéßñ\u0301\u0308ÀΩжאبहि日本語ツ0٣½²Ⅷ٪!?.,-_@#€🤗👩\u200d👧🏽\x00\x7f"
    "\ud83e\udd17\ud800"
)
LINE = (
    "I'LL we'll  don'T ’s\t\r\n \n  x² ½٣Ⅷ 日本\u3000語 हिन्दी👩\u200d👩\u200d👧 "
    "\x1c\x85é\u0301<|endoftext|> 'ss 000  \n"
)


@settings(max_examples=1000, deadline=None)
@given(st.text(ANY_CHARACTER) | st.text(st.sampled_from(NASTY), max_size=200))
def test_ids_equal_tiktokens(tiktoken_gpt2, text):
    assert GPT2.encode(text) == tiktoken_gpt2.encode_ordinary(text)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(["<|endoftext|>", "<|", "endoftext", "|>", " ", "a", "\n"])))
def test_special_ids_equal_tiktokens(tiktoken_gpt2, parts):
    text = "".join(parts)
    found = GPT2.encode(text, allow_special=True)
    assert found == tiktoken_gpt2.encode(text, allowed_special="all")


def test_every_prefix_and_suffix_of_a_nasty_line(tiktoken_gpt2):
    for i in range(len(LINE) + 1):
        for text in (LINE[:i], LINE[i:]):
            assert GPT2.encode(text) == tiktoken_gpt2.encode_ordinary(text)


def test_every_character_equals_tiktokens(tiktoken_gpt2):
    """Each code point of all planes, between letters, blanks and digits."""
    for start in range(0, 0x110000, 0x1000):
        characters = [chr(c) for c in range(start, start + 0x1000)]
        known = [c for c in characters if unicodedata.category(c) not in ("Cn", "Cs")]
        # After two line ends, white space joins them to token 628; other pieces do not.
        text = "".join(f"a{c} {c}{c}1{c}!{c}'s\n\n{c}\n" for c in known)
        assert GPT2.encode(text) == tiktoken_gpt2.encode_ordinary(text)


def test_the_tales_text_equals_tiktokens(tiktoken_gpt2):
    """A megabyte of English: what `tales` says and what a page of its kind looks like."""
    encoder, hparams, params = load("tales")
    new = generate([encoder.end_of_text], params, hparams["n_head"], 250, seed=0)
    text = encoder.decode(new) * 1000
    assert GPT2.encode(text) == tiktoken_gpt2.encode_ordinary(text)


def test_a_tokenizer_json_that_transformers_wrote(tmp_path, model_folder):
    transformers = pytest.importorskip("transformers")
    folder = model_folder()
    wanted = Encoder.from_folder(folder)
    tokenizer = transformers.GPT2TokenizerFast(
        str(folder / "encoder.json"), str(folder / "vocab.bpe")
    )
    tokenizer.save_pretrained(tmp_path / "saved")
    for path in (tmp_path / "saved").iterdir():
        if path.name != "tokenizer.json":
            path.unlink()
    found = Encoder.from_folder(tmp_path / "saved")
    assert found.encoder == wanted.encoder
    text = "Not all the heroes, and  others\n\nwear capes. 日本"
    assert found.encode(text) == wanted.encode(text) == tokenizer.encode(text)


def test_a_tokenizer_json_of_another_kind(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(PicogptError) as error:
        Encoder.from_folder(tmp_path)
    message = "model.type is 'WordPiece'; GPT-2's is 'BPE'"
    assert str(error.value) == f"{tmp_path}/tokenizer.json: {message}"


def test_attentions_and_hidden_states_equal_transformers(torch, make_model):
    encoder, hparams, params = load("tales")
    model = make_model(**hparams, params=params)
    model.set_attn_implementation("eager")
    ids = encoder.encode("There was once upon a time a miller who was poor, but he had a daughter")
    options = {"output_attentions": True, "output_hidden_states": True}
    with torch.inference_mode():
        wanted = model(torch.tensor([ids]), **options)
    traced = trace(ids, params, hparams["n_head"])
    streams = ["embed", *(f"h{i}.out" for i in range(hparams["n_layer"] - 1)), "ln_f"]
    pairs = list(zip(streams, wanted.hidden_states, strict=True))
    weights = [f"h{i}.attn.weights" for i in range(hparams["n_layer"])]
    pairs += zip(weights, wanted.attentions, strict=True)
    assert len(pairs) == 13
    for name, tensor in pairs:
        array = tensor[0].numpy()
        assert np.abs(traced[name] - array).max() <= 1e-4 + 2e-6 * np.abs(array).max()


def test_the_loss_equals_transformers(torch, make_model):
    _, hparams, params = load("tales")
    model = make_model(**hparams, params=params)
    ids = np.random.default_rng(0).integers(4096, size=200)
    with torch.inference_mode():
        wanted = float(model(torch.tensor(ids)[None], labels=torch.tensor(ids)[None]).loss)
    found = -token_logprobs(ids, params, hparams["n_head"])[1:].mean()
    assert found == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("stride", [64, 100, 255])
def test_strided_perplexity_equals_that_of_transformers_guide(torch, make_model, stride):
    """Windows whose repeated part has the label -100, as in "Perplexity of fixed-length models"."""
    encoder, hparams, params = load("tales")
    model = make_model(**hparams, params=params)
    new = generate([encoder.end_of_text], params, 8, 700, seed=1, overflow="slide")
    text = encoder.decode(new)
    ids = torch.tensor([[encoder.end_of_text, *encoder.encode(text)]])
    total, n_scored, end_before = 0.0, 0, 0
    for start in range(0, ids.shape[1], stride):
        end = min(start + 256, ids.shape[1])
        labels = ids[:, start:end].clone()
        labels[:, : end_before - start] = -100
        n = int((labels[:, 1:] != -100).sum())
        with torch.inference_mode():
            total += float(model(ids[:, start:end], labels=labels).loss) * n
        n_scored += n
        end_before = end
        if end == ids.shape[1]:
            break
    found = score(text, encoder, params, hparams["n_head"], stride=stride)
    assert found.n_tokens == n_scored == ids.shape[1] - 1
    assert found.nll == pytest.approx(total, rel=1e-5)


PROJ = {"target_modules": ["c_attn", "c_proj"]}
ADAPTERS = {
    "default": {},
    "every matrix": {"target_modules": "all-linear"},
    "both c_proj": {"target_modules": ["c_proj"]},
    "the MLP's c_proj": {"target_modules": ["mlp.c_proj"]},
    "full paths": {"target_modules": ["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc"]},
    "partial paths": {"target_modules": ["1.attn.c_proj", "h.0.mlp.c_fc"]},
    "regular expression": {"target_modules": r".*h\.\d\.(attn\.c_attn|mlp\..*)(?<!act|out)"},
    "exclude": PROJ | {"exclude_modules": ["attn.c_proj"]},
    "exclude by expression": PROJ | {"exclude_modules": r".*\.0\..*"},
    "not fan in, fan out": {"fan_in_fan_out": False},
    "fan in, fan out": {"fan_in_fan_out": True},
    "rank-stabilized": {"use_rslora": True, "r": 5},
    "rank_pattern": PROJ | {"rank_pattern": {"mlp.c_proj": 4, "^transformer.h.0.attn.c_attn": 1}},
    "rank_pattern, expression": PROJ | {"rank_pattern": {r"h\.[12].*": 1}, "use_rslora": True},
    "alpha_pattern": PROJ | {"alpha_pattern": {"h.0.attn.c_proj": 1, "c_proj": 9}},
    "alpha and rank": PROJ | {"alpha_pattern": {"attn.*": 7}, "rank_pattern": {"c_attn|c_fc": 3}},
    "one layer": {"layers_to_transform": 1},
    "some layers": PROJ | {"layers_to_transform": [0, 5], "layers_pattern": "h"},
    "patterns of layers": PROJ | {"layers_to_transform": [1], "layers_pattern": ["layer", "h"]},
    "full paths go before layers": {
        "target_modules": ["transformer.h.1.attn.c_attn", "c_fc"],
        "layers_to_transform": [0],
    },
    "embedding": {"modules_to_save": ["wte"]},
    "embeddings": {"modules_to_save": ["wte", "wpe"]},
    "head": {"modules_to_save": ["lm_head"]},
    "embedding and head": {"modules_to_save": ["wte", "lm_head"]},
    "tied": {"modules_to_save": ["wte", "lm_head"], "ensure_weight_tying": True},
    "norms": {"modules_to_save": ["ln_1", "ln_f"]},
    "whole MLPs": PROJ | {"modules_to_save": ["mlp"]},
    "whole matrices": {"target_modules": ["c_fc"], "modules_to_save": ["attn.c_attn"]},
    "orthogonal": {"init_lora_weights": "orthogonal", "r": 2},
    "task": {"task_type": "CAUSAL_LM", "lora_dropout": 0.1},
}


@pytest.fixture
def adapt(torch):
    """A function that writes an adapter with PEFT -> the model that PEFT makes of it and a base."""
    peft = pytest.importorskip("peft")

    def write(make_base, folder, options, dtype=None):
        torch.manual_seed(0)
        config = {"r": 3, "lora_alpha": 5, "init_lora_weights": False} | options
        model = peft.get_peft_model(make_base(), peft.LoraConfig(**config))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.1 * torch.randn_like(parameter)
        model.to(dtype).save_pretrained(folder)
        return peft.PeftModel.from_pretrained(make_base(), folder).merge_and_unload().eval()

    return write


@pytest.mark.parametrize("base", ["transformers", "untied"])
@pytest.mark.parametrize("options", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_equal_pefts_merged(torch, adapt, model_folder, tmp_path, expected, options, base):
    transformers = pytest.importorskip("transformers")
    base = model_folder(base)
    make_base = functools.partial(transformers.GPT2LMHeadModel.from_pretrained, base)
    if options.get("ensure_weight_tying") and base.name == "untied":
        options = options | {"ensure_weight_tying": False}
    model = adapt(make_base, tmp_path / "adapter", options)
    _, hparams, params = load(base, adapter=tmp_path / "adapter")
    found = gpt2(expected["ids"], **params, n_head=hparams["n_head"])
    with torch.inference_mode():
        wanted = model(torch.tensor(expected["ids"])[None]).logits[0].numpy()
    assert np.abs(found - wanted).max() <= 1e-4 + 2e-6 * np.abs(wanted).max()
    plain = gpt2(expected["ids"], **load(base).params, n_head=hparams["n_head"])
    assert np.abs(found - plain).max() > 0.1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_adapters_in_half_precision_equal_pefts(
    torch, adapt, model_folder, tmp_path, expected, dtype
):
    transformers = pytest.importorskip("transformers")
    base = model_folder("transformers")
    make_base = functools.partial(transformers.GPT2LMHeadModel.from_pretrained, base)
    model = adapt(make_base, tmp_path / "adapter", PROJ, getattr(torch, dtype))
    _, hparams, params = load(base, adapter=tmp_path / "adapter")
    found = gpt2(expected["ids"], **params, n_head=hparams["n_head"])
    with torch.inference_mode():
        wanted = model(torch.tensor(expected["ids"])[None]).logits[0].numpy()
    assert np.abs(found - wanted).max() <= 1e-4 + 2e-6 * np.abs(wanted).max()


def test_an_adapter_of_the_body_equals_pefts(torch, adapt, model_folder, tmp_path, expected):
    transformers = pytest.importorskip("transformers")
    base = model_folder("transformers")
    make_base = functools.partial(transformers.GPT2Model.from_pretrained, base)
    options = {"target_modules": ["c_attn", "h.0.mlp.c_proj"], "modules_to_save": ["lm_head"]}
    model = adapt(make_base, tmp_path / "adapter", options)
    _, hparams, params = load(base, adapter=tmp_path / "adapter")
    found = gpt2(expected["ids"], **params, n_head=hparams["n_head"])
    with torch.inference_mode():
        hidden = model(torch.tensor(expected["ids"])[None]).last_hidden_state[0].numpy()
    wanted = hidden @ params["wte"].T
    assert np.abs(found - wanted).max() <= 1e-4 + 2e-6 * np.abs(wanted).max()


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"init_lora_weights": "pissa"},
        {"target_modules": ["c_attn", "wte"]},
        {"target_modules": ["c_attn", "lm_head"]},
        {"target_modules": [], "target_parameters": ["attn.c_attn.weight"]},
        {"trainable_token_indices": [1, 2]},
    ],
    ids=str,
)
def test_adapters_of_other_kinds_are_refused(torch, adapt, model_folder, tmp_path, options):
    transformers = pytest.importorskip("transformers")
    base = model_folder("transformers")
    make_base = functools.partial(transformers.GPT2LMHeadModel.from_pretrained, base)
    adapt(make_base, tmp_path / "adapter", options)
    names = "|".join({"target_modules" if value else "" for value in options.values()} | {*options})
    with pytest.raises(PicogptError, match=f"adapter_config.json: ({names}) "):
        load(base, adapter=tmp_path / "adapter")


@pytest.mark.parametrize("kind", ["IA3Config", "AdaLoraConfig", "VeraConfig"])
def test_adapters_that_are_not_lora_are_refused(torch, model_folder, tmp_path, kind):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = model_folder("transformers")
    settings = {"target_modules": ["c_attn"]}
    settings |= {"feedforward_modules": []} if kind == "IA3Config" else {}
    settings |= {"total_step": 10} if kind == "AdaLoraConfig" else {}
    model = transformers.GPT2LMHeadModel.from_pretrained(base)
    peft.get_peft_model(model, getattr(peft, kind)(**settings)).save_pretrained(tmp_path)
    with pytest.raises(PicogptError, match=r"adapter_config\.json: peft_type is "):
        load(base, adapter=tmp_path)


def test_what_the_example_of_lora_writes_peft_loads(torch, tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("optax")
    text = EXAMPLES.parent / "README.md"
    command = [sys.executable, EXAMPLES / "lora_jax.py", text, "-o", tmp_path / "lora", "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "trains 98,304 parameters of 5,951,488, 1.7%" in done.stdout
    assert re.search(r"3 steps; held-out loss \d\.\d{4} -> \d\.\d{4} nats", done.stdout)
    encoder, hparams, base = load("tales")
    save(tmp_path / "tales", encoder, hparams, base)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "tales")
    model = peft.PeftModel.from_pretrained(model, tmp_path / "lora").merge_and_unload().eval()
    params = load("tales", adapter=tmp_path / "lora").params
    ids = encoder.encode("Once upon a time there was a king")
    check_against(torch, model, params, hparams["n_head"], ids, 8)
    assert np.abs(gpt2(ids, **params, n_head=8) - gpt2(ids, **base, n_head=8)).max() > 1e-3
