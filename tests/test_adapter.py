import json
import re
import shutil

import numpy as np
import pytest
from conftest import DATA
from safetensors.numpy import load_file, save_file

from picogpt import PicogptError, adapter, gpt2, load, merge_adapter, save
from picogpt.cli import main

N_LAYER, N_EMBD, N_VOCAB = 2, 16, 300
SIZES = {  # of the matrices in tests/data, by the ends of their names
    "attn.c_attn": (N_EMBD, 3 * N_EMBD),
    "attn.c_proj": (N_EMBD, N_EMBD),
    "mlp.c_fc": (N_EMBD, 4 * N_EMBD),
    "mlp.c_proj": (4 * N_EMBD, N_EMBD),
}
MODULES = {
    f"transformer.h.{i}.{name}": size for i in range(N_LAYER) for name, size in SIZES.items()
}


@pytest.fixture
def base(model_folder):
    return load(model_folder("transformers"))


@pytest.fixture
def write(tmp_path):
    """A function that writes an adapter: A and B of a rank for some modules, and settings."""

    def write_adapter(modules=("attn.c_attn",), ranks=2, others=None, **settings):
        folder = tmp_path / "adapter"
        folder.mkdir(exist_ok=True)
        rng = np.random.default_rng(0)
        tensors = {f"base_model.model.{k}": v for k, v in (others or {}).items()}
        for name, (n_in, n_out) in MODULES.items():
            if name.endswith(tuple(modules)):
                rank = ranks if isinstance(ranks, int) else ranks[name]
                a, b = rng.standard_normal((rank, n_in)), rng.standard_normal((n_out, rank))
                tensors[f"base_model.model.{name}.lora_A.weight"] = a.astype(np.float32)
                tensors[f"base_model.model.{name}.lora_B.weight"] = b.astype(np.float32)
        save_file(tensors, folder / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"} | settings
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        return folder

    return write_adapter


def matrix(params, module):
    *_, layer, owner, name = module.split(".")
    return params["blocks"][int(layer)][owner][name]["w"]


def change(folder, module):
    """-> lora_A.T @ lora_B.T of a module, not scaled."""
    tensors = load_file(folder / "adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
    return a.T @ b.T


def adapted(before, after):
    """-> the modules whose matrices are other arrays; all the rest must be shared."""
    names = set()
    for module in MODULES:
        if matrix(before, module) is not matrix(after, module):
            names.add(module.removeprefix("transformer."))
    for i, block in enumerate(before["blocks"]):
        for owner in ("attn", "mlp"):
            for name, linear in block[owner].items():
                assert after["blocks"][i][owner][name]["b"] is linear["b"]
        for norm in ("ln_1", "ln_2"):
            assert after["blocks"][i][norm]["g"] is block[norm]["g"]
    for name in ("wte", "wpe"):
        assert after[name] is before[name]
    return names


def test_logits_are_those_that_peft_computes(model_folder, expected):
    _, hparams, params = load(model_folder("transformers"), adapter=DATA / "adapter")
    logits = gpt2(expected["ids"], **params, n_head=hparams["n_head"])
    np.testing.assert_allclose(logits, expected["logits/adapter"], rtol=2e-6, atol=1e-4)
    assert np.abs(logits - expected["logits"]).max() > 1


def test_the_same_adapter_fits_openais_checkpoint_of_the_same_model(model_folder, expected):
    _, hparams, params = load(model_folder("plain"), adapter=str(DATA / "adapter"))
    logits = gpt2(expected["ids"], **params, n_head=hparams["n_head"])
    np.testing.assert_allclose(logits, expected["logits/adapter"], rtol=2e-6, atol=1e-4)


def test_only_the_touched_matrices_are_copied(base):
    before = json.dumps(base.params, default=lambda x: x.tolist())
    merged = merge_adapter(base.params, DATA / "adapter")
    assert adapted(base.params, merged) == {
        f"h.{i}.{name}" for i in range(N_LAYER) for name in ("attn.c_attn", "mlp.c_proj")
    }
    assert json.dumps(base.params, default=lambda x: x.tolist()) == before
    assert "lm_head" not in merged
    assert isinstance(merged["wte"].base, np.memmap) or not merged["wte"].flags.writeable


@pytest.mark.parametrize("scale", [0.5, -1, 0])
def test_scale(base, scale):
    merged = merge_adapter(base.params, DATA / "adapter", scale=scale)
    module = "transformer.h.0.attn.c_attn"
    expected = matrix(base.params, module) + scale * 3 / 2 * change(DATA / "adapter", module)
    np.testing.assert_allclose(matrix(merged, module), expected, rtol=1e-5, atol=1e-5)
    assert matrix(merged, module).dtype == np.float32


def test_what_one_adds_minus_one_takes_away(base):
    merged = merge_adapter(base.params, DATA / "adapter")
    back = merge_adapter(merged, DATA / "adapter", scale=-1)
    for module in MODULES:
        np.testing.assert_allclose(matrix(back, module), matrix(base.params, module), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "scaling"),
    [
        ({}, 3),
        ({"lora_alpha": 0.5}, 0.25),
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"fan_in_fan_out": True}, 3),
        ({"fan_in_fan_out": False}, 3),
        ({"alpha_pattern": {"c_attn": 10}}, 5),
        ({"alpha_pattern": {"h.0.attn.c_attn": 10, "c_attn": 1}}, 5),
        ({"alpha_pattern": {"^transformer.h.0.*": 10}}, 5),
        ({"alpha_pattern": {"attn": 10}}, 3),
        ({"alpha_pattern": None, "rank_pattern": None, "target_modules": None}, 3),
    ],
)
def test_scaling(base, write, settings, scaling):
    folder = write(**settings)
    merged = merge_adapter(base.params, folder)
    module = "transformer.h.0.attn.c_attn"
    expected = matrix(base.params, module) + scaling * change(folder, module)
    np.testing.assert_allclose(matrix(merged, module), expected, rtol=1e-5, atol=1e-5)


def test_rank_pattern(base, write):
    ranks = {module: 3 if "mlp" in module else 1 for module in MODULES}
    folder = write(
        ["c_proj"], ranks, target_modules=["c_proj"], rank_pattern={"mlp.c_proj": 3}, r=1
    )
    merged = merge_adapter(base.params, folder)
    for module, scaling in {"h.1.mlp.c_proj": 2, "h.1.attn.c_proj": 6}.items():
        module = f"transformer.{module}"
        expected = matrix(base.params, module) + scaling * change(folder, module)
        np.testing.assert_allclose(matrix(merged, module), expected, rtol=1e-5, atol=1e-5)


EVERYWHERE = {name.removeprefix("transformer.") for name in MODULES}


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({}, ["attn.c_attn"]),
        ({"target_modules": ["c_fc"]}, ["mlp.c_fc"]),
        ({"target_modules": ["c_proj"]}, ["attn.c_proj", "mlp.c_proj"]),
        ({"target_modules": ["mlp.c_proj", "c_fc"]}, ["mlp.c_proj", "mlp.c_fc"]),
        ({"target_modules": ["transformer.h.1.mlp.c_fc"]}, ["h.1.mlp.c_fc"]),
        ({"target_modules": ["1.mlp.c_fc", "0.attn.c_proj"]}, ["h.1.mlp.c_fc", "h.0.attn.c_proj"]),
        ({"target_modules": r".*\.0\..*(c_attn|c_fc)"}, ["h.0.attn.c_attn", "h.0.mlp.c_fc"]),
        ({"target_modules": "all-linear"}, EVERYWHERE),
        ({"target_modules": "All-Linear"}, EVERYWHERE),
        (
            {"target_modules": ["c_proj"], "exclude_modules": ["attn.c_proj"]},
            ["mlp.c_proj"],
        ),
        (
            {"target_modules": ["c_proj"], "exclude_modules": ".*0.*"},
            ["h.1.attn.c_proj", "h.1.mlp.c_proj"],
        ),
        ({"layers_to_transform": 1}, ["h.1.attn.c_attn"]),
        ({"layers_to_transform": [0]}, ["h.0.attn.c_attn"]),
        ({"layers_to_transform": [0, 1, 7], "layers_pattern": "h"}, ["attn.c_attn"]),
        ({"layers_to_transform": [1], "layers_pattern": ["layers", "h"]}, ["h.1.attn.c_attn"]),
        ({"layers_to_transform": []}, ["attn.c_attn"]),
        (
            {
                "target_modules": ["transformer.h.1.attn.c_attn", "mlp.c_fc"],
                "layers_to_transform": [0],
            },
            ["h.1.attn.c_attn", "h.0.mlp.c_fc"],
        ),
    ],
)
def test_which_matrices_are_meant(base, write, settings, ends):
    merged = merge_adapter(base.params, write(ends, **settings))
    expected = {name for name in EVERYWHERE if name.endswith(tuple(ends))}
    assert adapted(base.params, merged) == expected


def test_an_adapter_of_the_model_without_a_head(base, write):
    folder = write(target_modules=["h.0.attn.c_attn"], modules=["h.0.attn.c_attn"])
    tensors = load_file(folder / "adapter_model.safetensors")
    bare = {name.replace("transformer.", ""): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "adapter_model.safetensors")
    merged = merge_adapter(base.params, folder)
    assert adapted(base.params, merged) == {"h.0.attn.c_attn"}


def of_shape(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def test_a_saved_embedding_leaves_the_head_as_it_was(base, write):
    wte = of_shape(N_VOCAB, N_EMBD)
    folder = write(others={"transformer.wte.weight": wte}, modules_to_save=["wte"])
    merged = merge_adapter(base.params, folder)
    np.testing.assert_array_equal(merged["wte"], wte)
    assert merged["lm_head"] is base.params["wte"]
    assert "lm_head" not in base.params


def test_a_saved_head_leaves_the_embedding_as_it_was(base, write):
    head = of_shape(N_VOCAB, N_EMBD)
    folder = write(others={"lm_head.weight": head}, modules_to_save=["lm_head"])
    merged = merge_adapter(base.params, folder)
    np.testing.assert_array_equal(merged["lm_head"], head)
    assert merged["wte"] is base.params["wte"]


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["wte", "lm_head"]},
        {"modules_to_save": ["wte", "transformer.wte"], "ensure_weight_tying": True},
    ],
)
def test_saved_embedding_and_head(model_folder, write, settings):
    wte, head = of_shape(N_VOCAB, N_EMBD), of_shape(N_VOCAB, N_EMBD) + 1
    folder = write(others={"transformer.wte.weight": wte, "lm_head.weight": head}, **settings)
    for name in ("transformers", "untied"):
        _, _, merged = load(model_folder(name), adapter=folder)
        np.testing.assert_array_equal(merged["wte"], wte)
        np.testing.assert_array_equal(merged["lm_head"], head)


def test_whole_modules_of_the_blocks(base, write):
    norm = {"weight": of_shape(N_EMBD), "bias": of_shape(N_EMBD) + 1}
    others = {f"transformer.h.{i}.ln_1.{end}": x + i for i in (0, 1) for end, x in norm.items()}
    others["transformer.wpe.weight"] = of_shape(32, N_EMBD)
    merged = merge_adapter(base.params, write(others=others, modules_to_save=["ln_1", "wpe"]))
    for i, block in enumerate(merged["blocks"]):
        np.testing.assert_array_equal(block["ln_1"]["g"], norm["weight"] + i)
        np.testing.assert_array_equal(block["ln_1"]["b"], norm["bias"] + i)
    np.testing.assert_array_equal(merged["wpe"], others["transformer.wpe.weight"])


def test_a_saved_embedding_with_rows_that_pad_the_vocabulary(model_folder, write):
    folder = model_folder("transformers")
    tensors = load_file(folder / "model.safetensors")
    wte = np.pad(tensors["transformer.wte.weight"], ((0, 20), (0, 0)))
    save_file(tensors | {"transformer.wte.weight": wte}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": N_VOCAB + 20}))
    new = of_shape(N_VOCAB + 20, N_EMBD)
    written = write(others={"transformer.wte.weight": new}, modules_to_save=["wte"])
    _, _, params = load(folder, adapter=written)
    np.testing.assert_array_equal(params["wte"], new[:N_VOCAB])
    np.testing.assert_array_equal(params["lm_head"], wte[:N_VOCAB])


def test_float16_adapters_are_widened(base, write):
    folder = write()
    tensors = load_file(folder / "adapter_model.safetensors")
    half = {name: tensor.astype(np.float16) for name, tensor in tensors.items()}
    again = {name: tensor.astype(np.float32) for name, tensor in half.items()}
    save_file(again, folder / "adapter_model.safetensors")
    widened = merge_adapter(base.params, folder)
    save_file(half, folder / "adapter_model.safetensors")
    merged = merge_adapter(base.params, folder)
    module = "h.0.attn.c_attn"
    np.testing.assert_array_equal(matrix(merged, module), matrix(widened, module))


def test_a_merged_model_can_be_saved_and_loaded(base, write, tmp_path):
    wte = of_shape(N_VOCAB, N_EMBD)
    folder = write(others={"transformer.wte.weight": wte}, modules_to_save=["wte"])
    merged = merge_adapter(base.params, folder)
    save(tmp_path / "merged", base.encoder, base.hparams, merged)
    again = load(tmp_path / "merged").params
    np.testing.assert_array_equal(again["lm_head"], merged["lm_head"])
    np.testing.assert_array_equal(
        matrix(again, "h.0.attn.c_attn"), matrix(merged, "h.0.attn.c_attn")
    )


REFUSED = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'; expected 'LORA'"),
    ({"peft_type": "ADALORA"}, "peft_type is 'ADALORA'; expected 'LORA'"),
    ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'; expected None"),
    ({"bias": "all"}, "bias is 'all'; expected 'none'"),
    ({"bias": "lora_only"}, "bias is 'lora_only'; expected 'none'"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'; expected True"),
    ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'; expected True"),
    ({"use_dora": True}, "use_dora is True; expected LoRA without it"),
    ({"lora_bias": True}, "lora_bias is True; expected LoRA without it"),
    ({"use_of_tomorrow": 1}, "use_of_tomorrow is 1; expected LoRA without it"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices is [1]; expected LoRA without it"),
    ({"layer_replication": [[0, 1]]}, "layer_replication is [[0, 1]]; expected LoRA without it"),
    ({"r": 0}, "a rank is 0; expected 1 to 2147483647"),
    ({"r": 2.0}, "r is 2.0; expected int"),
    ({"r": True}, "r is True; expected int"),
    ({"rank_pattern": {"c_attn": -1}}, "a rank is -1; expected 1 to 2147483647"),
    ({"rank_pattern": {"c_attn": "2"}}, "rank_pattern is {'c_attn': '2'}; expected dict[str, int]"),
    ({"rank_pattern": [2]}, "rank_pattern is [2]; expected dict[str, int]"),
    ({"lora_alpha": "6"}, "lora_alpha is '6'; expected float"),
    ({"lora_alpha": float("inf")}, "an alpha is inf; expected a number below 1e30"),
    ({"lora_alpha": float("nan")}, "an alpha is nan; expected a number below 1e30"),
    ({"use_rslora": "yes"}, "use_rslora is 'yes'; expected bool"),
    ({"target_modules": 3}, "target_modules is 3; expected str | list[str]"),
    ({"target_modules": [3]}, "target_modules is [3]; expected str | list[str]"),
    ({"modules_to_save": "wte"}, "modules_to_save is 'wte'; expected list[str]"),
    ({"layers_to_transform": "0"}, "layers_to_transform is '0'; expected int | list[int]"),
    ({"arrow_config": {}}, "arrow_config is {}; expected LoRA without it"),
    ({"alora_invocation_tokens": []}, "alora_invocation_tokens is []; expected LoRA without it"),
    (
        {"target_modules": "c_attn", "layers_to_transform": 1},
        "layers_to_transform and a regular expression in target_modules; expected one of them",
    ),
    ({"layers_pattern": "h"}, "layers_pattern without layers_to_transform; expected both"),
    (
        {"target_modules": ["q_proj", "v_proj"]},
        "target_modules ['q_proj', 'v_proj'] match nothing; expected c_attn, c_proj or c_fc of a "
        "GPT-2",
    ),
    (
        {"target_modules": []},
        "target_modules [] match nothing; expected c_attn, c_proj or c_fc of a GPT-2",
    ),
    (
        {"target_modules": ["c_attn", "wte", "lm_head"]},
        "target_modules ['c_attn', 'wte', 'lm_head'] match transformer.wte, lm_head; expected "
        "c_attn, c_proj or c_fc of a GPT-2",
    ),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(base, write, settings, message):
    folder = write(**settings)
    with pytest.raises(PicogptError) as error:
        merge_adapter(base.params, folder)
    assert str(error.value) == f"{folder / 'adapter_config.json'}: {message}"


PATTERNS = [
    {"target_modules": "PATTERN"},
    {"target_modules": ["c_attn"], "exclude_modules": "PATTERN"},
    {"modules_to_save": ["PATTERN"]},
    {"rank_pattern": {"PATTERN": 2}},
    {"alpha_pattern": {"PATTERN": 2}},
    {"layers_to_transform": [0], "layers_pattern": ["PATTERN"]},
]


@pytest.mark.parametrize("settings", PATTERNS, ids=lambda settings: list(settings)[-1])
@pytest.mark.parametrize("pattern", ["(c_attn", "(" * 5000 + "a" + ")" * 5000])
def test_what_is_no_regular_expression(base, write, settings, pattern):
    settings = json.loads(json.dumps(settings).replace("PATTERN", pattern))
    folder = write(**settings)
    message = f"^{re.escape(str(folder / 'adapter_config.json'))}: '.*is no regular expression, "
    with pytest.raises(PicogptError, match=message):
        merge_adapter(base.params, folder)


def test_a_regular_expression_that_takes_for_ever(base, write, monkeypatch):
    monkeypatch.setattr(adapter, "MATCH_SECONDS", 0.05)
    folder = write(target_modules=r"((.|\w|[a-z])*)*\b[A-Z]")
    with pytest.raises(PicogptError, match=r"adapter_config\.json: '.*' takes for ever to match "):
        merge_adapter(base.params, folder)


FITS = "does not fit adapter_config.json and this model: "
H = "transformer.h."


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ranks": 3},
            f"{H}*.attn.c_attn.lora_A.weight is (3, 16), expected (2, 16); "
            f"{H}*.attn.c_attn.lora_B.weight is (48, 3), expected (48, 2)",
        ),
        (
            {"layers_to_transform": 0},
            f"unexpected {H}1.attn.c_attn.lora_A.weight; unexpected {H}1.attn.c_attn.lora_B.weight",
        ),
        (
            {"modules": ["0.attn.c_attn"]},
            f"missing {H}1.attn.c_attn.lora_A.weight; missing {H}1.attn.c_attn.lora_B.weight",
        ),
        ({"modules_to_save": ["wte"]}, "missing transformer.wte.weight"),
        (
            {"others": {"transformer.wte.weight": of_shape(N_VOCAB, N_EMBD)}},
            "unexpected transformer.wte.weight",
        ),
        (
            {
                "others": {"transformer.wte.weight": of_shape(N_VOCAB + 1, N_EMBD)},
                "modules_to_save": ["wte"],
            },
            "transformer.wte.weight is (301, 16), expected (300, 16)",
        ),
        ({"others": {"score.weight": of_shape(2, N_EMBD)}}, "unexpected score.weight"),
    ],
)
def test_tensors_must_be_those_that_the_settings_and_the_model_want(base, write, options, message):
    folder = write(**options)
    with pytest.raises(PicogptError) as error:
        merge_adapter(base.params, folder)
    assert str(error.value) == f"{folder / 'adapter_model.safetensors'}: {FITS}{message}"


@pytest.mark.parametrize("are_both_there", [False, True])
def test_names_that_are_not_pefts(base, write, are_both_there):
    folder = write()
    tensors = load_file(folder / "adapter_model.safetensors")
    bare = {name.removeprefix("base_model.model."): x for name, x in tensors.items()}
    save_file(bare | (tensors if are_both_there else {}), folder / "adapter_model.safetensors")
    message = r"attn\.lora_A\.weight does not begin with base_model\.model\., as all should$"
    with pytest.raises(PicogptError, match=message):
        merge_adapter(base.params, folder)


@pytest.mark.parametrize("name", ["base_model.model.transformer.wte.weight", "lora_A"])
def test_numbers_that_are_not_finite(base, write, name):
    folder = write(others={"transformer.wte.weight": of_shape(300, 16)}, modules_to_save=["wte"])
    tensors = load_file(folder / "adapter_model.safetensors")
    for key in tensors:
        if name in key:
            tensors[key][1, 1] = np.nan
    save_file(tensors, folder / "adapter_model.safetensors")
    message = "is not finite; it is damaged, or the training of it failed$"
    with pytest.raises(PicogptError, match=message):
        merge_adapter(base.params, folder)


@pytest.mark.filterwarnings("error")
def test_a_scale_that_makes_it_overflow(base, write):
    with pytest.raises(PicogptError, match="at its scale, is not finite"):
        merge_adapter(base.params, write(lora_alpha=1e25), scale=1e25)


def test_a_scale_of_low_precision(base):
    exact = merge_adapter(base.params, DATA / "adapter", scale=float(np.float16(0.1)))
    found = merge_adapter(base.params, DATA / "adapter", scale=np.float16(0.1))
    module = "h.0.attn.c_attn"
    np.testing.assert_array_equal(matrix(found, module), matrix(exact, module))


@pytest.mark.parametrize("params", [None, [], {"wte": 1}])
def test_params_that_are_none(params):
    message = f"params: is a {type(params).__name__}; expected that of load"
    with pytest.raises(PicogptError, match=message):
        merge_adapter(params, DATA / "adapter")


def test_a_model_in_place_of_its_params(base):
    with pytest.raises(PicogptError, match=r"^params: is a Model; expected that of load$"):
        merge_adapter(base, DATA / "adapter")


def test_blocks_in_a_tuple_are_not_changed(base):
    params = base.params | {"blocks": tuple(base.params["blocks"])}
    before = [block["attn"]["c_attn"]["w"] for block in params["blocks"]]
    merge_adapter(params, DATA / "adapter")
    for block, w in zip(params["blocks"], before, strict=True):
        assert block["attn"]["c_attn"]["w"] is w


def test_what_is_saved_whole_does_not_follow_the_file(base, write):
    wte = of_shape(N_VOCAB, N_EMBD)
    folder = write(others={"transformer.wte.weight": wte}, modules_to_save=["wte"])
    merged = merge_adapter(base.params, folder)
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(size // 2)
        file.write(bytes(size - size // 2))
    np.testing.assert_array_equal(merged["wte"], wte)


def test_no_folder_is_named(base, monkeypatch):
    monkeypatch.chdir(DATA / "adapter")
    with pytest.raises(PicogptError, match=r"^adapter: is empty; expected a folder$"):
        merge_adapter(base.params, "")


def test_the_models_of_another_size_are_refused():
    with pytest.raises(PicogptError) as error:
        load("tales", adapter=DATA / "adapter")
    assert f"adapter_model.safetensors: {FITS}" in str(error.value)
    assert "is (2, 16), expected (2, " in str(error.value)


def test_whole_modules_cannot_be_scaled(base, write):
    wte = of_shape(N_VOCAB, N_EMBD)
    folder = write(others={"transformer.wte.weight": wte}, modules_to_save=["wte"])
    message = "modules_to_save is ['wte']; whole modules cannot be scaled by 0.5"
    with pytest.raises(PicogptError, match=re.escape(message)):
        merge_adapter(base.params, folder, scale=0.5)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1", None, 1j, 1e300, 10**40])
def test_a_scale_that_is_no_number(base, scale):
    with pytest.raises(PicogptError, match=r"^scale: is .*; expected a finite number$"):
        merge_adapter(base.params, DATA / "adapter", scale=scale)


def test_no_such_folder(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PicogptError) as error:
        merge_adapter(base.params, "none")  # the message has the whole path
    assert str(error.value) == (
        f"{tmp_path / 'none'}: no such folder; expected one with adapter_config.json, "
        "adapter_model.safetensors or adapter_model.bin"
    )


def test_pytorchs_file_is_the_same_adapter(base, expected):
    """As PEFT wrote them before it had safetensors."""
    params = merge_adapter(base.params, DATA / "adapter_bin")
    logits = gpt2(expected["ids"], **params, n_head=4)
    assert np.abs(logits - expected["logits/adapter"]).max() < 1e-4


def test_an_adapter_that_would_run_code_is_refused(base, tmp_path):
    shutil.copy(DATA / "adapter_bin" / "adapter_config.json", tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(
        b"\x80\x02cposix\nsystem\nX\x01\x00\x00\x00x\x85R."
    )
    with pytest.raises(PicogptError) as error:
        merge_adapter(base.params, tmp_path)
    said = f"{tmp_path / 'adapter_model.bin'}: its pickle names posix.system, which a state dict"
    assert str(error.value).startswith(said)


def test_what_a_file_holds_counts_not_its_name(base, write):
    folder = write()
    wanted = merge_adapter(base.params, folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    found = merge_adapter(base.params, folder)
    w = [tree["blocks"][1]["attn"]["c_attn"]["w"] for tree in (wanted, found, base.params)]
    assert (w[0] == w[1]).all()
    assert (w[0] != w[2]).any()


@pytest.mark.parametrize("n_bytes", [0, 7, 100, -1])
def test_cut_files(base, write, n_bytes):
    folder = write()
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:n_bytes])
    with pytest.raises(PicogptError, match=r"adapter_model\.safetensors: "):
        merge_adapter(base.params, folder)


def test_an_adapter_is_no_model(tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(DATA / "adapter", folder)
    with pytest.raises(PicogptError) as error:
        load(folder)
    assert str(error.value) == (
        f"{folder}: holds an adapter; expected a model; load the one that it was made for, with "
        "this as its adapter"
    )


def test_command(model_folder, capsysbinary, expected):
    folder = model_folder("transformers")
    for options in ([], ["--adapter", str(DATA / "adapter")]):
        main(["next", "He", "--model", str(folder), "--top", "1", "--json", *options])
    plain, other = map(json.loads, capsysbinary.readouterr().out.splitlines())
    encoder, hparams, params = load(folder, adapter=DATA / "adapter")
    best = gpt2(encoder.encode("He"), **params, n_head=hparams["n_head"])[-1].argmax()
    assert other["next"][0]["id"] == best != plain["next"][0]["id"]


def test_command_says_what_is_wrong(capsys, tmp_path):
    assert main(["Once", "--adapter", str(tmp_path)]) == 1
    message = f"picogpt: error: {tmp_path}: lacks adapter_config.json, "
    message += "adapter_model.safetensors or adapter_model.bin\n"
    assert capsys.readouterr().err == message
