"""New tokens: which, how many, and when there are none."""

import numpy as np
import pytest

from picogpt import PicogptError, generate, load, stream


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
