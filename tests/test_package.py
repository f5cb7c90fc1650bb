"""What is built from the sources, and that it works where it is installed."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import picogpt

ROOT = Path(__file__).parent.parent
NAME = f"picogpt-{picogpt.__version__}"
METADATA = ("METADATA", "WHEEL", "entry_points.txt", "top_level.txt", "RECORD")
EGG_INFO = ("PKG-INFO", "SOURCES.txt", "dependency_links.txt", "entry_points.txt", "requires.txt")
JUNK = ("tests/__pycache__/x.pyc", "tests/.hypothesis/x", "examples/.ipynb_checkpoints/x.ipynb")
JUNK += ("benchmarks/__pycache__/x.pyc", "picogpt/__pycache__/x.pyc", "picogpt/x.log", "dist/x.py")

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def tracked():
    """-> the paths of the files that make up the project."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("no git repository, which tells what the sources are")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    return set(listed.stdout.decode().rstrip("\0").split("\0"))


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory):
    """-> the folder of what `python -m build` makes, and what it said, of a copy of the sources
    with other things lying around; the wheel is built from the source distribution."""
    pytest.importorskip("build.__main__")  # `build` alone could be a folder that pip left
    folder = tmp_path_factory.mktemp("sources")
    for path in tracked:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)
    for path in JUNK:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("")
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # setuptools would warn of it
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "out")]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return folder / "out", done.stdout


@pytest.fixture
def wheel(built):
    return built[0] / f"{NAME}-py3-none-any.whl"


def test_nothing_is_warned_of(built):
    lines = [line for line in built[1].splitlines() if "warning" in line.lower()]
    assert lines == []
    assert {path.name for path in built[0].iterdir()} == (
        {f"{NAME}.tar.gz", f"{NAME}-py3-none-any.whl"}
    )


def test_the_wheel_holds_the_package_and_nothing_else(wheel, tracked):
    package = {path for path in tracked if path.startswith("picogpt/")}
    weights = {f"picogpt/{path}" for path in tracked if path.startswith("weights/")}
    licences = {"licenses/LICENSE", "licenses/picogpt/vocabulary/LICENSE"}
    about = {f"{NAME}.dist-info/{name}" for name in licences.union(METADATA)}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert set(names) == package | weights | about
    assert len(names) == len(set(names))
    assert {"picogpt/py.typed", "picogpt/attention.html"} <= package
    assert {"picogpt/vocabulary/vocab.bpe", "picogpt/vocabulary/LICENSE"} <= package
    assert "picogpt/weights/tales/model.ckpt.data-00000-of-00001" in weights


def test_the_source_distribution_holds_the_sources_and_nothing_else(built, tracked):
    made = {"PKG-INFO", *(f"picogpt.egg-info/{name}" for name in (*EGG_INFO, "top_level.txt"))}
    expected = {f"{NAME}/{path}" for path in made | tracked - {".gitignore"}}
    with tarfile.open(built[0] / f"{NAME}.tar.gz") as archive:
        files = {member.name: member for member in archive if not member.isdir()}
    assert set(files) == expected
    assert files[f"{NAME}/.ci/run"].mode & 0o100


def test_the_metadata_are_complete(wheel):
    with zipfile.ZipFile(wheel) as archive:
        found = message_from_bytes(archive.read(f"{NAME}.dist-info/METADATA"))
    assert (found["Name"], found["Version"]) == ("picogpt", picogpt.__version__)
    assert found["License-Expression"] == "MIT AND LicenseRef-OpenAI-GPT-2"
    assert found.get_all("License-File") == ["LICENSE", "picogpt/vocabulary/LICENSE"]
    assert found["Requires-Python"] == ">=3.10"
    assert found["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert found.get_payload(decode=True).decode().strip() == readme.strip()
    assert found["Summary"]
    assert found["Keywords"]
    assert {"Typing :: Typed", "Operating System :: OS Independent"} <= (
        set(found.get_all("Classifier"))
    )


def test_the_wheel_works_where_it_is_installed(wheel, tmp_path):
    venv.create(tmp_path / "venv")
    paths = sysconfig.get_paths("venv", {"base": str(tmp_path / "venv")})
    folder = Path(paths["scripts"])
    python = folder / Path(sys.executable).name
    python = python if python.exists() else folder / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    subprocess.run([*pip, "--no-deps", "--quiet", str(wheel)], check=True, **options)
    # What it depends on is taken from where this test runs, after what is installed here.
    others = Path(paths["purelib"], "others.pth")
    others.write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    command = [folder / "picogpt", "Once upon a time", "--n-tokens", "5"]
    done = subprocess.run(command, **options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == " there was a great many\n"
    where = "import picogpt; print(picogpt.__file__)"
    done = subprocess.run([python, "-c", where], **options)
    assert Path(done.stdout.strip()) == Path(paths["purelib"], "picogpt", "__init__.py")
