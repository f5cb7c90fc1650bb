"""`picogpt score`: perplexity and the like, as a table or JSON."""

import argparse
import codecs
import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from ..encoder import Encoder
from ..errors import PicogptError, one_line, parse_json
from ..scoring import Score, Scored, score_texts
from .terminal import WHOLE, in_color, load_model, model_parser, quoted, read_input

SCORE_HELP = """\
FILE is UTF-8 text, - is stdin. A file that ends in .jsonl holds JSON objects, one on a line, whose
"text" is scored each by itself. `nats` is the negative log-likelihood of all tokens, `ppl` the
perplexity: its exponential, per token, per word (between white space) and per byte. Texts longer
than the model's window are read in windows that overlap; each token is scored once, in the first
window that holds it.

With --last-word, as in LAMBADA: a text counts as right only if all tokens of its last word, with
the blank before it, are the likeliest ones.

examples:
  picogpt score story.txt
  cat story.txt | picogpt score - --per-token
  picogpt score lambada.jsonl --last-word
"""
SCORE_COLUMNS = ("tokens", "nats", "ppl/token", "ppl/word", "ppl/byte", "bits/byte")
# A darker ground for each doubling; blue to red by way of white, which all can tell apart.
SURPRISE = {
    "0-2": "30;48;5;153",
    "2-4": "30;48;5;195",
    "4-8": "30;48;5;223",
    "8-16": "30;48;5;215",
    "16-": "97;48;5;160",
}


def score_parser() -> argparse.ArgumentParser:
    description = "Tell how well the model foresees texts: perplexity, bits per byte and so on."
    parser = model_parser("score", "FILE...", description, SCORE_HELP)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="UTF-8 text, or .jsonl; - for stdin")
    add("--stride", type=WHOLE, metavar="N", help="tokens between windows (default: half of one)")
    add("--no-start", action="store_true", help="put no end-of-text token in front")
    add(
        "--per-token",
        action="store_true",
        help="print each token with its log-probability in nats; on a terminal, the text, coloured "
        "by surprise",
    )
    add("--last-word", action="store_true", help="tell how often the last word is foreseen")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def run_score(args: argparse.Namespace) -> None:
    if args.files.count("-") > 1:
        raise PicogptError("-: is given twice; stdin can be read once")
    encoder, hparams, params = load_model(args)
    scores: list[Score] = []
    rows: list[dict[str, Any]] = []
    width = max(len(f"{file}:999") for file in args.files)
    for file in args.files:
        names, texts = _read_texts(file)
        scored = score_texts(
            texts,
            encoder,
            params,
            hparams["n_head"],
            start_token=not args.no_start,
            stride=args.stride,
            only_last_word=args.last_word,
            names=names,
            progress=_score_progress,
        )
        if sys.stderr.isatty():  # a bar is drawn there until all is scored
            scored = iter(list(scored))
        for name, (score, ids, tokens) in zip(names, scored, strict=True):
            if args.json:
                rows.append({"file": name, **_figures(score)})
                if args.per_token:
                    rows[-1]["tokens"] = _token_list(encoder, ids, tokens)
            else:
                if args.per_token:
                    _show_tokens(encoder, ids, tokens)
                if args.per_token or not scores:
                    _show_row("file", width, SCORE_COLUMNS)
                _show_row(name, width, _cells(score))
            scores.append(score)
    total = sum(scores[1:], start=scores[0])
    choices = {"start_token": total.start_token, "window": total.window, "stride": total.stride}
    if args.json:
        print(json.dumps({"files": rows, "total": _figures(total), **choices}))
        return
    if len(scores) > 1:
        _show_row("total", width, _cells(total))
    start = "with" if total.start_token else "without"
    print(f"({start} a start token; windows of {total.window} tokens, every {total.stride})")
    if args.last_word:
        share = f"{total.n_right} of {total.n_texts}, {total.accuracy:.2%}"
        print(f"last words foreseen: {share}; the figures are of the last words")


def _cells(score: Score) -> list[str]:
    figures = (score.perplexity, score.word_perplexity, score.byte_perplexity)
    shown = [f"{figure:.5g}" for figure in (*figures, score.bits_per_byte)]
    return [str(score.n_tokens), f"{score.nll:.3f}", *shown]


def _show_row(name: str, width: int, cells: Sequence[str]) -> None:
    tokens, nats, *others = cells
    shown = "".join(f" {cell:>10}" for cell in others)
    print(f"{one_line(name):{width}} {tokens:>8} {nats:>11}{shown}", flush=True)


def _figures(score: Score) -> dict[str, Any]:
    """A score for JSON, which has no infinity and no nan."""
    figures: dict[str, float | None] = {
        "n_tokens": score.n_tokens,
        "nll": score.nll,
        "perplexity": score.perplexity,
        "word_perplexity": score.word_perplexity,
        "byte_perplexity": score.byte_perplexity,
        "bits_per_byte": score.bits_per_byte,
        "n_words": score.n_words,
        "n_bytes": score.n_bytes,
    }
    if score.n_right is not None:
        figures |= {"n_texts": score.n_texts, "n_right": score.n_right, "accuracy": score.accuracy}
    return {name: x if x is None or math.isfinite(x) else None for name, x in figures.items()}


def _token_list(encoder: Encoder, ids: Iterable[int], scored: Scored) -> list[dict[str, Any]]:
    return [
        {
            "id": int(token),
            "text": encoder.token_bytes(token).decode("utf-8", "replace"),
            "logprob": None if math.isnan(logprob) else float(logprob),
        }
        for token, logprob in zip(ids, scored.logprobs, strict=True)
    ]


def _show_tokens(encoder: Encoder, ids: Iterable[int], scored: Scored) -> None:
    """Prints a text coloured by surprise, or where there are no colours, a line for each token."""
    if not in_color():
        print("   logprob      id  token")
        for token, logprob in zip(ids, scored.logprobs, strict=True):
            print(f"{logprob:10.4f}  {token:6}  {quoted(encoder.token_bytes(token))}")
        return
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    print("surprise in bits:", *(f"\x1b[{c}m {s} \x1b[0m" for s, c in SURPRISE.items()))
    for i, (token, logprob) in enumerate(zip(ids, scored.logprobs, strict=True)):
        if i == 0 and token == encoder.end_of_text:
            continue
        piece = decoder.decode(encoder.token_bytes(token))
        logprob = 0.0 if math.isnan(logprob) else logprob
        level = min(int(math.log2(max(1.0, -logprob / math.log(2)))), len(SURPRISE) - 1)
        color = list(SURPRISE.values())[level]
        for line in piece.splitlines(keepends=True):
            body = line.rstrip("\n")
            shown = "".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in body)
            print(f"\x1b[{color}m{shown}\x1b[0m", end="\n" if line != body else "")
    print()


def _score_progress(batches: list[Any]) -> Iterable[Any]:
    if not sys.stderr.isatty() or len(batches) < 2:
        return batches
    from tqdm import tqdm

    return tqdm(batches, unit=" windows", leave=False)


def _read_texts(file: str) -> tuple[list[str], list[str]]:
    """The names and contents of the texts in a file: one, or one a line in .jsonl."""
    text = read_input(file)
    if not file.lower().endswith(".jsonl"):
        return [file], [text]
    names, texts = [], []
    for i, line in enumerate(text.split("\n"), 1):  # JSON strings may hold other line ends
        if line.strip():
            names.append(f"{file}:{i}")
            value = parse_json(line, names[-1]).get("text")
            if not isinstance(value, str):
                found = 'has no "text"' if value is None else f'"text" is {value!r:.40}'
                raise PicogptError(f"{names[-1]}: {found}; expected a string")
            texts.append(value)
    if not texts:
        raise PicogptError(f"{file}: is empty; expected a JSON object on each line")
    return names, texts
