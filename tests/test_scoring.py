"""Log-probabilities of texts of any length, and the figures made of them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picogpt import Encoder, PicogptError, gpt2, load, score, scoring, token_logprobs
from picogpt.scoring import Score, _windows, score_ids, score_texts


@pytest.fixture
def model(model_folder):
    return load(model_folder())


@pytest.fixture
def params(model):
    return model.params


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def naive(ids, params, stride, n_ctx=32):
    """Window by window, as the issue of perplexity is explained everywhere."""
    found, end_before = np.full(len(ids), np.nan), 1
    for start in range(0, len(ids), stride):
        end = min(start + n_ctx, len(ids))
        logs = log_softmax(gpt2(ids[start:end], **params, n_head=4))
        for i in range(end_before, end):
            found[i] = logs[i - 1 - start, ids[i]]
        end_before = max(end, 1)
        if end == len(ids):
            break
    return found


def random_ids(n, seed=0):
    return np.random.default_rng(seed).integers(300, size=n)


def test_a_short_text_is_scored_in_one_pass(params, expected):
    found = token_logprobs(expected["ids"], params, 4)
    assert found.dtype == np.float64
    assert math.isnan(found[0])
    wanted = log_softmax(expected["logits"])[np.arange(23), expected["ids"][1:]]
    assert np.abs(found[1:] - wanted).max() < 1e-4


@pytest.mark.parametrize("stride", [1, 5, 16, 30, 31, None])
@pytest.mark.parametrize("n", [2, 31, 32, 33, 47, 48, 49, 64, 100])
def test_a_long_text_is_scored_in_windows(params, n, stride):
    ids = random_ids(n)
    found = token_logprobs(ids, params, 4, stride=stride)
    wanted = naive(ids, params, stride or 16)
    assert np.isnan(found[0])
    assert np.abs(found[1:] - wanted[1:]).max() < 1e-4


def test_a_stride_of_1_gives_each_token_all_the_context_that_fits(params):
    ids = random_ids(50)
    found = token_logprobs(ids, params, 4, stride=1)
    for i in range(1, 50):
        context = ids[max(0, i - 31) : i]
        wanted = log_softmax(gpt2(context, **params, n_head=4))[-1, ids[i]]
        assert abs(found[i] - wanted) < 1e-4


@given(st.integers(0, 500), st.integers(2, 40), st.data())
def test_every_token_is_scored_exactly_once(n, n_ctx, data):
    stride = data.draw(st.integers(1, n_ctx - 1))
    n_scored = np.zeros(n, int)
    for i, (start, first, end) in enumerate(_windows(n, n_ctx, stride)):
        assert start == i * stride
        assert start < first < end <= min(start + n_ctx, n)
        assert end == min(start + n_ctx, n)
        n_scored[first:end] += 1
    assert (n_scored[1:] == 1).all()
    assert not n_scored[:1].any()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 70), min_size=1, max_size=9), st.integers(1, 31), st.integers(0, 99))
def test_texts_side_by_side_get_what_they_get_alone(lengths, stride, seed):
    """Padding counts for nothing."""
    params = plain_params()
    texts = [random_ids(n, seed + i) for i, n in enumerate(lengths)]
    found = list(score_ids(texts, params, 4, stride=stride))
    assert len(found) == len(texts)
    for ids, scored in zip(texts, found, strict=True):
        assert scored.logprobs.shape == scored.is_best.shape == ids.shape
        alone = naive(ids, params, stride)
        assert np.nan_to_num(np.abs(scored.logprobs - alone)).max() < 1e-4
        assert np.isnan(scored.logprobs[0])
        assert not np.isnan(scored.logprobs[1:]).any()


def plain_params():
    """The weights of the fixture `params`, in a form that Hypothesis can use again."""
    from conftest import DATA

    from picogpt import layouts

    tensors = dict(np.load(DATA / "expected.npz"))
    hparams = {"n_vocab": 300, "n_ctx": 32, "n_embd": 16, "n_head": 4, "n_layer": 2}
    return layouts.parameter_tree(hparams, lambda name, shape: tensors[name].reshape(shape))


def test_the_likeliest_tokens_are_marked(params):
    ids = [5]
    for _ in range(40):
        ids.append(int(gpt2(ids[-31:], **params, n_head=4)[-1].argmax()))
    (scored,) = score_ids([ids], params, 4, stride=1)
    assert scored.is_best[1:].all()
    ids[20] = (ids[20] + 1) % 300
    (scored,) = score_ids([ids], params, 4, stride=1)
    assert not scored.is_best[20]
    assert scored.is_best[1:20].all()


def test_no_more_logits_are_made_than_are_needed(params, monkeypatch):
    """Not for what a window only repeats, and few at a time."""
    shapes = []

    def watched(*args, **options):
        logits = gpt2(*args, **options)
        shapes.append(logits.shape)
        return logits

    monkeypatch.setattr(scoring, "gpt2", watched)
    monkeypatch.setattr(scoring, "CHUNK", 8)
    monkeypatch.setattr(scoring, "BATCH_TOKENS", 32)
    found = token_logprobs(random_ids(48), params, 4)
    assert shapes == (
        [(1, 8, 300)] * 3 + [(1, 7, 300)] + [(1, 1, 300)] + [(1, 8, 300)] * 2 + [(1, 7, 300)]
    )
    assert np.abs(found[1:] - naive(random_ids(48), params, 16)[1:]).max() < 1e-4


@pytest.mark.parametrize("stride", [0, -1, 32, 100, 1.5, "1", True])
def test_a_stride_out_of_range(params, stride):
    with pytest.raises(PicogptError) as error:
        token_logprobs([1, 2], params, 4, stride=stride)
    assert str(error.value) == f"stride: is {stride!r}; expected 1 to 31"


def test_a_stride_may_be_numpys(params):
    found = token_logprobs([1, 2, 3], params, 4, stride=np.int64(3))
    assert np.allclose(found[1:], token_logprobs([1, 2, 3], params, 4, stride=3)[1:])


@pytest.mark.parametrize("ids", [[1, 300], [-1, 2], np.array([1, 300]), np.array([-1, 3])])
def test_ids_out_of_range(params, ids):
    with pytest.raises(PicogptError, match=r"^ids\[[01]\]: is (300|-1); expected 0 to 299$"):
        token_logprobs(ids, params, 4)


def test_other_ids(params):
    with pytest.raises(PicogptError, match=r"^ids\[0\]: is a float64; expected an integer$"):
        token_logprobs(np.array([0.5, 1.0]), params, 4)
    assert np.isnan(token_logprobs([7], params, 4)).tolist() == [True]
    assert len(token_logprobs([], params, 4)) == 0
    ids = np.array([1, 2, 3], np.uint16)
    assert np.allclose(token_logprobs(ids, params, 4)[1:], token_logprobs([1, 2, 3], params, 4)[1:])
    with pytest.raises(PicogptError, match=r"^n_head: is 3; expected a divisor of n_embd=16$"):
        token_logprobs([1, 2], params, 3)


def test_damaged_weights_give_no_score(params):
    damaged = {**params, "wpe": np.full_like(params["wpe"], np.nan)}
    with pytest.raises(PicogptError, match="nan or infinite; the weights are damaged"):
        token_logprobs([1, 2], damaged, 4)


def test_the_figures_of_a_text(model):
    encoder, _, params = model
    text = "the king of naïve Köln"
    ids = [encoder.end_of_text, *encoder.encode(text)]
    nll = -token_logprobs(ids, params, 4)[1:].sum()
    found = score(text, encoder, params, 4)
    n_bytes = len(text.encode())
    assert found == Score(len(ids) - 1, pytest.approx(nll), 5, n_bytes, True, 32, 16)
    assert found.perplexity == pytest.approx(math.exp(nll / (len(ids) - 1)))
    assert found.word_perplexity == pytest.approx(math.exp(nll / 5))
    assert found.byte_perplexity == pytest.approx(math.exp(nll / n_bytes))
    assert found.bits_per_byte == pytest.approx(nll / math.log(2) / n_bytes)
    assert found.accuracy is None


def test_without_a_start_token_the_first_is_not_scored(model):
    encoder, _, params = model
    found = score("the king", encoder, params, 4, start_token=False, stride=3)
    n = len(encoder.encode("the king"))
    assert (found.n_tokens, found.start_token, found.stride) == (n - 1, False, 3)


@pytest.mark.parametrize(
    ("text", "start_token", "message"),
    [
        ("", True, "text '': is 0 tokens; expected 1 or more"),
        ("", False, "text '': is 0 tokens; expected 2 or more"),
        ("a", False, "text 'a': is 1 tokens; expected 2 or more"),
    ],
)
def test_texts_with_nothing_to_score(model, text, start_token, message):
    encoder, _, params = model
    with pytest.raises(PicogptError) as error:
        score(text, encoder, params, 4, start_token=start_token)
    assert str(error.value) == message


def test_text_without_words_has_no_figure_for_them(model):
    found = score("  \n", *model[::2], 4)
    assert found.n_words == 0
    assert math.isnan(found.word_perplexity)
    assert math.isfinite(found.perplexity)


def test_a_huge_perplexity_is_infinite_without_a_warning():
    assert Score(1, 1e4, 1, 1, True, 32, 16).perplexity == math.inf


def test_a_vocabulary_without_an_end_of_text(model):
    encoder = Encoder(
        {t: i for t, i in model.encoder.encoder.items() if t != "<|endoftext|>"},
        list(model.encoder._ranks),
    )
    with pytest.raises(PicogptError) as error:
        score("the king", encoder, model.params, 4)
    message = "the vocabulary has no <|endoftext|>; score without a start token"
    assert str(error.value) == message
    assert score("the king", encoder, model.params, 4, start_token=False).n_tokens > 1


def test_scores_add_up(model):
    encoder, _, params = model
    texts = ["the king", "and his daughter"]
    a, b = (score(text, encoder, params, 4) for text in texts)
    both = a + b
    assert both.n_tokens == a.n_tokens + b.n_tokens
    assert both.nll == a.nll + b.nll
    assert (both.n_words, both.n_bytes, both.n_texts) == (5, 24, 2)
    assert (both.start_token, both.window, both.stride) == (True, 32, 16)


@pytest.mark.parametrize("n_wrong", [0, 1, 2])
def test_the_last_word_is_right_only_if_all_its_tokens_are_the_likeliest(
    model, monkeypatch, n_wrong
):
    encoder, _, params = model
    word = encoder.encode(" Zoë")
    ids = [encoder.end_of_text, *encoder.encode("the king"), *word]
    assert len(word) > 2

    def scored(texts, *_, **__):
        (found,) = texts
        assert found.tolist() == ids
        is_best = np.zeros(len(ids), bool)  # of what comes before, nothing counts
        is_best[len(ids) - len(word) + n_wrong :] = True
        return iter([scoring.Scored(np.arange(len(ids), dtype=float), is_best)])

    monkeypatch.setattr(scoring, "score_ids", scored)
    ((found, _, _),) = score_texts(["the king Zoë \n"], encoder, params, 4, only_last_word=True)
    assert found.n_right == (n_wrong == 0)
    assert found.accuracy == float(n_wrong == 0)
    assert found.nll == -sum(range(len(ids) - len(word), len(ids)))
    assert (found.n_tokens, found.n_words, found.n_bytes) == (len(word), 1, 5)


def test_the_last_word_of_a_long_text_sees_what_fits(model):
    encoder, _, params = model
    text = "x" * 100 + " king"
    (result,) = score_texts([text], encoder, params, 4, only_last_word=True)
    _, ids, _ = result
    n = len(encoder.encode(" king"))
    assert len(ids) == 32
    assert ids[-n:].tolist() == encoder.encode(" king")
    assert set(ids[:-n]) == {encoder.encoder["x"]}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("one two", " two"),
        ("one\ntwo\n", "\ntwo"),
        ("one\ttwo \n", "\ttwo"),
        ("one  two", " two"),
        ("one\u00a0two", "\u00a0two"),
        ("a, b c\nd e-f.", " e-f."),
        ("two", "two"),
    ],
)
def test_a_last_word_is_what_follows_the_last_white_space(model, text, word):
    encoder, _, params = model
    ((found, ids, _),) = score_texts([text], encoder, params, 4, only_last_word=True)
    target = encoder.encode(word)
    assert found.n_tokens == len(target)
    assert found.n_words == 1
    assert found.n_bytes == len(word.encode())
    context = encoder.encode(text.rstrip().removesuffix(word))
    assert ids.tolist() == [encoder.end_of_text, *context, *target][-32:]


def test_a_last_word_longer_than_the_window(model):
    encoder, _, params = model
    with pytest.raises(PicogptError) as error:
        list(score_texts(["a " + "x" * 40], encoder, params, 4, only_last_word=True, names=["f:1"]))
    word = repr(" " + "x" * 40)[:40]
    assert str(error.value) == f"f:1: last word {word}: is 41 tokens; expected 1 to 31"


def test_halves_of_characters_count_as_what_is_encoded(model):
    encoder, _, params = model
    whole = score("a😀b", encoder, params, 4)
    assert score("a\ud83d\ude00b", encoder, params, 4) == whole
    assert whole.n_bytes == 6
    assert score("a\ud800b", encoder, params, 4) == score("a\ufffdb", encoder, params, 4)
    found, wanted = (
        next(score_texts([text], encoder, params, 4, only_last_word=True))[0]
        for text in ("the \ud800", "the \ufffd")
    )
    assert found == wanted


@pytest.mark.parametrize("text", ["", "   \n"])
def test_no_last_word(model, text):
    encoder, _, params = model
    with pytest.raises(PicogptError, match=r"^last word '': is 0 tokens; expected 1 or more$"):
        list(score_texts([text], encoder, params, 4, only_last_word=True))
    (found,) = score_texts(["the"], encoder, params, 4, only_last_word=True)
    assert found[0].n_tokens == len(encoder.encode("the"))
