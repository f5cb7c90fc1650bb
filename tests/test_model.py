"""The forward pass: hand-worked numbers, a second opinion in plain loops, and its promises."""

import ast
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picogpt import layouts, load, model, new_cache
from picogpt.model import attention, gelu, gpt2, layer_norm, linear, softmax

SOURCE = model.__spec__.loader.get_source("picogpt.model")

ORDER = ["see", "gelu", "softmax", "layer_norm", "linear", "ffn", "attention", "mha"]
ORDER += ["transformer_block", "gpt2"]


@pytest.fixture
def tiny(model_folder):
    return load(model_folder())


def same(found, expected):
    """The measure of agreement: 1e-4, and 2e-6 of the largest logit."""
    return np.abs(found - expected).max() <= 1e-4 + 2e-6 * np.abs(expected).max()


def random_model(rng):
    """A small model: -> params, n_head. Weights are large, so that a mistake shows."""
    n_head = int(rng.integers(1, 5))
    hparams = {
        "n_vocab": int(rng.integers(2, 60)),
        "n_ctx": int(rng.integers(1, 40)),
        "n_embd": n_head * int(rng.integers(1, 9)),
        "n_layer": int(rng.integers(1, 4)),
        "n_head": n_head,
    }

    def leaf(name, shape):
        return rng.normal(name.endswith("g"), 0.4, shape).astype(np.float32)

    options = {
        "n_inner": int(rng.integers(1, 99)),
        "has_head": bool(rng.integers(2)),
        "eps": float(rng.choice([1e-5, 0.1])),
        "has_erf": bool(rng.integers(2)),
    }
    return layouts.parameter_tree(hparams, leaf, **options), n_head


def float64(tree):
    if isinstance(tree, dict):
        return {key: float64(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [float64(value) for value in tree]
    return np.array(tree, np.float64)


def naive_gpt2(ids, params, n_head):
    """GPT-2 in float64, a number, a head and a query at a time where that is easier to trust."""
    p = float64(params)

    def norm(x, g, b, eps=1e-5):
        return (x - x.mean()) / math.sqrt(x.var() + eps) * g + b

    def tanh_gelu(x):
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def exact_gelu(x):
        return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))

    xs = [p["wte"][token] + p["wpe"][i] for i, token in enumerate(ids)]
    for block in p["blocks"]:
        attn, mlp = block["attn"], block["mlp"]
        normed = [norm(x, **block["ln_1"]) for x in xs]
        qkv = [x @ attn["c_attn"]["w"] + attn["c_attn"]["b"] for x in normed]
        d = len(xs[0]) // n_head
        for i in range(len(xs)):
            heads = []
            for h in range(n_head):
                q = np.split(qkv[i], 3)[0][h * d : (h + 1) * d]
                ks = [np.split(qkv[j], 3)[1][h * d : (h + 1) * d] for j in range(i + 1)]
                vs = [np.split(qkv[j], 3)[2][h * d : (h + 1) * d] for j in range(i + 1)]
                weights = np.exp([q @ k / math.sqrt(d) for k in ks])
                heads.append(sum(w * v for w, v in zip(weights / weights.sum(), vs, strict=True)))
            xs[i] = xs[i] + np.concatenate(heads) @ attn["c_proj"]["w"] + attn["c_proj"]["b"]
        for i, x in enumerate(xs):
            up = norm(x, **block["ln_2"]) @ mlp["c_fc"]["w"] + mlp["c_fc"]["b"]
            act = exact_gelu if "erf" in mlp else tanh_gelu
            xs[i] = x + [act(u) for u in up] @ mlp["c_proj"]["w"] + mlp["c_proj"]["b"]
    head = p.get("lm_head", p["wte"])
    return np.array([norm(x, **p["ln_f"]) @ head.T for x in xs])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_exact_gelu_is_x_times_the_normal_distribution(dtype):
    x = np.linspace(-6, 6, 1_001).reshape(7, 143).astype(dtype)
    found = gelu(x, exact=True)
    wanted = [[0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in row.tolist()] for row in x]
    assert found.dtype == dtype
    assert np.abs(found - wanted).max() < 1e-6
    assert np.abs(gelu(x) - wanted).max() > 1e-4  # the tanh form is another function


def test_gelu_is_the_tanh_form():
    found = gelu(np.array([[1, 2], [-2, 0.5]]))
    assert np.allclose(found, [[0.84119, 1.95460], [-0.04540, 0.34571]], atol=5e-6)
    assert abs(gelu(np.array(1.0)) - 0.8411919906) < 1e-10


def test_softmax():
    found = softmax(np.array([[2.0, 100.0], [-5.0, 0.0]]))
    assert np.allclose(found[1], [0.0066929, 0.9933071], atol=5e-8)
    assert np.allclose(found.sum(-1), 1.0, atol=1e-15)


@pytest.mark.parametrize("row", [[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [0.0, -np.inf, -np.inf]])
def test_softmax_of_extreme_rows_is_finite(row):
    found = softmax(np.array(row, np.float32))
    assert np.isfinite(found).all()
    assert found.sum() == pytest.approx(1.0)


def test_layer_norm():
    found = layer_norm(np.array([[2.0, 2, 3], [-5, 0, 1]]), np.ones(3), np.zeros(3))
    expected = [[-0.70709, -0.70709, 1.41418], [-1.397, 0.508, 0.889]]
    assert np.allclose(found, expected, atol=5e-4)
    assert np.allclose(found[0], expected[0], atol=1e-5)


def test_linear_works_on_the_last_axis():
    rng = np.random.default_rng(0)
    x, w, b = rng.normal(size=(2, 3, 4)), rng.normal(size=(4, 5)), rng.normal(size=5)
    assert np.allclose(linear(x, w, b), np.einsum("bsi,io->bso", x, w) + b)
    assert np.allclose(linear(x, w), np.einsum("bsi,io->bso", x, w))


def test_attention_of_a_query_that_sees_one_key_is_that_value():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 4, 8))
    assert np.allclose(attention(q, k, v, np.eye(4, dtype=bool)), v)


def test_logits_equal_the_originals(tiny, expected):
    found = gpt2(expected["ids"], **tiny.params, n_head=4)
    assert found.shape == (24, 300)
    assert same(found, expected["logits"])


def test_logits_equal_plain_loops(tiny, expected):
    ids = expected["ids"]
    wanted = naive_gpt2(ids, tiny.params, 4)
    assert same(gpt2(ids, **tiny.params, n_head=4), wanted)
    # In float64 the gap closes, so it was rounding and no other formula.
    assert np.abs(gpt2(ids, **float64(tiny.params), n_head=4) - wanted).max() < 1e-12


@pytest.mark.parametrize("seed", range(8))
def test_other_heads_eps_and_widths_equal_the_naive_loop(seed):
    """Half of these models have an output head of their own, half an eps of 0.1."""
    rng = np.random.default_rng(seed)
    params, n_head = random_model(rng)
    ids = rng.integers(len(params["wte"]), size=len(params["wpe"]))
    assert same(gpt2(ids, **params, n_head=n_head), naive_gpt2(ids, params, n_head))


def test_a_batch_gives_the_single_rows(tiny):
    rows = np.random.default_rng(1).integers(300, size=(3, 12))
    batch = gpt2(rows, **tiny.params, n_head=4)
    assert batch.shape == (3, 12, 300)
    for row, logits in zip(rows, batch, strict=True):
        assert same(logits, gpt2(row, **tiny.params, n_head=4))


@pytest.mark.parametrize("t", [0, 1, 7, 23])
def test_later_tokens_leave_earlier_logits_exactly_as_they_were(tiny, expected, t):
    ids = expected["ids"]
    changed = np.concatenate([ids[:t], (ids[t:] + 1) % 300])
    before, after = (gpt2(x, **tiny.params, n_head=4) for x in (ids, changed))
    assert (before[:t] == after[:t]).all()
    assert (before[t:] != after[t:]).any(-1).all()


def test_float32_stays_float32_everywhere(tiny, expected, monkeypatch):
    seen = []
    names = ORDER[:-1]

    def watch(name, function):
        def watched(*args, **kwargs):
            result = function(*args, **kwargs)
            seen.append((name, result.dtype))
            return result

        monkeypatch.setattr(model, name, watched)

    for name in names:
        watch(name, getattr(model, name))
    assert gpt2(expected["ids"], **tiny.params, n_head=4).dtype == np.float32
    assert {name for name, _ in seen} == set(names)
    assert {dtype for _, dtype in seen} == {np.dtype(np.float32)}


def test_nothing_that_was_passed_is_changed(tiny, expected):
    ids = expected["ids"].tolist()
    wte = tiny.params["wte"].copy()
    params = float64(tiny.params)  # writable, unlike what is mapped from a file
    copy = float64(params)
    gpt2(ids, **params, n_head=4)
    assert ids == expected["ids"].tolist()
    assert (tiny.params["wte"] == wte).all()

    def equal(a, b):
        if isinstance(a, dict):
            return all(equal(a[key], b[key]) for key in a)
        if isinstance(a, list):
            return all(map(equal, a, b))
        return (a == b).all()

    assert equal(params, copy)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.data())
def test_cached_chunked_one_by_one_batched_and_plain_runs_agree(seed, data):
    params, n_head = random_model(np.random.default_rng(seed))
    n_vocab, n_ctx = len(params["wte"]), len(params["wpe"])
    lengths = st.lists(st.integers(1, n_ctx), min_size=1, max_size=4)
    rows = [data.draw(st.lists(st.integers(0, n_vocab - 1), min_size=n, max_size=n))
            for n in data.draw(lengths)]  # fmt: skip
    plain = [gpt2(row, **params, n_head=n_head) for row in rows]
    for row, wanted in zip(rows, plain, strict=True):
        cache, chunks = new_cache(params, n_head), []
        while (start := cache["n_past"]) < len(row):
            chunk = row[start : start + data.draw(st.integers(1, len(row)))]
            chunks.append(gpt2(chunk, **params, n_head=n_head, cache=cache))
        assert same(np.concatenate(chunks), wanted)
        assert {a.dtype for past in cache["blocks"] for a in past.values()} == {np.dtype("f4")}
        cache = new_cache(params, n_head)
        singles = [gpt2([token], **params, n_head=n_head, cache=cache) for token in row]
        assert same(np.concatenate(singles), wanted)
    longest = max(map(len, rows))
    n_pad = np.array([longest - len(row) for row in rows])
    padded = [[0] * (longest - len(row)) + row for row in rows]
    cut = data.draw(st.integers(1, longest))
    cache = new_cache(params, n_head, n_rows=len(rows))
    parts = [np.array(padded)[:, :cut], np.array(padded)[:, cut:]]
    batch = np.concatenate(
        [gpt2(p, **params, n_head=n_head, n_pad=n_pad, cache=cache) for p in parts if p.size], 1
    )
    uncached = gpt2(padded, **params, n_head=n_head, n_pad=n_pad)
    assert np.isfinite(batch).all()  # of the padding, too
    for n, in_batch, alone, wanted in zip(n_pad, batch, uncached, plain, strict=True):
        assert same(in_batch[n:], wanted)
        assert same(alone[n:], wanted)


def test_last_gives_the_last_row_only(tiny, expected):
    ids = expected["ids"]
    found = gpt2(ids, **tiny.params, n_head=4, last=True)
    assert found.shape == (1, 300)
    assert same(found[0], expected["logits"][-1])
    assert gpt2([ids, ids], **tiny.params, n_head=4, last=True).shape == (2, 1, 300)


def test_a_cache_has_room_for_the_window_from_the_start(tiny):
    cache = new_cache(tiny.params, 4)
    assert cache["n_past"] == 0
    assert [past["k"].shape for past in cache["blocks"]] == [(4, 32, 4)] * 2
    arrays = [past[name] for past in cache["blocks"] for name in "kv"]
    gpt2(range(31), **tiny.params, n_head=4, cache=cache)
    gpt2([1], **tiny.params, n_head=4, cache=cache)
    assert cache["n_past"] == 32
    assert all(a is b for a, b in zip(arrays, (past[name] for past in cache["blocks"] for name in "kv"), strict=True))  # fmt: skip # noqa: E501
    assert new_cache(tiny.params, 4, n_rows=3)["blocks"][0]["v"].shape == (3, 4, 32, 4)
    assert new_cache(tiny.params, 4, n_ctx=5)["blocks"][0]["v"].shape == (4, 5, 4)


def test_the_forward_pass_is_at_most_60_code_lines():
    """Lines of up to 100 characters; imports, blank lines, comments and docstrings do not count."""
    tree = ast.parse(SOURCE)
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            skipped |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped |= set(range(node.lineno, node.end_lineno + 1))
    lines = SOURCE.splitlines()
    code = [
        line
        for number, line in enumerate(lines, 1)
        if number not in skipped and line.strip() and not line.strip().startswith("#")
    ]
    assert 30 < len(code) <= 60
    assert max(map(len, lines)) <= 100


def test_functions_stand_in_the_papers_order_and_use_only_those_above():
    tree = ast.parse(SOURCE)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [function.name for function in functions] == ORDER
    for i, function in enumerate(functions):
        used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        assert not used & set(ORDER[i:])
        loops = [node for node in ast.walk(function) if isinstance(node, ast.For)]
        assert len(loops) == (function.name == "gpt2")  # over the blocks; none over heads
