"""What the documents say is so."""

import doctest
import importlib
import inspect
import json
import os
import pkgutil
import pydoc
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import picogpt
from picogpt import Encoder

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
MODULES = [
    picogpt,
    *(
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(picogpt.__path__, "picogpt.")
        if found.name not in ("picogpt.__main__", "picogpt.weights")
    ),
]
EXAMPLES = [
    example
    for module in MODULES
    for example in doctest.DocTestFinder().find(module, extraglobs={"np": np})
    if example.examples
]
NEEDS = {"attention_plot": "matplotlib", "lens_plot": "matplotlib", "save": "safetensors"}
PUBLIC = [getattr(picogpt, name) for name in picogpt.__all__]
PUBLIC += [
    getattr(Encoder, name)
    for name in vars(Encoder)
    if name == "__init__" or not name.startswith("_")
]


def shell(command, **options):
    environment = os.environ | {"COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        check=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        **options,
    ).stdout.decode()


def test_the_first_command_prints_what_the_readme_shows(tmp_path):
    command, _, output = BLOCKS[0][1].partition("\n")
    assert command == '$ pip install . && picogpt "Once upon a time" --n-tokens 40'
    run = ["picogpt", "Once upon a time", "--n-tokens", "40"]
    assert shell(run, cwd=tmp_path) == output


def test_the_options_are_those_of_help():
    assert shell(["picogpt", "--help"]) in [text for _, text in BLOCKS]


def test_python_examples_run(capsys, tmp_path, monkeypatch):
    names = {}
    examples = [text for language, text in BLOCKS if language == "python"]
    assert len(examples) == 9
    monkeypatch.chdir(tmp_path)
    for text in examples:
        exec(text, names)
    assert names["logits"].shape == (4, 4096)
    assert len(capsys.readouterr().out.splitlines()) >= 4
    assert names["weights"].shape == (8, 4, 4)
    assert not np.array_equal(names["silenced"], names["logits"])


def test_ci_runs_the_readmes_test_command():
    commands = [text[2:].splitlines()[0] for _, text in BLOCKS if text.startswith("$ ")]
    tests = [command for command in commands if "pytest" in command]
    assert len(tests) == 1
    assert tests[0] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_the_example_of_tokens():
    command = '$ picogpt tokens "Not all heroes wear capes."\n'
    (output,) = (text[len(command) :] for _, text in BLOCKS if text.startswith(command))
    assert shell(["picogpt", "tokens", "Not all heroes wear capes."]) == output


@pytest.mark.parametrize("verb", ["next", "score"])
def test_figures_are_those_of_the_command_beside_them(verb):
    """But for the last digit of some, which differs from machine to machine."""
    (block,) = (text for _, text in BLOCKS if text.startswith(f"$ picogpt {verb} "))
    command, _, output = block[2:].partition("\n")
    found = shell(shlex.split(command), cwd=ROOT)
    assert len(found.split()) == len(output.split())
    for new, old in zip(found.split(), output.split(), strict=True):
        if new != old:
            numbers = [float(text.strip("%")) for text in (new, old)]
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-2)


def test_commands_that_make_the_pictures_work(tmp_path):
    pictures = [text[2:-1] for _, text in BLOCKS if " -o docs/" in text]
    assert len(pictures) == 2
    for command in pictures:
        *arguments, path = shlex.split(command)
        assert (ROOT / path).read_bytes().startswith(b"\x89PNG")
        shell([*arguments, str(tmp_path / "x.png")])
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_files_that_the_readme_links_to_are_there():
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", README)
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_in_docstrings(example, tmp_path, monkeypatch):
    """Those of public names as somebody would type them, so with nothing but what they import."""
    if library := NEEDS.get(example.name.rpartition(".")[2]):
        pytest.importorskip(library)
    if example.name == "picogpt.adapter.merge_adapter":
        write_adapter(tmp_path / "path" / "to" / "adapter")
    is_public = any(name in picogpt.__all__ for name in example.name.split("."))
    example.globs = {} if is_public or example.name == "picogpt" else example.globs
    monkeypatch.chdir(tmp_path)
    told = []
    results = doctest.DocTestRunner().run(example, out=told.append)
    assert not results.failed, "".join(told)


def write_adapter(folder):
    """Writes a LoRA adapter for `tales`, of one matrix, as PEFT does."""
    numpy = pytest.importorskip("safetensors.numpy")
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 1, "target_modules": ["h.0.attn.c_attn"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    name = "base_model.model.transformer.h.0.attn.c_attn"
    a, b = np.ones((1, 256), np.float32), np.ones((768, 1), np.float32)
    tensors = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    numpy.save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("name", ["picogpt", *picogpt.__all__])
def test_every_public_name_has_an_example(name):
    found = picogpt if name == "picogpt" else getattr(picogpt, name)
    assert doctest.DocTestParser().get_examples(found.__doc__)


@pytest.mark.parametrize("name", ["gelu", "softmax", "layer_norm", "linear", "attention"])
def test_the_mathematics_has_examples(name):
    assert f"picogpt.model.{name}" in [example.name for example in EXAMPLES]


@pytest.mark.parametrize("found", PUBLIC, ids=lambda found: found.__qualname__)
def test_help_begins_with_a_sentence_and_names_each_argument(found):
    sentence, _, rest = inspect.getdoc(found).partition("\n")
    assert re.match(r"[A-Z].+\.$", sentence)
    assert not rest or rest.startswith("\n")
    is_class = inspect.isclass(found) and not hasattr(found, "_fields")
    arguments = [] if is_class else [*inspect.signature(found).parameters]
    missing = [name for name in arguments if not re.search(rf"\b{name}\b", found.__doc__)]
    assert [name for name in missing if name != "self"] == []


def test_help_of_the_package_names_everything_in_it():
    text = pydoc.render_doc(picogpt, renderer=pydoc.plaintext)
    description = text.partition("DESCRIPTION")[2].partition("PACKAGE CONTENTS")[0]
    named = set(re.findall(r"`(\w+)`", description))
    assert named == set(picogpt.__all__)


def test_help_shows_no_addresses_and_no_private_names():
    for name in picogpt.__all__:
        signature = pydoc.render_doc(getattr(picogpt, name), renderer=pydoc.plaintext).split("\n")
        assert not re.search(r"0x[0-9a-f]{6}|<\w+ object|\b_[a-z]", signature[2])
