"""What the documents say is so."""

import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import picogpt

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize(
    "name", ["encoder", "loader", "generation", "backend", "scoring", "tracing"]
)
def test_examples_in_docstrings(name):
    results = doctest.testmod(importlib.import_module(f"picogpt.{name}"))
    assert results.attempted > 0
    assert results.failed == 0


def test_the_example_of_the_package():
    assert doctest.testmod(picogpt).failed == 0


def test_public_functions_have_docstrings_with_a_sentence():
    for name in picogpt.__all__:
        doc = getattr(picogpt, name).__doc__
        assert doc
        assert doc.split("\n\n")[0].rstrip().endswith((".", ":", "]"))
