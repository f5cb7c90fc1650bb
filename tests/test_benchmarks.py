"""The README's figures and the chart are those of the results that lie beside the benchmarks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results.json"
CHART = ROOT / "docs" / "speed.svg"
MADE_UP = {
    "command": "python benchmarks/run.py --rounds 3",
    "machine": {
        "machine": "a slide rule, 2 cores",
        "SIMD": "none",
        "system": "wood",
        "BLAS": "logarithms 1.0",
        "threads": "2",
        "settings": {"OMP_NUM_THREADS": "2"},
        "versions": {"picogpt": "0.1", "numpy": "2.1"},
        "date": "1975-01-01",
    },
    "rounds": 3,
    "shape": "a small shape",
    "text": "1.0 MB of `book.txt`",
    "figures": {
        "generating, tokens/s": {
            "40 new tokens": {"picogpt": [40.04, 42, 38.5], "CTranslate2": [1234.5, 999.5, 1300]},
            "a prompt of 1,024 tokens": {"picogpt": [500.0, 600.0, 400.0]},
        },
        "memory, MB": {"`load`": {"picogpt": [522.8], "the file": [0.05]}},
    },
}


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import report

    return report


def redraw(results, folder):
    command = [sys.executable, BENCHMARKS / "run.py", "--from", results, "--output", folder]
    subprocess.run(command, check=True, capture_output=True)


def texts(path):
    return re.findall(r"<text[^>]*>(.*?)</text>", path.read_text(encoding="utf-8"))


def test_pages_and_the_chart_show_the_results(tmp_path, report):
    redraw(RESULTS, tmp_path)
    for page in ("README.md", "docs/speed.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert text.count(report.START) == text.count(report.END) == 1
        assert (tmp_path / page).read_text(encoding="utf-8") == text
    assert texts(tmp_path / report.CHART) == texts(CHART)


def test_pages_get_other_results_and_keep_what_is_around(tmp_path, report):
    results = tmp_path / "made-up.json"
    results.write_text(json.dumps(MADE_UP), encoding="utf-8")
    redraw(results, tmp_path)
    for page, is_whole in (("README.md", False), ("docs/speed.md", True)):
        old = (ROOT / page).read_text(encoding="utf-8")
        new = (tmp_path / page).read_text(encoding="utf-8")
        marks = f"{report.START}.*{report.END}"
        assert re.sub(marks, "", old, flags=re.S) == re.sub(marks, "", new, flags=re.S)
        assert report.block(MADE_UP, is_whole=is_whole) in new
        assert ("memory, MB" in new) == is_whole


def test_tables_have_medians_and_spreads_and_no_empty_columns(report):
    tables = report.block(MADE_UP, is_whole=True).split("\n\n")[-2:]
    assert tables[0].splitlines() == [
        "| generating, tokens/s | picogpt | CTranslate2 |",
        "| --- | ---: | ---: |",
        "| 40 new tokens | 40.0 (38.5 to 42.0) | 1,234 (1,000 to 1,300) |",
        "| a prompt of 1,024 tokens | 500 (400 to 600) |  |",
    ]
    assert tables[1].splitlines()[2:] == ["| `load` | 523 | 0.0500 |"]


def test_the_block_says_how_the_figures_came_about(report):
    words = " ".join(report.block(MADE_UP).split())
    for said in (
        "Medians of 3 turns",
        "a slide rule, 2 cores",
        "BLAS: logarithms 1.0; threads: 2 (OMP_NUM_THREADS=2); picogpt 0.1, numpy 2.1; 1975-01-01",
        "The English text: 1.0 MB of `book.txt`.",
        "$ python benchmarks/run.py --rounds 3",
        f"]({report.CHART})",
    ):
        assert said in words


def test_the_chart_has_the_figures_as_text_and_is_the_same_each_time(tmp_path, report):
    paths = tmp_path / "1.svg", tmp_path / "2.svg"
    for path in paths:
        report.draw(MADE_UP, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert {"picogpt", "CTranslate2", "40.0", "1,234", "500"} <= set(texts(paths[0]))
    assert "40 new tokens, tokens/s" in texts(paths[0])


def test_figures_of_the_readme_are_those_of_whole_runs_only(tmp_path):
    for options in (["--smoke"], ["--only", "encode"], ["--smoke", "--output", ROOT]):
        done = subprocess.run(
            [sys.executable, BENCHMARKS / "run.py", *options], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "need --output" in done.stderr


def test_what_the_chart_shows_is_measured(report):
    parts = [BENCHMARKS / name for name in ("generate.py", "encode.py")]
    source = "".join(path.read_text(encoding="utf-8") for path in parts)
    assert '"starting, s"' in (BENCHMARKS / "load.py").read_text(encoding="utf-8")
    for table, rows in report.CHARTED.items():
        assert [text for text in (table, *rows) if f'"{text}"' not in source] == []
