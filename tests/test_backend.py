"""Arrays of other libraries: CuPy's, by a stand-in here and in earnest where there is a GPU."""

import math
import sys
import types

import numpy as np
import pytest
import standin
from conftest import DATA

from picogpt import (
    PicogptError,
    generate,
    generate_batch,
    gpt2,
    lm_loss,
    load,
    logit_lens,
    merge_adapter,
    new_cache,
    next_tokens,
    score,
    stream,
    to_backend,
    token_logprobs,
    trace,
)
from picogpt.backend import array_module, erf, to_numpy
from picogpt.cli import main


@pytest.fixture(params=["stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def cupy(request, monkeypatch):
    """The module that arrays on the GPU belong to."""
    if request.param == "gpu":
        module = pytest.importorskip("cupy")
        try:
            module.cuda.runtime.getDeviceCount()
        except module.cuda.runtime.CUDARuntimeError as error:
            pytest.skip(f"no GPU: {error}")
        return module
    monkeypatch.setitem(sys.modules, "cupy", standin)
    special = types.SimpleNamespace(erf=lambda x: standin.ndarray(erf(x.get())))
    monkeypatch.setitem(sys.modules, "cupyx.scipy.special", special)
    return standin


@pytest.fixture
def model(model_folder):
    return load(model_folder())


@pytest.fixture
def params(model):
    return model.params


@pytest.fixture
def on_gpu(cupy, params):
    return to_backend(params, "cupy")


IDS = [5, 141, 59, 26, 53, 58, 97, 93]


def same(found, expected):
    found, expected = to_numpy(found), to_numpy(expected)
    return np.abs(found - expected).max() <= 1e-4 + 2e-6 * np.abs(expected).max()


def test_the_namespace_is_that_of_the_array(cupy):
    assert array_module(np.zeros(2)) is np
    assert array_module(np.float32(1)) is np
    assert array_module(cupy.zeros(2)) is cupy
    assert array_module(1, None, [2], cupy.zeros(2), np.arange(3)) is cupy
    assert array_module(np.arange(3)) is np


def test_several_libraries_in_one_call_are_refused(cupy, params, on_gpu):
    with pytest.raises(TypeError) as error:
        array_module(np.zeros(2), cupy.zeros(2))
    names = ", ".join(sorted(["numpy", cupy.__name__]))
    message = f"arrays of several libraries: {names}; move them with to_backend"
    assert str(error.value) == message
    for mixed in (
        {**params, "wte": on_gpu["wte"]},
        {**params, "wpe": on_gpu["wpe"]},
        {**params, "lm_head": on_gpu["wte"]},
        {**params, "ln_f": on_gpu["ln_f"]},
        {**on_gpu, "blocks": params["blocks"]},
    ):
        with pytest.raises(TypeError, match=r"arrays of several libraries|unsupported"):
            gpt2(IDS, **mixed, n_head=4)
    with pytest.raises(TypeError, match="arrays of several libraries"):
        gpt2(cupy.asarray(IDS), **params, n_head=4)
    with pytest.raises(TypeError, match="arrays of several libraries"):
        gpt2(IDS, **on_gpu, n_head=4, cache=new_cache(params, 4))


def test_what_is_no_array(cupy):
    with pytest.raises(TypeError) as error:
        array_module(2.0, None)
    assert str(error.value) == "no array: float, NoneType"


def leaves(tree):
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, list):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def test_moving_there_and_back_keeps_everything_and_shares_nothing(cupy, model_folder):
    params = load(model_folder("eps")).params
    params["wpe"] = params["wpe"].astype(np.float16)
    there = to_backend(params, "cupy")
    back = to_backend(there, "numpy")
    assert list(there) == list(back) == list(params)
    for a, b, c in zip(leaves(params), leaves(there), leaves(back), strict=True):
        if isinstance(a, float):
            assert a == b == c == pytest.approx(0.1)
            continue
        assert isinstance(b, cupy.ndarray)
        assert type(c) is np.ndarray
        assert a.dtype == b.dtype == c.dtype
        assert (a == c).all()
        assert not np.shares_memory(a, c)
    copy = to_backend(params, "numpy")
    assert not np.shares_memory(copy["wte"], params["wte"])
    copy["wte"][0] = 0
    assert params["wte"][0].any()


@pytest.mark.parametrize("name", ["torch", "", None])
def test_other_backends(params, name):
    with pytest.raises(PicogptError) as error:
        to_backend(params, name)
    assert str(error.value) == f"backend: is {name!r}; expected numpy, cupy, jax"


@pytest.mark.parametrize("name", ["cupy", "jax"])
def test_a_library_that_is_not_installed(params, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PicogptError) as error:
        to_backend(params, name)
    package = "cupy-cuda12x" if name == "cupy" else name
    assert str(error.value) == f'{name}: is not installed; run "pip install {package}"'


def test_a_machine_without_a_gpu(params, monkeypatch):
    def fail():
        raise standin.CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")

    monkeypatch.setitem(sys.modules, "cupy", standin)
    monkeypatch.setattr(standin.cuda.runtime, "getDeviceCount", fail)
    with pytest.raises(PicogptError) as error:
        to_backend(params, "cupy")
    reason = "cudaErrorNoDevice: no CUDA-capable device is detected"
    assert str(error.value) == f"cupy: finds no GPU ({reason}); use another backend"


@pytest.mark.parametrize("name", ["plain", "untied", "eps", "narrow", "exact"])
def test_logits(cupy, model_folder, name):
    params = load(model_folder(name)).params
    on_gpu = to_backend(params, "cupy")
    found = gpt2(IDS, **on_gpu, n_head=4)
    assert isinstance(found, cupy.ndarray)
    assert found.dtype == np.float32
    assert same(found, gpt2(IDS, **params, n_head=4))


def test_a_cache_stays_there(cupy, params, on_gpu):
    wanted = gpt2(IDS, **params, n_head=4)
    cache = new_cache(on_gpu, 4)
    for part in (IDS[:5], IDS[5:6], IDS[6:]):
        logits = gpt2(part, **on_gpu, n_head=4, cache=cache)
        assert same(logits, wanted[cache["n_past"] - len(part) : cache["n_past"]])
    assert isinstance(cache["blocks"][1]["v"], cupy.ndarray)


OPTIONS = [
    {},
    {"top_k": 5, "seed": 3},
    {"repetition_penalty": 1.5},
    {"stop_ids": [104]},
    {"overflow": "slide"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_generation_gives_the_same_ids(params, on_gpu, options):
    n = 60 if options == {"overflow": "slide"} else 20
    assert generate(IDS, on_gpu, 4, n, **options) == generate(IDS, params, 4, n, **options)
    rows = [IDS, IDS[:1], IDS[:3]]
    wanted = generate_batch(rows, params, 4, n, **options)
    assert generate_batch(rows, on_gpu, 4, n, **options) == wanted


def test_one_transfer_for_each_token(monkeypatch, params):
    monkeypatch.setitem(sys.modules, "cupy", standin)
    on_gpu = to_backend(params, "cupy")
    monkeypatch.setattr(standin, "n_transfers", 0)
    for i, _ in enumerate(stream(IDS, on_gpu, 4, 10), 1):
        assert standin.n_transfers == i
    generate_batch([IDS, IDS[:3]], on_gpu, 4, 10)
    assert standin.n_transfers == 20


def test_scores_traces_and_the_rest(model, on_gpu):
    encoder, _, params = model
    text = "the king and his daughter, and the king's daughter"
    assert score(text, encoder, on_gpu, 4).nll == pytest.approx(
        score(text, encoder, params, 4).nll, rel=1e-5
    )
    ids = encoder.encode(text) * 2
    found, wanted = token_logprobs(ids, on_gpu, 4), token_logprobs(ids, params, 4)
    assert np.abs(found - wanted)[1:].max() < 1e-4
    for name, array in trace(IDS, on_gpu, 4).items():
        assert same(array, trace(IDS, params, 4)[name])
    for found, wanted in zip(logit_lens(IDS, on_gpu, 4), logit_lens(IDS, params, 4), strict=True):
        assert np.abs(found - wanted).max() < 1e-5
    found, wanted = next_tokens(IDS, on_gpu, 4), next_tokens(IDS, params, 4)
    assert found[0].tolist() == wanted[0].tolist()
    assert np.abs(found[1] - wanted[1]).max() < 1e-5
    assert float(to_numpy(lm_loss(on_gpu, IDS, 4))) == pytest.approx(
        float(lm_loss(params, IDS, 4)), rel=1e-5
    )


def test_an_adapter_is_merged_there(cupy, params, on_gpu):
    merged = merge_adapter(on_gpu, DATA / "adapter")
    assert isinstance(merged["blocks"][0]["attn"]["c_attn"]["w"], cupy.ndarray)
    assert merged["wte"] is on_gpu["wte"]
    wanted = gpt2(IDS, **merge_adapter(params, DATA / "adapter"), n_head=4)
    assert same(gpt2(IDS, **merged, n_head=4), wanted)


def test_the_loss_is_the_mean_of_what_is_scored(params):
    wanted = -token_logprobs(IDS, params, 4)[1:].mean()
    assert lm_loss(params, IDS, 4) == pytest.approx(wanted, rel=1e-6)
    assert lm_loss(params, np.array([IDS, IDS]), 4) == pytest.approx(wanted, rel=1e-6)
    assert lm_loss(params, IDS, 4).dtype == np.float32


def test_pictures_of_them(model, on_gpu):
    from picogpt import attention_plot, lens_plot

    for draw in (attention_plot, lens_plot):
        assert draw("the king", model.encoder, on_gpu, 4).axes


@pytest.mark.parametrize(
    "verb", [["the king", "--n-tokens", "5"], ["next", "the"], ["lens", "the"], ["score", "x.txt"]]
)
def test_the_command_runs_on_it(cupy, model_folder, tmp_path, monkeypatch, capsys, verb):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("the king", encoding="utf-8")
    arguments = [*verb, "--model", str(model_folder())]
    assert main(arguments) == 0
    wanted = capsys.readouterr()
    assert main([*arguments, "--backend", "cupy"]) == 0
    assert capsys.readouterr() == wanted


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 5e-7), (np.float64, 1e-8)])
def test_erf_is_pythons(dtype, tolerance):
    rng = np.random.default_rng(0)
    x = np.concatenate([np.linspace(-9, 9, 20_001), rng.normal(size=2_000), [0.0, -0.0]])
    x = x.astype(dtype)
    kept = x.copy()
    found = erf(x)
    assert found.dtype == dtype
    assert np.abs(found - [math.erf(value) for value in x]).max() < tolerance
    assert (x == kept).all()
    assert (erf(-x) == -found).all()
    ends = erf(np.array([-np.inf, -1e4, 1e-30, 1e4, np.inf], dtype))
    assert np.allclose(ends, [-1, -1, 0, 1, 1], atol=1e-7)
    assert np.isnan(erf(np.array([np.nan], dtype)))
    assert erf(np.zeros((2, 0, 3), dtype)).shape == (2, 0, 3)
