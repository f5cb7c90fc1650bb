"""What is imported when, and in which direction."""

import ast
import inspect
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest

import picogpt

FORMATS = ("gguf", "llmc", "pytorch", "safetensors", "tensorflow", "files")
LAYERS = ["errors", "backend", "model", "encoder", "formats/tensors"]
LAYERS += [f"formats/{name}" for name in FORMATS]
LAYERS += ["adapter"]
LAYERS += [
    "download",
    "catalog",
    "layouts",
    "loader",
    "saving",
    "lookahead",
    "generation",
    "scoring",
    "tracing",
    "pictures",
]
LAYERS += ["commands/terminal"]
LAYERS += [f"commands/{name}" for name in ("generate", "inspect", "score", "models", "completion")]
LAYERS += ["cli"]


def loaded_by(statement):
    """-> the top-level modules that a fresh Python has after a statement, its own aside."""
    script = (
        "import sys; before = set(sys.modules)\n"
        f"try:\n    {statement}\nexcept SystemExit: pass\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before}, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stderr.splitlines()[-1].split()) - set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    "statement",
    [
        "import picogpt",
        "import picogpt.cli; picogpt.cli.main(['--help'])",
        "import picogpt.cli; picogpt.cli.main(['a', '--n-tokens', '-1'])",
    ],
)
def test_nothing_heavier_than_numpy_is_imported(statement):
    assert loaded_by(statement) <= {"picogpt", "numpy", "_distutils_hack"}


def test_a_run_imports_what_it_uses_and_no_more():
    allowed = {"picogpt", "numpy", "_distutils_hack", "regex", "google_crc32c", "platformdirs"}
    run = "import picogpt.cli; picogpt.cli.main(['a', '--n-tokens', '0', '--model', 'tales'])"
    assert loaded_by(run) <= allowed


def test_imports_point_down_only():
    folder = Path(str(resources.files("picogpt")))
    paths = [path.relative_to(folder) for path in folder.rglob("*.py")]
    modules = {path.with_suffix("").as_posix() for path in paths if "__" not in path.name}
    assert modules == set(LAYERS)
    for i, name in enumerate(LAYERS):
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                used = imported(name, node)
                assert used - {"__version__", "formats/__path__"} <= set(LAYERS[:i]), (
                    f"{name} imports {used}"
                )


def imported(name, node):
    """-> the modules that a relative import in that module names, as in LAYERS."""
    *package, _ = name.split("/")
    package = package[: len(package) + 1 - node.level]
    parts = [*package, *(node.module or "").split(".")]
    path = "/".join(filter(None, parts))
    return {path} if path in LAYERS else {f"{path}/{a.name}".lstrip("/") for a in node.names}


def test_no_module_has_the_name_of_a_public_function():
    names = {name for name in LAYERS if "/" not in name}
    assert not names & set(picogpt.__all__)


def test_all_is_true():
    names = {name for name, value in vars(picogpt).items() if not inspect.ismodule(value)}
    assert set(picogpt.__all__) == {name for name in names if not name.startswith("_")}
    assert picogpt.__all__ == sorted(picogpt.__all__)


def test_only_backend_knows_that_there_are_other_array_libraries():
    folder = Path(str(resources.files("picogpt")))
    for name in set(LAYERS) - {"backend"}:
        text = (folder / f"{name}.py").read_text(encoding="utf-8").lower()
        assert "cupy" not in text
        assert "jax" not in text
