"""Guesses checked several at once: the same ids, in fewer passes, and never at much of a loss."""

from itertools import pairwise

import numpy as np
import pytest

from picogpt import PicogptError, generate, generate_batch, generation, gpt2, load, new_cache
from picogpt.cli import main
from picogpt.lookahead import EARNED, FIRST, LENGTHS, Lookahead, cost


@pytest.fixture
def params(model_folder):
    return load(model_folder()).params


@pytest.fixture
def passes(monkeypatch):
    """The number of tokens of each pass of the model."""
    lengths = []

    def watched(ids, **options):
        lengths.append(np.shape(ids)[-1])
        return gpt2(ids, **options)

    monkeypatch.setattr(generation, "gpt2", watched)
    return lengths


@pytest.mark.parametrize(
    ("ids", "wanted"),
    [
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2, 3, 4, 5]),
        ([5, 5, 5, 5], [5] * 7),
        ([1, 2, 1, 2, 1], [2, 1, 2, 1, 2, 1, 2]),
        ([1, 2, 3, 9, 1, 2, 3, 7, 1, 2, 3], [7, 1, 2, 3, 7, 1, 2]),  # the latest counts
        ([1, 2, 3, 1, 2], []),
        ([1, 2], []),
        ([], []),
    ],
)
def test_what_followed_the_last_time_is_guessed_and_goes_on_as_a_loop(ids, wanted):
    assert Lookahead(7, ids).guess(100) == wanted
    ahead = Lookahead(7, ids[:2])
    for token in ids[2:]:
        ahead.add(token)
    assert ahead.guess(100) == wanted
    assert ahead.guess(3) == wanted[:3]
    assert ahead.guess(0) == []


def test_guesses_grow_as_they_prove_right():
    ahead = Lookahead(63, [5] * 4)
    lengths = []
    for _ in range(8):
        lengths.append(len(ahead.guess(100)))
        ahead.learn(lengths[-1], lengths[-1])
    assert lengths[0] < lengths[-1] == 63
    assert set(lengths) <= set(LENGTHS)


def test_guesses_that_fail_cost_little_on_the_whole():
    """However often the text seems to repeat itself."""
    ahead, total = Lookahead(31, [5] * 4), 0.0
    for n in range(1, 2_000):
        guess = ahead.guess(100)
        total += cost(len(guess) + 1)
        ahead.learn(len(guess), 0)
        assert total <= (1 + EARNED) * n + FIRST
    assert total > 2_000  # some were tried


TEXTS = ["Once upon a time", "The king said to the queen,", "There was once a poor woman", "a"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("lookahead", [1, 7, 31, 100])
def test_the_ids_are_those_of_plain_generation(passes, text, lookahead):
    """At least as far as no two logits are as good as equal."""
    encoder, hparams, params = load("tales")
    ids = encoder.encode(text)
    found = generate(ids, params, hparams["n_head"], 150, lookahead=lookahead)
    n_passes = len(passes)
    plain = generate(ids, params, hparams["n_head"], 150)
    assert len(found) == 150
    logits = gpt2(ids + plain, **params, n_head=hparams["n_head"])[len(ids) - 1 : -1]
    second, best = np.sort(logits, -1)[:, -2:].T
    unsure = np.flatnonzero(best - second <= 1e-3)
    n = unsure[0] if len(unsure) else 150
    assert found[:n] == plain[:n]
    assert n >= 100
    if lookahead >= 7:
        assert n_passes < 140  # where it repeats itself, several are checked at once


def test_text_that_does_not_repeat_is_generated_as_before(params, passes):
    """Of other models' random ids: each three are new."""
    ids = [1, 2, 3, 4, 5]
    found = generate(ids, params, 4, 20, lookahead=31)
    triples = list(zip(ids + found, (ids + found)[1:], (ids + found)[2:], strict=False))
    if len(set(triples)) == len(triples):
        assert passes == [5] + [1] * 19
    assert found == generate(ids, params, 4, 20)


def looping(params, period=4):
    """The same model, but that token i is followed by i + 1, and period - 1 by 0."""
    n_vocab, n_embd = params["wte"].shape
    rng = np.random.default_rng(0)
    wte = rng.normal(size=(n_vocab, n_embd)).astype(np.float32)
    head = np.zeros_like(wte)
    blocks = [
        {
            **block,
            "attn": {**block["attn"], "c_proj": {"w": np.zeros((16, 16), np.float32), "b": 0}},
            "mlp": {**block["mlp"], "c_proj": {"w": np.zeros((64, 16), np.float32), "b": 0}},
        }
        for block in params["blocks"]
    ]
    for i in range(period):
        x = wte[i] - wte[i].mean()
        head[(i + 1) % period] = x / x.std()
    ln_f = {"g": np.ones(n_embd, np.float32), "b": np.zeros(n_embd, np.float32)}
    wpe = np.zeros_like(params["wpe"])
    return {"wte": wte, "wpe": wpe, "blocks": blocks, "ln_f": ln_f, "lm_head": head}


@pytest.mark.parametrize("period", [1, 2, 4])
def test_a_loop_is_run_through_in_few_passes(params, passes, period):
    params = looping(params, period)
    found = generate([0], params, 4, 31, lookahead=31)
    assert found == [(i + 1) % period for i in range(31)]
    assert len(passes) <= 12
    assert sum(passes) <= 60


def test_after_wrong_guesses_the_cache_is_that_of_the_text(monkeypatch):
    """Each time the model is asked, what it has seen is what a new run would have seen."""
    encoder, hparams, params = load("tales")
    n_head, ids = hparams["n_head"], encoder.encode("Once upon a time")
    caches, n_seen = [], []

    def watched(*args, **options):
        caches.append(new_cache(*args, **options))
        return caches[-1]

    def watched_gpt2(inputs, **options):
        n_seen.append((options["cache"]["n_past"], np.shape(inputs)[-1]))
        return gpt2(inputs, **options)

    monkeypatch.setattr(generation, "new_cache", watched)
    monkeypatch.setattr(generation, "gpt2", watched_gpt2)
    new = generate(ids, params, n_head, 120, lookahead=15)
    (cache,) = caches
    n = len(ids) + 119
    assert cache["n_past"] == n
    assert any(length > 1 for _, length in n_seen[1:])
    rejected = [past + length > after for (past, length), (after, _) in pairwise(n_seen)]
    assert any(rejected)
    fresh = new_cache(params, n_head, n_rows=1)
    gpt2([(ids + new)[:n]], **params, n_head=n_head, cache=fresh)
    for layer, wanted in zip(cache["blocks"], fresh["blocks"], strict=True):
        for name in "kv":
            assert np.abs(layer[name][:, :, :n] - wanted[name][:, :, :n]).max() < 1e-3


@pytest.mark.parametrize("n_prompt", [1, 20, 31, 32])
def test_up_to_the_window_and_beyond(params, n_prompt):
    params = looping(params)
    ids = [i % 4 for i in range(n_prompt)]
    n = 33 - n_prompt
    wanted = [(n_prompt + i) % 4 for i in range(n)]
    assert generate(ids, params, 4, n, lookahead=31) == wanted
    wanted = [(n_prompt + i) % 4 for i in range(150)]
    assert generate(ids, params, 4, 150, lookahead=31, overflow="slide") == wanted


def test_it_stops_inside_what_was_guessed_right(params):
    params = looping(params)
    assert generate([0], params, 4, 30, lookahead=31, stop_ids=[3]) == [1, 2]
    ids = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert generate(ids, params, 4, 20, lookahead=31, stop_ids=[0]) == [2, 3]
    for n in range(1, 20):
        assert len(generate(ids, params, 4, n, lookahead=31)) == n


def test_a_penalty_changes_what_is_right(params):
    params = looping(params)
    options = {"repetition_penalty": 5.0}
    plain = generate([0], params, 4, 25, **options)
    assert generate([0], params, 4, 25, **options, lookahead=31) == plain


@pytest.mark.parametrize("options", [{"top_k": 3}, {"temperature": 1.0}, {"seed": 1}])
def test_not_with_sampling_or_several_prompts(params, options):
    message = "lookahead: works for one prompt, without sampling; leave it at 0"
    with pytest.raises(PicogptError) as error:
        generate([1], params, 4, 1, lookahead=4, **options)
    assert str(error.value) == message
    with pytest.raises(PicogptError) as error:
        generate_batch([[1], [2]], params, 4, 1, lookahead=4)
    assert str(error.value) == message
    with pytest.raises(PicogptError, match=r"^lookahead: is -1; expected a whole number"):
        generate([1], params, 4, 1, lookahead=-1)


def test_the_command_looks_ahead_unless_told_not_to(passes, capsys):
    arguments = ["Once upon a time", "--model", "tales", "--n-tokens", "100"]
    n_passes, texts = [], []
    for flags in ([], ["--lookahead", "auto"], ["--lookahead", "0"], ["--lookahead", "7"]):
        passes.clear()
        assert main([*arguments, *flags]) == 0
        n_passes.append(len(passes))
        texts.append(capsys.readouterr().out)
    assert n_passes[0] == n_passes[1] < n_passes[3] < n_passes[2] == 100
    assert len(set(texts)) == 1
    assert main([*arguments, "--lookahead", "4", "--seed", "1"]) == 1
    assert "lookahead: works for one prompt" in capsys.readouterr().err
    for flags in (["--seed", "1"], ["--n-samples", "2"], ["--temperature", "0.5"]):
        assert main([*arguments, *flags]) == 0
    with pytest.raises(SystemExit):
        main([*arguments, "--lookahead", "most"])
