"""The official 124M: what it is known to say. Needs it in the weights folder."""

import pytest

from picogpt import generate, load
from picogpt.catalog import find_model
from picogpt.download import is_complete

pytestmark = pytest.mark.weights


@pytest.fixture(scope="module")
def gpt2_124m():
    folder = find_model("124M", fetch=False)
    if not is_complete(folder):
        pytest.skip(f"{folder} does not hold it")
    return load("124M")


TURING = "Alan Turing theorized that computers would one day become"


def test_alan_turing(gpt2_124m):
    encoder, hparams, params = gpt2_124m
    new = generate(encoder.encode(TURING), params, hparams["n_head"], 8)
    assert encoder.decode(new) == " the most powerful machines on the planet."


def test_nineteen_tokens_and_twenty_more(gpt2_124m):
    encoder, hparams, params = gpt2_124m
    ids = encoder.encode(f"{TURING} very powerful, but even he could not imagine")
    assert len(ids) == 19
    assert generate(ids, params, hparams["n_head"], 20) == [
        *[703, 484, 561, 307, 1498, 284, 466, 523, 13, 198],
        *[198, 1, 40, 892, 326, 262, 749, 1593, 1517, 318],
    ]


def test_from_the_end_of_text(gpt2_124m):
    encoder, hparams, params = gpt2_124m
    text = encoder.decode(generate([encoder.end_of_text], params, hparams["n_head"], 40))
    first = "The first time I saw the new version of the game, I was so excited."
    assert text.lstrip().startswith(first)
