"""`picogpt tokens`, `next`, `lens` and `attention`: what goes on inside, as tables and pictures."""

import argparse
import json
import shutil
import sys

from ..catalog import find_model
from ..encoder import Encoder
from ..errors import PicogptError
from ..generation import next_tokens
from ..layouts import load_encoder
from ..pictures import (
    PAGES,
    PICTURES,
    attention_plot,
    attention_view,
    check_picture,
    lens_plot,
    save_picture,
)
from ..tracing import logit_lens
from .terminal import (
    WHOLE,
    drawable,
    in_color,
    load_model,
    quoted,
    sampling_group,
    text_parser,
)

TOKENS_HELP = """\
Without TEXT, or with -, the text is what stdin holds. The vocabulary is GPT-2's, or --model's.

examples:
  picogpt tokens "Not all heroes wear capes."
  picogpt tokens --count - < story.txt
"""
NEXT_HELP = """\
Without TEXT, or with -, the text is what stdin holds.

examples:
  picogpt next "Once upon a"
  picogpt next "Once upon a" --top 3 --temperature 2
"""
LENS_HELP = """\
Each layer's residual stream is led through the last layer norm and the output head, as if the layer
were the last one; the likeliest token that comes of it is shown.

examples:
  picogpt lens "Once upon a time"
  picogpt lens "Once upon a time" -o lens.png
"""
ATTENTION_HELP = """\
A row shows how one token divides its attention among the tokens up to itself. An .html is a page
with all heads of all layers, to choose from.

examples:
  picogpt attention "The wolf said that he" -o attention.png
  picogpt attention "The wolf said that he" --layer 2 --head 5 -o attention.svg
  picogpt attention "The wolf said that he" -o attention.html
"""


def tokens_parser() -> argparse.ArgumentParser:
    description = "Show how a text is cut into tokens: their number, then the id and text of each."
    parser = text_parser("tokens", "TEXT", description, TOKENS_HELP, runs=False)
    parser.add_argument("--count", action="store_true", help="print their number only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run_tokens(args: argparse.Namespace) -> None:
    encoder = (
        Encoder.gpt2()
        if args.model is None
        else load_encoder(find_model(args.model, args.weights_dir))
    )
    ids = encoder.encode(args.text, allow_special=args.allow_special)
    pieces = [encoder.token_bytes(token) for token in ids]
    if args.count:
        print(len(ids))
    elif args.json:
        tokens = [
            {"id": token, "text": piece.decode("utf-8", "replace"), "bytes": piece.hex()}
            for token, piece in zip(ids, pieces, strict=True)
        ]
        print(json.dumps({"count": len(ids), "tokens": tokens}))
    else:
        print(f"{len(ids)} token{'s' * (len(ids) != 1)}")
        for i, (token, piece) in enumerate(zip(ids, pieces, strict=True)):
            on, off = (f"\x1b[{32 + 4 * (i % 2)}m", "\x1b[0m") if in_color() else ("", "")
            print(f"{token:6} {on}{quoted(piece)}{off}")


def next_parser() -> argparse.ArgumentParser:
    description = "Show which tokens may come next, and how likely each is."
    parser = text_parser("next", "TEXT", description, NEXT_HELP)
    add = parser.add_argument
    add("--top", type=WHOLE, default=10, metavar="N", help="show the N likeliest (default: 10)")
    add("--json", action="store_true", help="print one JSON object")
    sampling_group(parser, "How the probabilities are changed before one would be picked.", "1")
    return parser


def run_next(args: argparse.Namespace) -> None:
    encoder, hparams, params = load_model(args)
    ids = encoder.encode(args.text, allow_special=args.allow_special)
    if not ids and encoder.end_of_text is not None:
        ids = [encoder.end_of_text]
    found, probabilities = next_tokens(
        ids,
        params,
        hparams["n_head"],
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
    )
    sums = probabilities.cumsum()
    rows = [
        (rank, int(token), encoder.token_bytes(token), float(p), float(sum_))
        for rank, (token, p, sum_) in enumerate(zip(found, probabilities, sums, strict=True), 1)
        if rank <= args.top
    ]
    if args.json:
        fields = ("rank", "id", "text", "probability", "cumulative")
        shown = [(rank, i, piece.decode("utf-8", "replace"), *p) for rank, i, piece, *p in rows]
        tokens = [dict(zip(fields, row, strict=True)) for row in shown]
        print(json.dumps({"prompt_tokens": len(ids), "next": tokens}))
        return
    width = max((len(quoted(piece)) for _, _, piece, _, _ in rows), default=5)
    block = drawable("█", "#")
    print(f"rank  {'piece':{width}}      id  probability {'':20}  cumulative")
    for rank, token, piece, p, sum_ in rows:
        bar = block * round(20 * p)
        print(f"{rank:4}  {quoted(piece):{width}}  {token:6}  {p:11.2%} {bar:20}  {sum_:10.2%}")


def lens_parser() -> argparse.ArgumentParser:
    description = "Show what each layer would say next, after each token of a text."
    parser = text_parser("lens", "TEXT", description, LENS_HELP)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="draw it instead: a .png, .svg or .pdf"
    )
    return parser


def run_lens(args: argparse.Namespace) -> None:
    if args.output is not None:
        check_picture(args.output)
    encoder, hparams, params = load_model(args)
    ids = encoder.encode(args.text, allow_special=args.allow_special)
    if args.output is not None:
        save_picture(lens_plot(ids, encoder, params, hparams["n_head"]), args.output)
        return
    best, likely = logit_lens(ids, params, hparams["n_head"])
    names = ["embedding", *(f"layer {i}" for i in range(len(best) - 1))]
    columns = [["after", *(quoted(encoder.token_bytes(token)) for token in ids)]]
    for name, layer, chances in zip(names, best, likely, strict=True):
        said = [
            f"{quoted(encoder.token_bytes(token))} {p:.0%}"
            for token, p in zip(layer, chances, strict=True)
        ]
        columns.append([name, *said])
    columns = [[f"{cell:{max(map(len, column))}}" for cell in column] for column in columns]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    while len(columns) > 1:  # layers that do not fit beside the others come below them
        n_shown, width = 1, len(columns[0][0])
        for column in columns[1:]:
            width += 2 + len(column[0])
            if width > room and n_shown > 1:
                break
            n_shown += 1
        for cells in zip(*columns[:n_shown], strict=True):
            print("  ".join(cells).rstrip())
        del columns[1:n_shown]
        if len(columns) > 1:
            print()


def attention_parser() -> argparse.ArgumentParser:
    description = "Draw where each token of a text looks."
    parser = text_parser("attention", "TEXT", description, ATTENTION_HELP)
    parser.usage = "picogpt attention [TEXT] -o FILE [options]"
    add = parser.add_argument
    add("-o", "--output", required=True, metavar="FILE", help="a .png, .svg, .pdf or .html")
    add("--layer", type=WHOLE, metavar="N", help="from 0 (default: the last)")
    add("--head", type=_head, default="all", metavar="N", help="from 0, mean or all (default: all)")
    return parser


def _head(argument: str) -> int | str:
    if argument not in ("all", "mean") and not argument.isdecimal():
        raise argparse.ArgumentTypeError(f"{argument!r} is not a whole number, mean or all")
    return int(argument) if argument.isdecimal() else argument


def run_attention(args: argparse.Namespace) -> None:
    is_page = args.output.endswith(PAGES)
    check_picture(args.output, PICTURES + PAGES)
    if is_page and (args.layer is not None or args.head != "all"):
        raise PicogptError("--layer and --head: go with pictures; a page has all, to choose from")
    encoder, hparams, params = load_model(args)
    ids = encoder.encode(args.text, allow_special=args.allow_special)
    drawn = (ids, encoder, params, hparams["n_head"])
    if is_page:
        save_picture(attention_view(*drawn), args.output)
        return
    save_picture(attention_plot(*drawn, layer=args.layer, head=args.head), args.output)
