"""What the documents say is so."""

import doctest
import html
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
from picogpt import Encoder, gpt2
from picogpt.cli import VERBS

ROOT = Path(__file__).parent.parent
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
BLOCKS = {
    page: re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for page, text in PAGES.items()
}
DRAW = (ROOT / "scripts" / "draw.py").read_text(encoding="utf-8")
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


def shell(command, model=None, **options):
    environment = os.environ | {"COLUMNS": "80"} | ({"PICOGPT_MODEL": model} if model else {})
    return subprocess.run(
        [sys.executable, "-m", *command],
        capture_output=True,
        check=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        **options,
    ).stdout.decode()


def same(found, shown):
    """Whether two outputs are the same but for white space, and the last digit of some numbers,
    which differs from machine to machine."""
    found, shown = ("".join(text.split()) for text in (found, shown))
    number = r"\d+\.?\d*(?:e[+-]\d+)?"
    values = [[float(x) for x in re.findall(number, text)] for text in (found, shown)]
    return re.sub(number, "", found) == re.sub(number, "", shown) and (
        values[0] == pytest.approx(values[1], rel=1e-2)
    )


def test_the_first_command_prints_what_the_readme_shows(tmp_path):
    command, _, output = BLOCKS["README.md"][0][1].partition("\n")
    assert command == '$ pip install . && picogpt "Once upon a time" --n-tokens 40'
    run = ["picogpt", "Once upon a time", "--n-tokens", "40"]
    assert shell(run, cwd=tmp_path) == output


SHOWN = [
    (page, text)
    for page, blocks in BLOCKS.items()
    for _, text in blocks
    if text.startswith("$ picogpt ") and text.count("\n") > 1
]


@pytest.mark.parametrize(("page", "text"), SHOWN, ids=[text[2:25] for _, text in SHOWN])
def test_commands_print_what_is_shown_below_them(page, text):
    command, _, output = text[2:].partition("\n")
    assert same(shell(shlex.split(command), cwd=ROOT), output)


def test_every_kind_of_command_is_shown_with_what_it_prints():
    assert {text.split()[2] for _, text in SHOWN} == {'"Once', "next", "tokens", "score"}


def test_the_terminal_shows_what_the_commands_print():
    svg = (ROOT / "docs" / "terminal.svg").read_text(encoding="utf-8")
    assert "http" not in svg.partition("</style>")[2]
    shown = html.unescape("".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg)))
    commands = re.findall(r"^    '(picogpt .*)',$", DRAW, re.MULTILINE)
    assert len(commands) == 3
    found = "".join(
        f"${command}{shell(shlex.split(command), model='tales')}" for command in commands
    )
    assert same("picogpt" + found, shown)


def test_the_options_are_those_of_help():
    assert shell(["picogpt", "--help"]) in [text for _, text in BLOCKS["README.md"]]


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_of_commands_has_their_help(verb):
    assert shell(["picogpt", verb, "--help"]) in [text for _, text in BLOCKS["commands.md"]]


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page == "fine-tuned.md":
        pytest.importorskip("safetensors")
        write_adapter(tmp_path / "my-lora")
    names = {}
    for language, text in BLOCKS[page]:
        if language == "python":
            exec(text, names)
    if page == "README.md":
        assert names["logits"].shape == (4, 4096)
    if page == "inside.md":
        assert names["weights"].shape == (8, 4, 4)
        assert not np.array_equal(
            names["silenced"], gpt2(names["ids"], **names["params"], n_head=8)
        )


def test_there_are_python_examples():
    blocks = [language for page in PAGES for language, _ in BLOCKS[page] if language == "python"]
    assert len(blocks) > 12


def test_ci_runs_the_readmes_test_command():
    texts = [text for _, text in BLOCKS["README.md"]]
    commands = [text[2:].splitlines()[0] for text in texts if text.startswith("$ ")]
    tests = [command for command in commands if "pytest" in command]
    assert len(tests) == 1
    assert tests[0] in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_pictures_are_those_that_the_script_makes(tmp_path):
    commands = re.findall(r"^    \"(\w+\.png)\": '(.*)',$", DRAW, re.MULTILINE)
    assert len(commands) == 2
    for name, command in commands:
        assert (ROOT / "docs" / name).read_bytes().startswith(b"\x89PNG")
        arguments = ["picogpt", *shlex.split(command), "--model", "tales"]
        shell([*arguments, "-o", str(tmp_path / name)])
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_links_to_are_there(page):
    folder = ROOT if page == "README.md" else ROOT / "docs"
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)[^)]*\)", PAGES[page])
    assert [link for link in links if not (folder / link).exists()] == []
    assert links or page not in ("README.md", "index.md")


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
    section = re.search(r"^Args:\n((?:    .*\n|\n)*)", inspect.getdoc(found) + "\n", re.MULTILINE)
    described = re.findall(r"^    (\w[\w, ]*):", section[1], re.MULTILINE) if section else []
    assert {name for names in described for name in names.split(", ")} <= set(arguments)


def test_help_of_the_package_names_everything_in_it():
    text = pydoc.render_doc(picogpt, renderer=pydoc.plaintext)
    description = text.partition("DESCRIPTION")[2].partition("PACKAGE CONTENTS")[0]
    named = set(re.findall(r"`(\w+)`", description))
    assert named == set(picogpt.__all__)


def test_help_shows_no_addresses_and_no_private_names():
    for name in picogpt.__all__:
        signature = pydoc.render_doc(getattr(picogpt, name), renderer=pydoc.plaintext).split("\n")
        assert not re.search(r"0x[0-9a-f]{6}|<\w+ object|\b_[a-z]", signature[2])
