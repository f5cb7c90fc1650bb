"""Runs all benchmarks, and writes the README's figures.

    python benchmarks/run.py --text book.txt

It measures picogpt beside transformers, CTranslate2, tiktoken, tokenizers and TensorFlow, as far as
they are installed, and writes every single measurement to benchmarks/results.json, the tables into
README.md and docs/speed.md, and the chart to docs/speed.svg. NumPy's variables OPENBLAS_CORETYPE
and OPENBLAS_L2_SIZE should not be set, and nothing else should run. It takes about half an hour.
"""

import argparse
import json
import shlex
import sys
import tempfile
from pathlib import Path

import encode
import generate
import load
import report
import score
from common import HPARAMS, Setup, count_threads, machine, random_params

from picogpt import Encoder, save

ROOT = Path(__file__).resolve().parent.parent
PARTS = {"generate": generate, "encode": encode, "load": load, "score": score}
SMOKE = {"n_embd": 96, "n_layer": 2}


def parse():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="English in UTF-8, 10 MB for the README")
    add("--rounds", type=int, default=5, metavar="N", help="turns of each (default: 5)")
    add("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="some parts")
    add("--smoke", action="store_true", help="small shapes, one turn, to see that it works")
    add("--from", dest="source", type=Path, metavar="FILE", help="measure nothing, draw these")
    add("--output", type=Path, default=ROOT, metavar="DIR", help="write all there, not here")
    add("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    if args.output.resolve() == ROOT and (args.smoke or args.only != list(PARTS)):
        parser.error("--smoke and --only need --output, since the README shows whole runs only")
    return args


def measure(args, where):
    """-> the results, as they become JSON."""
    figures = {}

    def note(table, what, who, value):
        figures.setdefault(table, {}).setdefault(what, {}).setdefault(who, []).append(value)

    rounds = 1 if args.smoke else args.rounds
    hparams = HPARAMS | (SMOKE if args.smoke else {})
    command = ["python", "benchmarks/run.py", "--rounds", str(rounds)]
    if args.text:
        text = args.text.read_text(encoding="utf-8")
        of = f"of `{args.text.name}`"
        command += ["--text", args.text.name]  # not where it lies, which says nothing elsewhere
    else:
        text = encode.made_up(100_000 if args.smoke else 10_000_000)
        of = "made up of words from GPT-2's vocabulary, by Zipf's law"
    if args.smoke:
        command.append("--smoke")
    if args.only != list(PARTS):
        command += ["--only", *args.only]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        params, model = random_params(hparams), folder / "model"
        save(model, Encoder.gpt2(), hparams, params)
        setup = Setup(rounds, args.smoke, count_threads(), hparams, params, model, folder, text)
        for name in args.only:
            print(f"measuring: {name}", file=sys.stderr)
            PARTS[name].measure(setup, note)
    return {
        "command": shlex.join(command),
        "machine": where,
        "rounds": rounds,
        "shape": "a small shape" if args.smoke else "GPT-2 124M's shape",
        "text": f"{len(text.encode()) / 1e6:.1f} MB {of}",
        "figures": figures,
    }


def main():
    args = parse()
    if args.source:
        results = json.loads(args.source.read_text(encoding="utf-8"))
    else:
        where = machine()
        for name, value in where.items():
            print(f"{name}: {value}", flush=True)
        results = measure(args, where)
        path = args.json or args.output / "benchmarks" / "results.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (args.output / "docs").mkdir(parents=True, exist_ok=True)
    for page, is_whole in (("README.md", False), ("docs/speed.md", True)):
        text = (ROOT / page).read_text(encoding="utf-8")
        text = report.replaced(text, results, is_whole=is_whole)
        (args.output / page).write_text(text, encoding="utf-8")
    if report.charted(results):
        report.draw(results, args.output / report.CHART)
    print(report.block(results, is_whole=True), end="")


if __name__ == "__main__":
    main()
