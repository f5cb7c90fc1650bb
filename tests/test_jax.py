"""The same forward pass on JAX: compiled, differentiated, mapped over batches, and generating."""

import numpy as np
import pytest
from conftest import DATA

from picogpt import (
    PicogptError,
    generate,
    generate_batch,
    gpt2,
    lm_loss,
    load,
    merge_adapter,
    new_cache,
    score,
    stream,
    to_backend,
    trace,
)

pytestmark = [
    pytest.mark.reference,
    pytest.mark.filterwarnings("default"),  # the original's own
]
jax = pytest.importorskip("jax")


@pytest.fixture
def numpy_params(model_folder):
    return load(model_folder()).params


@pytest.fixture
def params(numpy_params):
    return to_backend(numpy_params, "jax")


def same(found, expected):
    expected = np.asarray(expected)
    return np.abs(np.asarray(found) - expected).max() <= 1e-4 + 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["plain", "untied", "eps", "narrow", "exact"])
def test_logits_equal_numpys_compiled_or_not(model_folder, expected, name):
    numpy_params = load(model_folder(name)).params
    params = to_backend(numpy_params, "jax")
    wanted = gpt2(expected["ids"], **numpy_params, n_head=4)
    found = gpt2(expected["ids"], **params, n_head=4)
    assert isinstance(found, jax.Array)
    assert found.dtype == np.float32
    assert same(found, wanted)
    compiled = jax.jit(lambda params, ids: gpt2(ids, **params, n_head=4))
    assert same(compiled(params, expected["ids"]), wanted)


def test_a_mapped_batch_is_a_batch_is_single_runs(params, expected):
    rows = np.stack([expected["ids"], expected["ids"][::-1]])
    batch = gpt2(rows, **params, n_head=4)
    mapped = jax.vmap(lambda ids: gpt2(ids, **params, n_head=4))(rows)
    assert same(mapped, batch)
    for row, logits in zip(rows, batch, strict=True):
        assert same(logits, gpt2(row, **params, n_head=4))


def leaves(tree, path=()):
    """-> (path, array) in the order of the tree's own keys."""
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in leaves(value, (*path, key))]
    if isinstance(tree, list):
        return [leaf for i, value in enumerate(tree) for leaf in leaves(value, (*path, i))]
    return [(path, tree)]


@pytest.mark.parametrize("name", ["plain", "untied", "exact"])
def test_gradients_equal_finite_differences_in_float64(model_folder, expected, name):
    """In a random direction for each array of the tree, and one number of each."""
    with jax.enable_x64(True):
        params = load(model_folder(name)).params
        doubles = jax.tree.map(lambda x: jax.numpy.asarray(np.float64(x)), params)
        ids = expected["ids"]
        gradient = jax.grad(lm_loss)(doubles, ids, 4)
        loss = jax.jit(lambda params: lm_loss(params, ids, 4))
        rng = np.random.default_rng(0)
        for (path, x), (_, g) in zip(leaves(doubles), leaves(gradient), strict=True):
            assert g.dtype == np.float64
            direction = rng.normal(size=x.shape)

            def moved(h, path=path, direction=direction):
                def move(place, leaf):
                    return leaf + h * direction if keys(place) == path else leaf

                return jax.tree_util.tree_map_with_path(move, doubles)

            h = 1e-5
            difference = float(loss(moved(h)) - loss(moved(-h))) / (2 * h)
            wanted = float((g * direction).sum())
            assert difference == pytest.approx(wanted, rel=1e-4, abs=1e-8)


def keys(path):
    return tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path)


def test_gradients_equal_torchs(model_folder, expected):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder = model_folder("transformers")
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float64).eval()
    ids = torch.from_numpy(expected["ids"])[None]
    model(ids, labels=ids).loss.backward()
    own = dict(model.transformer.named_parameters())
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: jax.numpy.asarray(np.float64(x)), load(folder).params)
        gradient = jax.grad(lm_loss)(params, expected["ids"], 4)
    ends = {"g": "weight", "w": "weight", "b": "bias", "wte": "wte.weight", "wpe": "wpe.weight"}
    for path, found in leaves(gradient):
        name = ".".join(map(str, path[:-1])).replace("blocks", "h")
        wanted = own[f"{name}.{ends[path[-1]]}".lstrip(".")].grad.numpy()
        assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


def test_the_loss_falls_along_the_gradient(params, expected):
    ids = expected["ids"]
    gradient = jax.grad(lm_loss)(params, ids, 4)
    step = jax.tree.map(lambda w, g: w - 3e-5 * g, params, gradient)
    squares = sum(float((g * g).sum()) for g in jax.tree.leaves(gradient))
    fall = float(lm_loss(params, ids, 4) - lm_loss(step, ids, 4))
    assert fall == pytest.approx(3e-5 * squares, rel=0.03)


@pytest.fixture
def compilations():
    """The compilations so far, which the test may clear."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def test_compilations_are_counted(compilations):
    jax.jit(lambda x: x + 41.5)(jax.numpy.zeros(7))
    assert compilations


def test_nothing_is_compiled_after_the_second_token(params, numpy_params, compilations):
    new = []
    for token in stream([1, 2, 3, 4, 5], params, 4, 20):
        if len(new) == 2:
            compilations.clear()
        new.append(token)
    assert compilations == []
    assert new == generate([1, 2, 3, 4, 5], numpy_params, 4, 20)
    for n in (6, 7, 8, 5):
        prompt = list(range(n))
        assert generate(prompt, params, 4, 20) == generate(prompt, numpy_params, 4, 20)
    assert compilations == []  # as long as they are padded to 8


def test_each_power_of_two_is_compiled_once(params, compilations):
    generate([1] * 3, params, 4, 3)
    for n in (9, 16, 12, 15):
        compilations.clear()
        generate([1] * n, params, 4, 3)
        assert len(compilations) <= (n == 9)


@pytest.mark.parametrize("n", [1, 8, 9, 31, 32])
def test_ids_equal_numpys(params, numpy_params, n):
    prompt = np.random.default_rng(n).integers(300, size=n).tolist()
    wanted = generate(prompt, numpy_params, 4, 33 - n)
    assert generate(prompt, params, 4, 33 - n) == wanted
    options = {"overflow": "slide", "top_k": 5, "seed": 1}
    wanted = generate(prompt, numpy_params, 4, 80, **options)
    assert generate(prompt, params, 4, 80, **options) == wanted


def test_batches_equal_numpys_and_rows_that_end_compile_nothing(params, numpy_params, compilations):
    rows = [[1, 2, 3], [4], [5] * 9, [7, 8]]
    for options in ({}, {"stop_ids": [104, 26, 97]}, {"overflow": "slide"}):
        n = 70 if options == {"overflow": "slide"} else 24
        wanted = generate_batch(rows, numpy_params, 4, n, **options)
        assert generate_batch(rows, params, 4, n, **options) == wanted
    stopped = generate_batch(rows, numpy_params, 4, 24, stop_ids=[wanted[0][3]])
    compilations.clear()
    assert generate_batch(rows, params, 4, 24, stop_ids=[wanted[0][3]]) == stopped
    assert len({len(row) for row in stopped}) > 1
    assert compilations == []


def test_a_cache_by_hand(params, numpy_params, expected):
    ids = expected["ids"]
    wanted = gpt2(ids, **numpy_params, n_head=4)
    cache = new_cache(params, 4)
    for part in (ids[:20], ids[20:21], ids[21:]):
        logits = gpt2(part, **params, n_head=4, cache=cache)
        assert same(logits, wanted[cache["n_past"] - len(part) : cache["n_past"]])


def test_scores_and_traces_equal_numpys(model_folder, params, numpy_params):
    encoder = load(model_folder("flat")).encoder
    text = "the king and his daughter, and " * 3
    found, wanted = (score(text, encoder, p, 4) for p in (params, numpy_params))
    assert found.nll == pytest.approx(wanted.nll, rel=1e-5)
    traced = trace([1, 2, 3], params, 4)
    for name, array in trace([1, 2, 3], numpy_params, 4).items():
        assert isinstance(traced[name], jax.Array)
        assert same(traced[name], array)


def test_an_adapter_is_merged_there(params, numpy_params, expected):
    merged = merge_adapter(params, DATA / "adapter")
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(merged))
    wanted = gpt2(expected["ids"], **merge_adapter(numpy_params, DATA / "adapter"), n_head=4)
    assert same(gpt2(expected["ids"], **merged, n_head=4), wanted)


def test_types_are_kept_or_refused(numpy_params):
    params = {"wte": np.float64([[1, 2]]), "eps": 0.1, "blocks": [{"b": np.float16([1])}]}
    with pytest.raises(PicogptError) as error:
        to_backend(params, "jax")
    assert str(error.value) == "jax: makes float32 of float64; set jax_enable_x64 before"
    with jax.enable_x64(True):
        moved = to_backend(params, "jax")
    assert moved["wte"].dtype == np.float64
    assert moved["blocks"][0]["b"].dtype == np.float16
    assert moved["eps"] == 0.1
    source = np.zeros((1000, 1000), np.float32)
    moved = to_backend({"w": source}, "jax")
    source += 1  # an array that JAX merely looked at would change with it
    assert not moved["w"].any()
    back = to_backend(moved, "numpy")["w"]
    assert back.flags.writeable
    assert not np.shares_memory(back, np.asarray(moved["w"]))


def test_several_libraries_in_one_call(params, numpy_params):
    with pytest.raises(TypeError, match=r"arrays of several libraries: jax\.numpy, numpy"):
        gpt2([1], **{**params, "blocks": numpy_params["blocks"]}, n_head=4)
    with pytest.raises(TypeError, match=r"arrays of several libraries: jax\.numpy, numpy"):
        gpt2(jax.numpy.arange(3), **numpy_params, n_head=4)
