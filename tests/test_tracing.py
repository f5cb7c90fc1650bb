"""What the forward pass computes on its way, and a run that is changed on its way."""

import numpy as np
import pytest

from picogpt import PicogptError, gpt2, load, logit_lens, new_cache, trace

LAYER = ["attn.weights", "attn.heads", "attn.out", "mlp.act", "mlp.out", "out"]


@pytest.fixture
def params(model_folder):
    return load(model_folder()).params


def same(found, expected):
    return np.abs(found - expected).max() <= 1e-4 + 2e-6 * np.abs(expected).max()


def test_names_come_in_the_order_of_the_pass_and_shapes_are_as_told(params, expected):
    traced = trace(expected["ids"], params, 4)
    inside = [f"h{i}.{name}" for i in range(2) for name in LAYER]
    assert list(traced) == ["embed", *inside, "ln_f", "logits"]
    shapes = {"attn.weights": (4, 24, 24), "attn.heads": (4, 24, 4), "mlp.act": (24, 64)}
    for name, array in traced.items():
        assert array.dtype == np.float32
        default = (24, 300) if name == "logits" else (24, 16)
        assert array.shape == shapes.get(name.partition(".")[2], default)


def test_it_equals_what_transformers_saw(params, expected):
    traced = trace(expected["ids"], params, 4)
    for i, wanted in enumerate(expected["attentions"]):
        assert same(traced[f"h{i}.attn.weights"], wanted)
    for name, wanted in zip(["embed", "h0.out", "ln_f"], expected["hidden_states"], strict=True):
        assert same(traced[name], wanted)
    assert same(traced["logits"], expected["logits"])


def test_what_is_inside_adds_up(params, expected):
    traced = trace(expected["ids"], params, 4)
    x = traced["embed"]
    for i, block in enumerate(params["blocks"]):
        heads = traced[f"h{i}.attn.heads"].swapaxes(0, 1).reshape(24, 16)
        c_proj = block["attn"]["c_proj"]
        assert np.allclose(traced[f"h{i}.attn.out"], heads @ c_proj["w"] + c_proj["b"], atol=1e-4)
        c_proj = block["mlp"]["c_proj"]
        out = traced[f"h{i}.mlp.act"] @ c_proj["w"] + c_proj["b"]
        assert np.allclose(traced[f"h{i}.mlp.out"], out, atol=1e-4)
        x = x + traced[f"h{i}.attn.out"] + traced[f"h{i}.mlp.out"]
        assert np.allclose(traced[f"h{i}.out"], x, atol=1e-4)


def test_no_token_looks_ahead_and_shares_sum_to_1(params, expected):
    for weights in trace(expected["ids"], params, 4, keep="*.attn.weights").values():
        assert (weights[:, ~np.tri(24, dtype=bool)] == 0).all()
        assert np.abs(weights.sum(-1) - 1).max() < 1e-6


@pytest.mark.parametrize(
    ("keep", "names"),
    [
        ("h1.mlp.*", ["h1.mlp.act", "h1.mlp.out"]),
        ("*.attn.weights", ["h0.attn.weights", "h1.attn.weights"]),
        ("h?.out", ["h0.out", "h1.out"]),
        ("logits", ["logits"]),
    ],
)
def test_only_what_is_wanted_is_kept(params, keep, names):
    assert list(trace([1, 2], params, 4, keep=keep)) == names


def test_names_that_match_nothing(params):
    with pytest.raises(PicogptError) as error:
        trace([1], params, 4, keep="h0.attention")
    message = "no name matches 'h0.attention'; names are h0.attn.weights and so on"
    assert str(error.value) == f"keep: {message}"


@pytest.mark.parametrize("function", [trace, logit_lens])
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "text is 0 tokens; the model's window takes 1 to 32"),
        ([1] * 33, "text is 33 tokens; the model's window takes 1 to 32"),
        ([-1], "ids[0]: is -1; expected 0 to 299"),
        ([0.5], "ids[0]: is a float; expected an integer"),
    ],
)
def test_ids_that_do_not_fit(params, function, ids, message):
    with pytest.raises(PicogptError) as error:
        function(ids, params, 4)
    assert str(error.value) == message


def test_a_trace_shows_itself_as_a_table(params):
    traced = trace([1, 2], params, 4, keep="h0.attn.*")
    assert repr(traced) == (
        "h0.attn.weights    [4, 2, 2]          float32\n"
        "h0.attn.heads      [4, 2, 4]          float32\n"
        "h0.attn.out        [2, 16]            float32"
    )
    page = traced._repr_html_()
    assert page.startswith("<table><tr><td>name</td><td>shape</td><td>dtype</td></tr><tr>")
    assert "<td>h0.attn.heads</td><td>[4, 2, 4]</td><td>float32</td>" in page


@pytest.mark.parametrize("head", range(4))
def test_a_head_is_ablated_by_a_tap(params, expected, head):
    """As if its rows of the output projection were 0."""

    def ablate(name, x):
        if name == "h1.attn.weights":
            x = x.copy()
            x[head] = 0
        return x

    found = gpt2(expected["ids"], **params, n_head=4, tap=ablate)
    blocks = [params["blocks"][0], {**params["blocks"][1]}]
    attn = blocks[1]["attn"]
    w = attn["c_proj"]["w"].copy()
    w[4 * head : 4 * head + 4] = 0
    blocks[1]["attn"] = {**attn, "c_proj": {"w": w, "b": attn["c_proj"]["b"]}}
    wanted = gpt2(expected["ids"], **{**params, "blocks": blocks}, n_head=4)
    assert same(found, wanted)
    assert not same(found, expected["logits"])


def test_a_residual_is_swapped_by_a_tap(params, expected):
    ids, others = expected["ids"], expected["ids"][::-1]
    swapped = trace(others, params, 4, keep="h0.out")
    found = gpt2(ids, **params, n_head=4, tap=lambda name, x: swapped.get(name, x))
    assert same(found, gpt2(others, **params, n_head=4))


def test_a_tap_works_with_a_cache_and_in_batches(params):
    seen = {}

    def tap(name, x):
        seen[name] = x.shape
        return x

    cache = new_cache(params, 4, n_rows=3)
    gpt2([[1, 2]] * 3, **params, n_head=4, cache=cache)
    gpt2([[3]] * 3, **params, n_head=4, cache=cache, tap=tap)
    assert seen["h1.attn.weights"] == (3, 4, 1, 3)
    assert seen["logits"] == (3, 1, 300)


def test_the_lens_reads_each_layer_through_the_head(params, expected):
    ids = expected["ids"]
    best, likely = logit_lens(ids, params, 4)
    assert best.shape == likely.shape == (3, 24)
    assert (best[-1] == expected["logits"].argmax(-1)).all()
    exps = np.exp(expected["logits"].astype(np.float64))
    assert np.allclose(likely[-1], (exps / exps.sum(-1, keepdims=True)).max(-1), atol=1e-5)
    for row, x in zip(best, expected["hidden_states"][:2], strict=False):
        g, b = params["ln_f"]["g"], params["ln_f"]["b"]
        normed = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * g + b
        assert (row == (normed @ params["wte"].T).argmax(-1)).all()


def test_the_lens_uses_a_head_of_its_own(model_folder, expected):
    params = load(model_folder("untied")).params
    best, _ = logit_lens(expected["ids"], params, 4)
    assert (best[-1] == expected["logits/untied"].argmax(-1)).all()


@pytest.mark.parametrize("function", [trace, logit_lens])
@pytest.mark.parametrize("n_head", [0, 3, -4])
def test_heads_that_do_not_divide(params, function, n_head):
    with pytest.raises(PicogptError, match=r"^n_head: is "):
        function([1], params, n_head)


def test_the_lens_of_damaged_weights(params):
    damaged = {**params, "wpe": np.full_like(params["wpe"], np.nan)}
    with pytest.raises(PicogptError, match="nan or infinite; the weights are damaged"):
        logit_lens([1], damaged, 4)


def test_no_head_of_its_own_is_none(params):
    found, _ = logit_lens([1, 2], {**params, "lm_head": None}, 4)
    assert (found == logit_lens([1, 2], params, 4)[0]).all()
