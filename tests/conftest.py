import shutil
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def own_settings(request, monkeypatch, tmp_path):
    """No test sees the user's models or settings, except those that need the official weights."""
    if request.node.get_closest_marker("weights"):
        return
    monkeypatch.setenv("PICOGPT_WEIGHTS", str(tmp_path / "weights"))
    monkeypatch.delenv("PICOGPT_MODEL", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture(scope="session")
def expected():
    """What the originals make of the checkpoints in tests/data (see make.py there)."""
    with np.load(DATA / "expected.npz") as arrays:
        return dict(arrays)


@pytest.fixture
def model_folder(tmp_path):
    """A function that copies a checkpoint of tests/data, with its vocabulary, and returns where."""

    def copy(name="plain"):
        folder = tmp_path / name
        shutil.copytree(DATA / name, folder)
        shutil.copytree(DATA / "vocabulary", folder, dirs_exist_ok=True)
        return folder

    return copy


@pytest.fixture
def sized(request):
    """A function that picks the size of a heavy test: the small one, or with --full the other."""
    return lambda small, full: full if request.config.getoption("--full") else small


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """With --no-skips, a test that is skipped fails, unless it is marked `weights` or `gpu`."""
    report = yield
    allowed = item.get_closest_marker("weights") or item.get_closest_marker("gpu")
    if report.skipped and not allowed and item.config.getoption("--no-skips"):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped, in a run that must skip nothing"
    return report


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="fail where a test is skipped")
    parser.addoption("--full", action="store_true", help="give heavy tests their full size")
