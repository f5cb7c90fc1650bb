"""Token ids, exactly. The values are those on which tiktoken and OpenAI's encoder agree."""

import json
from itertools import product

import numpy as np
import pytest
from conftest import DATA
from hypothesis import given
from hypothesis import strategies as st

from picogpt import Encoder, PicogptError, encoder
from picogpt.encoder import BYTE_TO_CHARACTER, check_ids

GPT2 = Encoder.gpt2()

EXACT = {
    "": [],
    " ": [220],
    "   a": [220, 220, 257],
    "a  ": [64, 220, 220],
    "hello world": [31373, 995],
    "Not all heroes wear capes.": [3673, 477, 10281, 5806, 1451, 274, 13],
    "Hello, my dog is a little": [15496, 11, 616, 3290, 318, 257, 1310],
    "I'LL I'll": [40, 6, 3069, 314, 1183],
    "DON'T don't I'LL I'll we'Re": [
        *[41173, 6, 51, 836, 470, 314, 6, 3069, 314, 1183, 356, 6, 3041],
    ],
    "'Te": [6, 6767],
    "’ll": [447, 247, 297],
    "'s 's's ''s": [338, 705, 82, 338, 10148, 82],
    "“wrote jack a letter”": [447, 250, 42910, 14509, 257, 3850, 447, 251],
    "ß'll": [39683, 1183],
    "ét": [25125],
    "x² ½ ٣٤ Ⅷ": [87, 31185, 25208, 18923, 96, 149, 97, 2343, 227, 100],
    "हिन्दी": [11976, 117, 11976, 123, 11976, 101, 24231, 235, 11976, 99, 24231, 222],
    "👩‍👩‍👧 🤗": [41840, 102, 447, 235, 41840, 102, 447, 235, 41840, 100, 12520, 97, 245],
    "This is good.\n\n": [1212, 318, 922, 13, 628],
    "This is good.\n\nBut in a way.": [1212, 318, 922, 13, 198, 198, 1537, 287, 257, 835, 13],
    "import tensorflow as ": [11748, 11192, 273, 11125, 355, 220],
    "\r\n\t\r\n  x": [201, 198, 197, 201, 198, 220, 2124],
    "<|endoftext|>": [27, 91, 437, 1659, 5239, 91, 29],
    "a<|endoftext|>b": [64, 27, 91, 437, 1659, 5239, 91, 29, 65],
    "brutalist": [1671, 315, 49845],
    "She danced gracefully on the stage.": [3347, 39480, 11542, 2759, 319, 262, 3800, 13],
    "I l0ve t0 tr@vel @r0und the w0rld.": [
        *[40, 300, 15, 303, 256, 15, 491, 31, 626, 2488, 81, 15, 917, 262, 266, 15, 81, 335, 13],
    ],
    "a\n\nb": [64, 198, 198, 65],
    "0" * 17: [8269, 10535, 830],
    "0" * 16: [25645],
    "0" * 9: [10535, 830],
}


@pytest.mark.parametrize("text", EXACT, ids=ascii)
def test_exact_ids(text):
    assert GPT2.encode(text) == EXACT[text]
    assert GPT2.decode(EXACT[text]) == text


def test_vocabulary():
    assert GPT2.n_vocab == len(GPT2.encoder) == len(GPT2.decoder) == 50257
    assert GPT2.end_of_text == 50256
    pieces = [GPT2.decoder[i] for i in EXACT["Not all heroes wear capes."]]
    assert pieces == ["Not", "Ġall", "Ġheroes", "Ġwear", "Ġcap", "es", "."]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("a<|endoftext|>b", [64, 50256, 65]),
        ("hello <|endoftext|>", [31373, 220, 50256]),
        ("<|endoftext|><|endoftext|>", [50256, 50256]),
        ("<|endoftext|", [27, 91, 437, 1659, 5239, 91]),
    ],
)
def test_end_of_text_is_special_on_request(text, ids):
    assert GPT2.encode(text, allow_special=True) == ids
    assert GPT2.decode(ids) == text


def test_lone_surrogates_become_u_fffd_and_pairs_are_joined():
    assert GPT2.encode("\ud83e\udd17") == GPT2.encode("🤗")
    assert GPT2.encode("a\ud83eb\udd17") == GPT2.encode("a\ufffdb\ufffd")


def test_a_word_of_100_000_letters():
    assert GPT2.encode("a" * 100_000) == [24794] * 25_000
    assert GPT2.encode(" " * 100_000 + "x") == [220] * 99_999 + [2124]


@pytest.mark.parametrize("alphabet", ["abcdefghijklmnopqrstuvwxyz", "0123456789", "\u0301\u0308"])
def test_the_work_for_a_long_word_grows_with_its_length(alphabet, monkeypatch):
    """Counts look-ups of pairs; a loop over all pairs for each merge needs millions here."""
    rng = np.random.default_rng(0)
    word = "".join(rng.choice(list(alphabet), 10_000))
    n_bytes = len(word.encode())

    class Counting(dict):
        n = 0

        def get(self, *args):
            Counting.n += 1
            return super().get(*args)

        def __contains__(self, key):
            Counting.n += 1
            return super().__contains__(key)

    monkeypatch.setattr(GPT2, "_ranks", Counting(GPT2._ranks))
    assert GPT2.decode(GPT2.encode(word)) == word
    assert n_bytes - 1 <= Counting.n < 6 * n_bytes


@given(st.text() | st.text(st.sampled_from("theandingero "), min_size=20, max_size=200))
def test_both_ways_of_joining_give_the_same(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "LONG", 0)
        as_long = [GPT2._join(piece) for piece in GPT2._pieces(text)]
        patch.setattr(encoder, "LONG", 1 << 20)
        as_short = [GPT2._join(piece) for piece in GPT2._pieces(text)]
    assert as_long == as_short


def test_both_patterns_cut_ascii_alike():
    for a, b in product(map(chr, range(128)), repeat=2):
        for text in (f"{a}{b}x", f"x{a}{b}", f" {a} {b}", f"1{a}'s{b}", f"\n{a}{b}\n"):
            assert GPT2._find_ascii(text) == GPT2._find_all(text), text


@given(st.text())
def test_decode_is_the_inverse(text):
    assert GPT2.decode(GPT2.encode(text)) == text
    assert GPT2.decode(GPT2.encode(text, allow_special=True)) == text


@given(st.lists(st.integers(0, 50256)))
def test_every_list_of_ids_decodes(ids):
    assert GPT2.decode_bytes(ids) == b"".join(GPT2.decode_bytes([token]) for token in ids)


def test_decode():
    assert GPT2.decode([88, 318, 5633]) == "y is ?"
    assert GPT2.decode([5633]) == " ?"
    assert GPT2.decode([]) == ""
    assert GPT2.decode(np.array([31373, 995])) == "hello world"
    assert GPT2.decode([447]) == "\ufffd"


def test_every_byte_has_a_token():
    ids = [GPT2.encoder[BYTE_TO_CHARACTER[byte]] for byte in range(256)]
    assert GPT2.decode_bytes(ids) == bytes(range(256))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, -1], "ids[1]: is -1; expected 0 to 50256"),
        ([50257], "ids[0]: is 50257; expected 0 to 50256"),
        ([1, 2.0], "ids[1]: is a float; expected an integer"),
        ([[1, 2]], "ids[0]: is a list; expected an integer"),
        (["1"], "ids[0]: is a str; expected an integer"),
        (np.array([1.0]), "ids[0]: is a float64; expected an integer"),
        (np.array([[1, 2]]), "ids[0]: is a ndarray; expected an integer"),
    ],
)
def test_ids_are_checked(ids, message):
    with pytest.raises(PicogptError) as error:
        GPT2.decode(ids)
    assert str(error.value) == message


def test_numpy_integers_are_ids():
    for dtype in (np.uint8, np.int32, np.int64):
        ids = check_ids(np.array([1, 2], dtype), 3)
        assert ids == [1, 2]
        assert all(type(token) is int for token in ids)


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")])
def test_from_folder_takes_both_pairs_of_names(model_folder, names):
    folder = model_folder()
    (folder / "encoder.json").rename(folder / names[0])
    (folder / "vocab.bpe").rename(folder / names[1])
    found = Encoder.from_folder(str(folder))
    assert found.n_vocab == 300
    assert found.end_of_text == 299
    assert found.decode(found.encode("the thing")) == "the thing"


def test_files_may_have_windows_line_ends_and_no_version(model_folder):
    folder = model_folder()
    wanted = Encoder.from_folder(folder).encode("all the things and others")
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    (folder / "vocab.bpe").write_bytes("\r\n".join(lines).encode())
    assert Encoder.from_folder(folder).encode("all the things and others") == wanted


def damage(folder, **changes):
    path = folder / "encoder.json"
    tokens = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(tokens | changes), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: damage(f, new=301), "no token has the id 300; expected 0 to 300, once each"),
        (lambda f: damage(f, new="x"), "an id is no integer; expected 0, 1, 2 and so on"),
        (lambda f: damage(f, **{"a b": 300}), "a token holds ' '; expected what stands for bytes"),
        (
            lambda f: (f / "vocab.bpe").write_text("#version: 0.2\nh e\nthx\n", encoding="utf-8"),
            "merge 2 is 'thx'; expected two tokens that join to a third",
        ),
        (
            lambda f: (f / "vocab.bpe").write_text("q z\n", encoding="utf-8"),
            "merge 1 is 'q z'; expected two tokens that join to a third",
        ),
        (
            lambda f: (f / "vocab.bpe").write_text("h e\nh e\n", encoding="utf-8"),
            "a merge comes twice; expected each once",
        ),
        (
            lambda f: (f / "encoder.json").write_text('{"a": 0, "b": 1}', encoding="utf-8"),
            "no token for the byte 0x21; expected '!'",
        ),
    ],
)
def test_files_that_do_not_fit_are_one_line(model_folder, spoil, message):
    folder = model_folder()
    spoil(folder)
    with pytest.raises(PicogptError) as error:
        Encoder.from_folder(folder)
    files = f"{folder}/encoder.json and vocab.bpe"
    assert str(error.value) == f"{files}: {message}; fetch again"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PicogptError) as error:
        Encoder.from_folder(tmp_path)
    lacks = (
        "encoder.json or tokenizer.json or vocab.json, vocab.bpe or tokenizer.json or merges.txt"
    )
    assert str(error.value) == f"{tmp_path}: lacks {lacks}"


def test_encode_batch():
    texts = ["hello world", "", "a<|endoftext|>"]
    assert GPT2.encode_batch(texts) == [GPT2.encode(text) for text in texts]
    assert GPT2.encode_batch(texts, allow_special=True)[2] == [64, 50256]
    assert GPT2.encode_batch([]) == []


def test_token_bytes():
    assert GPT2.token_bytes(995) == b" world"
    assert GPT2.token_bytes(447) == b"\xe2\x80"
    assert GPT2.token_bytes(np.int64(50256)) == b"<|endoftext|>"
    assert b"".join(map(GPT2.token_bytes, GPT2.encode("naïve 日本"))) == "naïve 日本".encode()
    with pytest.raises(PicogptError, match=r"^ids\[0\]: is -1; expected 0 to 50256$"):
        GPT2.token_bytes(-1)


@pytest.mark.parametrize(
    ("ids", "text", "starts"),
    [
        ([], "", []),
        ([31373, 995], "hello world", [0, 5]),
        ([39, 2634, 75, 33768, 98, 64], "Hél日a", [0, 1, 2, 3, 3, 4]),
        ([447], "\ufffd", [0]),
        ([447, 64], "\ufffda", [0, 1]),
        ([447, 447, 251], "\ufffd”", [0, 1, 1]),
        ([98, 98], "\ufffd\ufffd", [0, 1]),
    ],
)
def test_decode_with_offsets(ids, text, starts):
    assert GPT2.decode_with_offsets(ids) == (text, starts)


@given(st.lists(st.integers(0, 50256)))
def test_offsets_of_any_ids(ids):
    text, starts = GPT2.decode_with_offsets(ids)
    assert text == GPT2.decode(ids)
    assert starts == sorted(starts)
    assert all(0 <= start < len(text) for start in starts)


@given(st.text())
def test_offsets_of_text_are_where_its_tokens_begin(text):
    found, starts = GPT2.decode_with_offsets(ids := GPT2.encode(text))
    assert found == text
    ends = [len(GPT2.decode_bytes(ids[:i])) for i in range(len(ids))]
    assert starts == [len(text.encode()[:end].decode("utf-8", "ignore")) for end in ends]


@given(
    st.text(st.sampled_from(" \t\n\r\x1c\x1f\x85\u2028aé1½'s日🤗!"), max_size=60), st.integers(1, 9)
)
def test_cutting_a_long_text_into_parts_changes_no_id(text, part):
    with pytest.MonkeyPatch.context() as patch:
        whole = GPT2.encode(text)
        patch.setattr(encoder, "PART", part)
        assert "".join(GPT2._parts(text)) == text
        assert GPT2.encode(text) == whole


def test_a_long_text_is_cut_into_parts():
    parts = list(GPT2._parts("a word and more " * 20_000))
    assert len(parts) == 5
    assert max(map(len, parts)) < encoder.PART + 16


@pytest.mark.parametrize("separator", "\x1c\x1d\x1e\x1f")
def test_separators_are_no_white_space_for_gpt2(separator):
    """Python says they are. If they were, the line ends would be one piece, and token 628."""
    token = GPT2.encode(separator)
    assert GPT2.encode(f"\n\n{separator}") == [198, 198, *token]
    assert GPT2.encode("\n\n\x85") == [628, *GPT2.encode("\x85")]


def test_the_ids_of_pieces_are_remembered_within_bounds(monkeypatch):
    monkeypatch.setattr(encoder, "MAX_CACHED", 10)
    monkeypatch.setattr(encoder, "MAX_CACHED_LENGTH", 8)
    remembered = encoder._Ids(GPT2._join)
    monkeypatch.setattr(GPT2, "_ids", remembered)
    for i in range(100):
        assert GPT2.decode(GPT2.encode(f" word{i}")) == f" word{i}"
        assert len(remembered) <= 10
    GPT2.encode(" extraordinarily")
    assert " extraordinarily" not in remembered
    GPT2.encode(" word")
    monkeypatch.setattr(GPT2, "_join", None)
    remembered.encode = None
    assert GPT2.encode(" word") == [1573]


def write_tokenizer(folder, **changes):
    """Writes a tokenizer.json as Hugging Face's library does, in place of the two files."""
    vocabulary = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    merges = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    for name in ("encoder.json", "vocab.bpe"):
        (folder / name).unlink()
    end = vocabulary.pop("<|endoftext|>")
    settings = {
        "version": "1.0",
        "added_tokens": [{"id": end, "content": "<|endoftext|>", "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "vocab": vocabulary, "merges": merges},
    }
    for path, value in changes.items():
        *parents, name = path.split("__")
        node = settings
        for parent in parents:
            node = node[parent]
        node[name] = value
    (folder / "tokenizer.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.mark.parametrize("as_lists", [False, True])
def test_a_tokenizer_json_alone_will_do(model_folder, as_lists):
    folder = model_folder()
    wanted = Encoder.from_folder(folder)
    lines = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]
    write_tokenizer(folder, **({"model__merges": [p.split() for p in lines]} if as_lists else {}))
    found = Encoder.from_folder(folder)
    assert found.encoder == wanted.encoder
    assert found.end_of_text == 299
    text = "all the things and others"
    assert found.encode(text) == wanted.encode(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__type": "Unigram"}, "model.type is 'Unigram'; GPT-2's is 'BPE'"),
        ({"pre_tokenizer__type": "Split"}, "pre_tokenizer.type is 'Split'; GPT-2's is 'ByteLevel'"),
        ({"pre_tokenizer": None}, "pre_tokenizer.type is None; GPT-2's is 'ByteLevel'"),
        (
            {"pre_tokenizer__add_prefix_space": True},
            "pre_tokenizer.add_prefix_space is True; GPT-2's is False",
        ),
        ({"normalizer": {"type": "NFC"}}, "normalizer is {'type': 'NFC'}; GPT-2's is None"),
        ({"model__byte_fallback": True}, "model.byte_fallback is True; GPT-2's is False"),
        ({"model__ignore_merges": True}, "model.ignore_merges is True; GPT-2's is False"),
        ({"model": []}, "is no tokenizer of Hugging Face's format (AttributeError: 'list' object "
                        "has no attribute 'get')"),
        ({"model__vocab": 5}, "is no tokenizer of Hugging Face's format (TypeError: 'int' object "
                              "is not iterable)"),
        ({"model__merges": [["a", 1]]}, "is no tokenizer of Hugging Face's format (TypeError: "
                                        "sequence item 1: expected str instance, int found)"),
        ({"model__merges": ["q z"]}, "merge 1 is 'q z'; expected two tokens that join to a third; "
                                     "fetch again"),
    ],
)  # fmt: skip
def test_a_tokenizer_json_of_another_kind_is_refused(model_folder, changes, message):
    folder = model_folder()
    write_tokenizer(folder, **changes)
    with pytest.raises(PicogptError) as error:
        Encoder.from_folder(folder)
    assert str(error.value) == f"{folder}/tokenizer.json: {message}"


@pytest.mark.parametrize("n_lines", [0, 1, 20, 43])
def test_merges_that_are_cut_short_are_refused(model_folder, n_lines):
    """Else every text would encode, to other ids."""
    folder = model_folder()
    path = folder / "vocab.bpe"
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 44
    path.write_text("\n".join(lines[:n_lines]), encoding="utf-8")
    with pytest.raises(PicogptError) as error:
        Encoder.from_folder(folder)
    start = f"{folder}/encoder.json and vocab.bpe: no merge makes '"
    assert str(error.value).startswith(start)
    assert str(error.value).endswith(
        f"'; expected one among the {max(n_lines - 1, 0)}; fetch again"
    )


def test_special_tokens_need_no_merge(model_folder):
    folder = model_folder()
    damage(folder, **{"<pad>": 300})
    assert Encoder.from_folder(folder).n_vocab == 301


@pytest.fixture
def vocabulary(tmp_path):
    """A function that writes a folder with a vocabulary, changed, and returns it."""

    def write(tokens=(), added=None, settings=None):
        folder = tmp_path / "model"
        folder.mkdir()
        encoder = json.loads((DATA / "vocabulary" / "encoder.json").read_text(encoding="utf-8"))
        encoder |= {token: 300 + i for i, token in enumerate(tokens)}
        (folder / "vocab.json").write_text(json.dumps(encoder), encoding="utf-8")
        merges = (DATA / "vocabulary" / "vocab.bpe").read_bytes()
        (folder / "merges.txt").write_bytes(merges)
        if added is not None:
            (folder / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
        if settings is not None:
            text = json.dumps(settings)
            (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        return folder

    return write


def test_special_tokens_of_any_form_need_no_merge(vocabulary):
    encoder = Encoder.from_folder(vocabulary(["[PAD]", "<s>", "<|user|>", ""]))
    assert encoder.decode([300, 301, 302, 303]) == "[PAD]<s><|user|>"


def test_added_tokens_are_read_as_text(vocabulary):
    encoder = Encoder.from_folder(vocabulary(added={"[a b]": 300, "日": 301, "the": 302}))
    assert encoder.n_vocab == 303
    assert encoder.decode([300, 301, 302]) == "[a b]日the"


def test_added_tokens_are_special_on_request(vocabulary):
    encoder = Encoder.from_folder(vocabulary(added={"[PAD]": 300, "[PAD]s": 301, "日 ": 302}))
    end = encoder.end_of_text
    text = "a[PAD]b[PAD]s<|endoftext|>日 日"
    assert encoder.encode(text, allow_special=True) == [
        *encoder.encode("a"), 300, *encoder.encode("b"), 301, end, 302, *encoder.encode("日")
    ]  # fmt: skip
    assert encoder.decode(encoder.encode(text, allow_special=True)) == text
    assert encoder.decode(encoder.encode(text)) == text
    assert not {300, 301, 302, end} & set(encoder.encode(text))


def test_an_added_token_of_two_ids(vocabulary):
    folder = vocabulary(added={" t": 300})
    with pytest.raises(PicogptError) as error:
        Encoder.from_folder(folder)
    message = "' t' has the ids 256 and 300"
    assert str(error.value) == f"{folder}/added_tokens.json: {message}"


def test_a_blank_put_in_front_is_refused(vocabulary):
    folder = vocabulary(settings={"add_prefix_space": True})
    with pytest.raises(PicogptError, match="add_prefix_space is true; GPT-2's is false"):
        Encoder.from_folder(folder)
    (folder / "tokenizer_config.json").write_text('{"add_prefix_space": false}', encoding="utf-8")
    assert Encoder.from_folder(folder).n_vocab == 300


def test_tokens_that_are_no_strings():
    encoder = dict(Encoder.from_folder(DATA / "vocabulary").encoder)
    with pytest.raises(PicogptError, match=r"^a token is no string$"):
        Encoder(encoder | {None: 300}, [])


def test_a_tokenizer_json_comes_before_the_two_files(vocabulary):
    """As in transformers: it may hold tokens that were added later."""
    folder = vocabulary()
    old = Encoder.from_folder(folder)
    tokenizer = {
        "model": {"type": "BPE", "vocab": old.encoder, "merges": list(old._ranks)},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
        "added_tokens": [{"id": 300, "content": "<new>"}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert Encoder.from_folder(folder).n_vocab == 301
