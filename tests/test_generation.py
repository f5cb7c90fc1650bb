"""New tokens: which, how many, and when there are none."""

from functools import cache

import numpy as np
import pytest
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from picogpt import (
    PicogptError,
    generate,
    generate_batch,
    generation,
    gpt2,
    layouts,
    load,
    new_cache,
    next_tokens,
    stream,
)
from picogpt.generation import generate_many, stream_batch


@pytest.fixture
def params(model_folder):
    return load(model_folder()).params


def test_greedy_ids_equal_the_originals(params, expected):
    assert generate(expected["ids"], params, 4, 8) == expected["greedy"].tolist()


def test_stream_yields_what_generate_returns_one_by_one(params, expected):
    new = stream(expected["ids"], params, 4, 8)
    wanted = expected["greedy"].tolist()
    assert next(new) == wanted[0]
    assert list(new) == wanted[1:]


@pytest.mark.parametrize("kind", [list, tuple, iter, np.array])
def test_ids_come_as_any_integers_and_are_left_alone(params, expected, kind):
    ids = expected["ids"].tolist()
    inputs = kind(ids)
    new = generate(inputs, params, 4, 3)
    assert new == expected["greedy"][:3].tolist()
    assert all(type(token) is int for token in new)
    assert kind is iter or list(inputs) == expected["ids"].tolist()


def test_a_stop_id_ends_the_text_and_is_not_returned(params, expected):
    greedy = expected["greedy"].tolist()
    assert greedy[:3] == [113, 96, 0]
    assert generate(expected["ids"], params, 4, 8, stop_ids=[0, 5]) == [113, 96]
    assert generate(expected["ids"], params, 4, 8, stop_ids=(113,)) == []


def test_none_at_all(params):
    assert generate([1], params, 4, 0) == []
    assert generate([1] * 40, params, 4, 0) == []


@pytest.mark.parametrize(("n_prompt", "n_tokens"), [(24, 9), (32, 1), (1, 32)])
def test_the_last_token_that_the_window_of_32_allows(params, n_prompt, n_tokens):
    assert len(generate([7] * n_prompt, params, 4, n_tokens)) == n_tokens


@pytest.mark.parametrize(
    ("n_prompt", "n_tokens", "room"), [(24, 10, 9), (32, 2, 1), (33, 1, 0), (50, 1, 0)]
)
def test_the_first_token_that_it_does_not(params, n_prompt, n_tokens, room):
    with pytest.raises(PicogptError) as error:
        stream([7] * n_prompt, params, 4, n_tokens)
    assert str(error.value) == (
        f"prompt is {n_prompt} tokens and {n_tokens} more are asked for; "
        f"the model's window of 32 leaves room for {room}"
    )


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ([], {}, "prompt is 0 tokens; expected one at least, such as end of text"),
        ([1, -1], {}, "ids[1]: is -1; expected 0 to 299"),
        ([300], {}, "ids[0]: is 300; expected 0 to 299"),
        ([[1, 2]], {}, "ids[0]: is a list; expected an integer"),
        ([1], {"stop_ids": [300]}, "ids[0]: is 300; expected 0 to 299"),
        ([1], {"n": -1}, "n_tokens_to_generate: is -1; expected a whole number, 0 or more"),
        ([1], {"n": 1.5}, "n_tokens_to_generate: is 1.5; expected a whole number, 0 or more"),
    ],
)
def test_arguments_are_checked_before_the_first_token(params, inputs, options, message):
    n = options.pop("n", 1)
    with pytest.raises(PicogptError) as error:
        stream(inputs, params, 4, n, **options)
    assert str(error.value) == message


def test_nan_in_the_weights_is_an_error_and_no_token(params):
    params["ln_f"]["b"] = np.full(16, np.nan, np.float32)
    with pytest.raises(PicogptError) as error:
        generate([1], params, 4, 1)
    assert str(error.value) == "logits: nan or infinite; the weights are damaged"


def test_equal_logits_give_the_lowest_id(params):
    params["wte"] = np.zeros((300, 16), np.float32)
    assert generate([5], params, 4, 2) == [0, 0]


def uncached(ids, params, n_head, n_tokens, overflow="error"):
    """Greedy decoding as a learner would write it, with all of the window computed each time."""
    n_ctx = len(params["wpe"])
    window, new = list(ids), []
    for _ in range(n_tokens):
        if len(window) > n_ctx:
            assert overflow == "slide"
            window = window[-(n_ctx // 2) :]
        new.append(int(gpt2(window, **params, n_head=n_head)[-1].argmax()))
        window.append(new[-1])
    return new


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(300, size=n).tolist() for n in lengths]


@pytest.mark.parametrize("chunk", [1, 3, 256])
def test_cached_equals_uncached_however_the_prompt_is_cut(params, monkeypatch, chunk):
    monkeypatch.setattr(generation, "CHUNK", chunk)
    for ids in prompts_of([1, 2, 13, 24]):
        assert generate(ids, params, 4, 9) == uncached(ids, params, 4, 9)


@pytest.mark.parametrize("lengths", [[7, 5], [5, 7], [7, 7], [1, 24], [24, 1, 3, 24, 2], [4], []])
@pytest.mark.parametrize("chunk", [1, 8, 256])
def test_a_batch_equals_the_single_runs(params, monkeypatch, lengths, chunk):
    monkeypatch.setattr(generation, "CHUNK", chunk)
    prompts = prompts_of(lengths)
    copies = [list(prompt) for prompt in prompts]
    assert generate_batch(prompts, params, 4, 9) == [generate(p, params, 4, 9) for p in prompts]
    assert prompts == copies


def test_rows_that_end_early_change_nothing_and_cost_nothing(params, monkeypatch):
    prompts = prompts_of([3, 9, 20, 6])
    stop = generate(prompts[1], params, 4, 3)[2]
    wanted = [generate(p, params, 4, 9, stop_ids=[stop]) for p in prompts]
    widths = []

    def watched(inputs, *args, **options):
        widths.append(np.shape(inputs))
        return gpt2(inputs, *args, **options)

    monkeypatch.setattr(generation, "gpt2", watched)
    assert generate_batch(prompts, params, 4, 9, stop_ids=[stop]) == wanted
    assert sorted(map(len, wanted))[0] < sorted(map(len, wanted))[-1] == 9
    # The prompts in one pass; then for each row as many tokens as it fed back.
    assert widths[0] == (4, 20)
    assert sum(n_rows for n_rows, _ in widths[1:]) == sum(min(len(w), 8) for w in wanted)


def test_all_rows_may_end(params, expected):
    prompts = [expected["ids"]] * 3
    assert generate_batch(prompts, params, 4, 8, stop_ids=[0]) == [[113, 96]] * 3
    assert generate_batch(prompts, params, 4, 8, stop_ids=[113]) == [[], [], []]


def test_the_caller_may_end_a_row(params):
    prompts, done, new = prompts_of([3, 9]), set(), [[], []]
    for row, token, _ in stream_batch(prompts, params, 4, 9, done=done):
        new[row].append(token)
        if len(new[1]) == 2:
            done.add(1)
    assert new == [generate(prompts[0], params, 4, 9), generate(prompts[1], params, 4, 2)]


@pytest.mark.parametrize("n_prompt", [1, 15, 16, 31, 32, 33, 80])
def test_beyond_the_window_cached_equals_uncached(params, n_prompt):
    (ids,) = prompts_of([n_prompt])
    window = ids if n_prompt <= 32 else ids[-16:]
    found = generate(ids, params, 4, 90, overflow="slide")
    assert found == uncached(window, params, 4, 90, "slide")
    assert len(set(found)) > 2


def test_beyond_the_window_a_batch_equals_the_single_runs(params):
    prompts = prompts_of([1, 15, 31, 40])
    options = {"overflow": "slide", "seed": 5}
    found = generate_batch(prompts, params, 4, 70, **options)
    assert found[0] == generate(prompts[0], params, 4, 70, **options)
    greedy = generate_batch(prompts, params, 4, 70, overflow="slide")
    assert greedy == [generate(p, params, 4, 70, overflow="slide") for p in prompts]


def test_a_window_of_one_token_slides(params):
    params["wpe"] = params["wpe"][:1]
    assert len(generate([5, 6, 7], params, 4, 3, overflow="slide")) == 3


def kept(logits, temperature=1.0, top_k=0, top_p=1.0):
    ids, probabilities = generation._candidates(
        np.log(np.array(logits)).astype(np.float32), temperature, top_k, top_p
    )
    assert probabilities.min() >= 0
    return sorted(ids.tolist())


@pytest.mark.parametrize(
    ("probabilities", "top_p", "ids"),
    [
        ([0.09, 0.5, 0.41], 0.9, [1, 2]),
        ([0.4, 0.3, 0.2, 0.1], 0.8, [0, 1, 2]),
        ([0.4, 0.3, 0.2, 0.1], 0.0, [0]),
        ([0.1, 0.2, 0.3, 0.4], 0.0, [3]),
        ([0.25] * 4, 0.0, [0]),
        ([0.25] * 4, 0.6, [0, 1, 2]),
        ([0.4, 0.3, 0.2, 0.1], 1.0, [0, 1, 2, 3]),
        ([0.4, 0.3, 0.2, 0.1], 0.999999, [0, 1, 2, 3]),
    ],
)
def test_top_p_keeps_the_token_that_crosses(probabilities, top_p, ids):
    assert kept(probabilities, top_p=top_p) == ids


@pytest.mark.parametrize(
    ("logits", "top_k", "ids"),
    [
        ([3, 2, 2, 1], 2, [0, 1]),
        ([2, 2, 2, 3], 2, [0, 3]),
        ([1, 1, 1, 1], 3, [0, 1, 2]),
        ([1, 2, 3, 4], 1, [3]),
        ([1, 2, 3, 4], 4, [0, 1, 2, 3]),
        ([1, 2, 3, 4], 99, [0, 1, 2, 3]),
        ([1, 2, 3, 4], 0, [0, 1, 2, 3]),
        ([1, 2, 3, 4], None, [0, 1, 2, 3]),
    ],
)
def test_top_k_keeps_exactly_k_the_lower_id_first(logits, top_k, ids):
    assert kept(np.exp(logits), top_k=top_k) == ids


def test_top_p_counts_what_temperature_and_top_k_leave():
    probabilities = [0.5, 0.3, 0.1, 0.1]
    assert kept(probabilities, top_p=0.6) == [0, 1]
    assert kept(probabilities, top_k=2, top_p=0.6) == [0]
    assert kept(probabilities, temperature=0.1, top_p=0.6) == [0]
    assert kept(probabilities, temperature=9.0, top_p=0.6) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [0.05, 0.4, 0.25, 0.2, 0.1]),
        ({"top_k": 3}, [0, 0.4 / 0.85, 0.25 / 0.85, 0.2 / 0.85, 0]),
        ({"top_p": 0.6}, [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0]),
        ({"temperature": 0.5}, np.square([0.05, 0.4, 0.25, 0.2, 0.1]) / 0.275),
    ],
)
def test_frequencies_of_2000_draws(options, wanted):
    logits = np.log(np.array([0.05, 0.4, 0.25, 0.2, 0.1], np.float32))
    picking = generation._Options(seed=0, **options)
    rng = np.random.default_rng(7)
    drawn = [generation._pick(logits, picking, set(), rng) for _ in range(2000)]
    for token, p in enumerate(wanted):
        assert abs(drawn.count(token) - 2000 * p) <= 4 * np.sqrt(2000 * p * (1 - p))


def test_the_repetition_penalty_divides_and_multiplies():
    logits = np.array([2.0, 1.5, -1.0, -1.2], np.float32)

    def greedy(penalty, seen):
        options = generation._Options(repetition_penalty=penalty)
        return generation._pick(logits, options, set(seen), None)

    assert greedy(1.0, [0]) == 0
    assert greedy(1.3, [0]) == 0
    assert greedy(1.4, [0]) == 1
    assert greedy(1.4, [0, 1]) == 0
    options = generation._Options(repetition_penalty=1.4)
    assert generation._pick(-logits[:2], options, {1}, None) == 0
    assert logits.tolist() == np.array([2.0, 1.5, -1.0, -1.2], np.float32).tolist()


def test_the_penalty_counts_prompt_and_text(params, expected):
    ids = expected["ids"].tolist()
    new = generate(ids, params, 4, 9, repetition_penalty=100)
    assert len(set(ids + new)) == len(set(ids)) + 9
    assert generate(ids, params, 4, 8, repetition_penalty=1) == expected["greedy"].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.0, "seed": 3, "top_k": 5},
        {"temperature": 1e-6, "seed": 3},
        {"temperature": 5e-324},
        {"top_k": 1},
        {"top_p": 0.0},
        {"top_k": None},
        {"temperature": None, "top_k": 0, "top_p": 1, "seed": None},
    ],
)
def test_what_is_greedy(params, expected, options):
    assert generate(expected["ids"], params, 4, 8, **options) == expected["greedy"].tolist()


@pytest.mark.parametrize("options", [{"seed": 0}, {"top_k": 50}, {"top_p": 0.99}])
def test_what_samples_by_itself(options):
    assert not generation._Options(**options).is_greedy()


def test_the_same_seed_gives_the_same_ids(params):
    (ids,) = prompts_of([5])
    first = generate(ids, params, 4, 20, seed=1)
    assert generate(ids, params, 4, 20, seed=1) == first
    assert generate(ids, params, 4, 20, seed=np.int64(1), temperature=1.0) == first
    assert generate(ids, params, 4, 20, seed=2) != first
    assert generate(ids, params, 4, 20, temperature=1.0) != generate(
        ids, params, 4, 20, temperature=1.0
    )


def test_the_same_seed_gives_the_same_ids_without_a_cache(params):
    (ids,) = prompts_of([5])
    options = generation._Options(seed=4, top_k=40, temperature=0.8)
    rng, window = np.random.default_rng([4, 0]), list(ids)
    for _ in range(20):
        logits = gpt2(window, **params, n_head=4)[-1]
        window.append(generation._pick(logits, options, set(), rng))
    assert generate(ids, params, 4, 20, seed=4, top_k=40, temperature=0.8) == window[5:]


def test_a_row_does_not_depend_on_its_neighbours(params):
    prompts = prompts_of([5, 9, 2])
    batch = generate_batch(prompts, params, 4, 20, seed=3)
    assert batch[0] == generate(prompts[0], params, 4, 20, seed=3)
    assert generate_batch(prompts[::-1], params, 4, 20, seed=3)[1] == batch[1]
    assert generate_batch([prompts[0]] * 2, params, 4, 20, seed=3)[0] == batch[0]
    same = generate_batch([prompts[0]] * 2, params, 4, 20, seed=3)
    assert same[0] != same[1]


def test_the_global_random_state_is_left_alone(params):
    before = np.random.get_state()
    generate([1], params, 4, 5, seed=1)
    after = np.random.get_state()
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature: is -1; expected a number, 0 or more"),
        ({"temperature": np.nan}, "temperature: is nan; expected a number, 0 or more"),
        ({"temperature": np.inf}, "temperature: is inf; expected a number, 0 or more"),
        ({"temperature": "1"}, "temperature: is '1'; expected a number, 0 or more"),
        ({"top_k": -1}, "top_k: is -1; expected a whole number, 0 or more"),
        ({"top_k": 1.5}, "top_k: is 1.5; expected a whole number, 0 or more"),
        ({"top_p": 1.1}, "top_p: is 1.1; expected a number from 0 to 1"),
        ({"top_p": -0.1}, "top_p: is -0.1; expected a number from 0 to 1"),
        ({"top_p": np.nan}, "top_p: is nan; expected a number from 0 to 1"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty: is 0; expected a number from 0.01 to 100",
        ),
        ({"temperature": 10**400}, f"temperature: is 1{'0' * 39}; expected a number, 0 or more"),
        ({"seed": -1}, "seed: is -1; expected a whole number, 0 or more"),
        ({"seed": 1.0}, "seed: is 1.0; expected a whole number, 0 or more"),
        ({"overflow": "wrap"}, "overflow: is 'wrap'; expected error or slide"),
    ],
)
def test_options_are_checked(params, options, message):
    for call in (generate, stream):
        with pytest.raises(PicogptError) as error:
            call([1], params, 4, 1, **options)
        assert str(error.value) == message


def test_an_option_that_does_not_exist_is_a_type_error(params):
    with pytest.raises(TypeError, match="temprature"):
        stream([1], params, 4, 1, temprature=1.0)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint16, np.uint32, np.uint64, np.int64])
def test_numpys_integers_count_as_pythons(params, kind):
    (ids,) = prompts_of([5])
    wanted = generate(ids, params, 4, 9, top_k=3, seed=7)
    assert generate(ids, params, kind(4), kind(9), top_k=kind(3), seed=kind(7)) == wanted
    with pytest.raises(PicogptError, match=r"leaves room for 28$"):
        generate(ids, params, 4, kind(127))


def test_prompts_may_come_from_a_generator(params):
    prompts = prompts_of([5, 3])
    found = generate_batch((iter(prompt) for prompt in prompts), params, 4, 5)
    assert found == generate_batch(prompts, params, 4, 5)


@pytest.mark.parametrize("n_head", [0, 3, 5, -1, 2.0, None])
def test_an_impossible_number_of_heads(params, n_head):
    with pytest.raises(PicogptError, match=f"^n_head: is {n_head}; expected a "):
        generate([1], params, n_head, 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 99), st.integers(1, 80))
def test_any_batch_that_slides_and_stops_equals_the_single_runs(lengths, seed, n_tokens):
    """A long row may end while the others run on in the cache that it was padded for."""
    params = load_plain()
    prompts = prompts_of(lengths, seed)
    stops = generate(prompts[0], params, 4, 1, overflow="slide")
    options = {"overflow": "slide", "stop_ids": stops if seed % 2 else []}
    wanted = [generate(prompt, params, 4, n_tokens, **options) for prompt in prompts]
    assert generate_batch(prompts, params, 4, n_tokens, **options) == wanted


@cache
def load_plain():
    """The weights of the fixture `params`, in a form that Hypothesis can use again."""
    tensors = dict(np.load(DATA / "expected.npz"))
    hparams = {"n_vocab": 300, "n_ctx": 32, "n_embd": 16, "n_head": 4, "n_layer": 2}
    return layouts.parameter_tree(hparams, lambda name, shape: tensors[name].reshape(shape))


def test_the_cache_has_room_for_what_is_needed_and_no_more(params, monkeypatch):
    rooms = []

    def watched(*args, n_ctx, **options):
        rooms.append(n_ctx)
        return new_cache(*args, n_ctx=n_ctx, **options)

    monkeypatch.setattr(generation, "new_cache", watched)
    generate([1] * 5, params, 4, 4)
    generate([1] * 32, params, 4, 1)
    generate([1] * 30, params, 4, 9, overflow="slide")
    assert rooms == [8, 32, 32, 21]


def test_next_tokens_are_the_whole_distribution_sorted(params):
    ids, probabilities = next_tokens([1, 2, 3], params, 4)
    logits = gpt2([1, 2, 3], **params, n_head=4)[-1].astype(np.float64)
    wanted = np.exp(logits) / np.exp(logits).sum()
    assert sorted(ids.tolist()) == list(range(300))
    assert np.abs(probabilities - wanted[ids]).max() < 1e-6
    assert (np.diff(probabilities) <= 0).all()
    assert probabilities.sum() == pytest.approx(1)


def test_next_tokens_after_the_options(params):
    ids, probabilities = next_tokens([1, 2, 3], params, 4, top_k=5, temperature=2.0)
    assert len(ids) == 5
    assert probabilities.sum() == pytest.approx(1)
    best = generate([1, 2, 3], params, 4, 1)
    assert ids[0] == best[0]
    ids, probabilities = next_tokens([1, 2, 3], params, 4, temperature=0)
    assert (ids.tolist(), probabilities.tolist()) == (best, [1.0])
    ids, _ = next_tokens([1, best[0]], params, 4, repetition_penalty=100, top_k=3)
    plain, _ = next_tokens([1, best[0]], params, 4, top_k=3)
    assert plain.tolist() != ids.tolist() or not {1, best[0]} & set(plain.tolist())


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "text is 0 tokens; the model's window takes 1 to 32"),
        ([1] * 33, {}, "text is 33 tokens; the model's window takes 1 to 32"),
        ([1], {"top_p": 2}, "top_p: is 2; expected a number from 0 to 1"),
    ],
)
def test_next_tokens_of_what_does_not_fit(params, ids, options, message):
    with pytest.raises(PicogptError) as error:
        next_tokens(ids, params, 4, **options)
    assert str(error.value) == message
    assert len(next_tokens([1] * 32, params, 4)[0]) == 300


def test_next_tokens_of_damaged_weights(params):
    damaged = {**params, "wte": params["wte"].copy()}
    damaged["wte"][200] = np.nan
    with pytest.raises(PicogptError, match="nan or infinite; the weights are damaged"):
        next_tokens([1, 2], damaged, 4)
    with pytest.raises(PicogptError, match=r"^n_head: is 3; expected a divisor of n_embd=16$"):
        next_tokens([1, 2], params, 3)


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("options", [{}, {"top_k": 3, "temperature": 2.0, "seed": 1}])
def test_log_probabilities_are_the_models_own(params, options):
    """Before temperature and the rest."""
    ids = [1, 2, 3]
    new = generate(ids, params, 4, 10, logprobs=4, **options)
    assert new == generate(ids, params, 4, 10, **options)
    wanted = log_softmax(gpt2(ids + new, **params, n_head=4)[2:-1])
    assert np.abs(np.array(new.logprobs) - wanted[range(10), new]).max() < 1e-4
    for top, row in zip(new.top_logprobs, wanted, strict=True):
        assert [token for token, _ in top] == np.argsort(-row, kind="stable")[:4].tolist()
        assert np.abs([p for _, p in top] - np.sort(row)[::-1][:4]).max() < 1e-4


def test_log_probabilities_with_lookahead_and_in_batches(params):
    alone = generate([1, 2, 3], params, 4, 20, logprobs=0)
    ahead = generate([1, 2, 3], params, 4, 20, logprobs=0, lookahead=31)
    assert alone == ahead
    assert alone.logprobs == pytest.approx(ahead.logprobs, abs=1e-4)
    rows = generate_batch([[1, 2, 3], [4]], params, 4, 20, logprobs=1)
    assert rows[0].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert [len(row.top_logprobs) for row in rows] == [20, 20]
    assert rows[0].top_logprobs[0][0][0] == alone[0]
    assert generate([1], params, 4, 3).logprobs == []
    with pytest.raises(PicogptError, match=r"^logprobs: is -1; expected a whole number"):
        generate([1], params, 4, 3, logprobs=-1)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 100])
@pytest.mark.parametrize("options", [{}, {"top_k": 5, "seed": 3, "stop_ids": [104, 26]}])
def test_many_prompts_give_what_each_gives(params, batch_size, options):
    prompts = prompts_of([9, 1, 4, 20, 2, 2, 7, 11])
    found = list(generate_many(prompts, params, 4, 12, batch_size=batch_size, **options))
    assert found == generate_batch(prompts, params, 4, 12, **options)
    behind = generate_many(prompts[3:], params, 4, 12, batch_size=batch_size, first=3, **options)
    assert list(behind) == found[3:]


def test_many_prompts_run_beside_others_of_their_length(params, monkeypatch):
    batches = []
    real = generation.stream_batch

    def watched(prompts, *args, **options):
        batches.append(list(map(len, prompts)))
        return real(prompts, *args, **options)

    monkeypatch.setattr(generation, "stream_batch", watched)
    prompts = prompts_of([9, 1, 4, 20, 2, 2, 7, 11] * 3)
    assert len(list(generate_many(prompts, params, 4, 2, batch_size=2))) == 24
    assert batches[0] == [1, 1]
    assert batches[-1] == [11, 20]
    assert len(batches) == 12


def test_many_prompts_come_in_order_as_soon_as_they_can(params):
    prompts = prompts_of([1, 9, 2, 8])
    options = {"batch_size": 2, "ends": lambda place, token: place == 2}
    many = generate_many(prompts, params, 4, 2, **options)
    assert [len(next(many)) for _ in range(4)] == [2, 2, 1, 2]
    assert list(generate_many([], params, 4, 2)) == []
