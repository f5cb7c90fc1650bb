"""`picogpt PROMPT`: text as it is made, with probabilities, or many at once from a file."""

import argparse
import codecs
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .. import __version__
from ..backend import is_compiled
from ..encoder import Encoder
from ..errors import PicogptError, decode, parse_json
from ..generation import Generated, Step, generate_many, stream_batch
from .terminal import (
    WHOLE,
    in_color,
    load_model,
    number,
    quoted,
    read_input,
    sampling_group,
    text_parser,
    utf8,
)

GENERATE_HELP = """\
PROMPT is one argument, so put it in quotes. Without it, or with -, the prompt is what stdin holds,
byte for byte. After -- it may begin with a dash; after the word generate it may be the name of
another command. An empty prompt starts from the end-of-text token.

Without --model, $PICOGPT_MODEL runs, else 124M if it lies in the weights folder, else tales, which
comes with picogpt. The weights folder is --weights-dir, else $PICOGPT_WEIGHTS, else `picogpt` in
the user's cache. An official model that is not there is fetched when it is named.

examples:
  picogpt "Once upon a time" --n-tokens 100
  picogpt "Once upon a time" --top-k 40 --seed 1
  picogpt "Once upon a time" --model path/to/folder
  printf 'Once upon a time' | picogpt

other commands (picogpt COMMAND --help):
  tokens TEXT           show how a text is cut into tokens
  next TEXT             show what may come next, and how likely it is
  lens TEXT             show what each layer would say next
  attention TEXT        draw where each token looks
  score FILE            tell how well the model foresees a text
  models                list the models, and whether and where they are here
  download MODEL        fetch a model
  verify MODEL          check a model's files
  convert MODEL PATH    write a model in another format
  completion SHELL      let the shell complete all this: bash, zsh or fish
"""
AUTO_LOOKAHEAD = 31  # tokens; how many of them are guessed is decided by how it goes
# From doubtful to sure, in colours that all can tell apart, by brightness too.
CONFIDENCE = ("97;48;5;160", "30;48;5;215", "30;48;5;223", "30;48;5;195", "30;48;5;153")


def generate_parser() -> argparse.ArgumentParser:
    parser = text_parser("", "PROMPT", "Continue a text with GPT-2.", GENERATE_HELP)
    parser.add_argument("--version", action="version", version=f"picogpt {__version__}")

    add = parser.add_argument_group("output").add_argument
    add("--echo", action="store_true", help="print the prompt before the text")
    add("--show-probs", action="store_true", help="print a line for each token: its probability")
    add("--json", action="store_true", help="as --show-probs, in JSON: an object a line")

    add = parser.add_argument_group("length").add_argument
    add("--n-tokens", type=WHOLE, default=40, metavar="N", help="add at most N (default: 40)")
    add(
        "--stop",
        type=_stop_text,
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    add("--no-stop", action="store_true", help="go on after the model ends its text")
    add(
        "--overflow",
        choices=["error", "slide"],
        default="error",
        help="beyond the model's window, go on with its newer half in view (default: error)",
    )

    parser.add_argument(
        "--lookahead",
        type=_lookahead,
        metavar="N",
        help="without sampling, guess up to N tokens at once by what came before (default: auto)",
    )
    add = sampling_group(
        parser,
        "Without these, or with the penalty alone, the likeliest token is taken each time.",
        "1 with --top-k, --top-p or --seed",
    )
    add("--seed", type=WHOLE, metavar="N", help="the same seed gives the same text")
    add(
        "--n-samples",
        type=number(int, 1, 1000, "a whole number from 1 to 1000"),
        default=1,
        metavar="K",
        help="make K texts side by side, sampled (default: 1)",
    )

    add = parser.add_argument_group(
        "many prompts",
        "Continue each prompt of a file, several side by side. With a seed, each has random "
        "numbers of its own: the first those that it would have alone.",
    ).add_argument
    add(
        "--prompts",
        metavar="FILE",
        help="one a line (blank ones aside), or .jsonl with a prompt in each; - is stdin",
    )
    add("-o", "--output", metavar="FILE", help="write a JSON object a line there, not to stdout")
    add("--resume", action="store_true", help="continue after what the output file has already")
    add(
        "--batch-size",
        type=number(int, 1, 1000, "a whole number from 1 to 1000"),
        default=32,
        metavar="N",
        help="prompts side by side (default: 32)",
    )
    add("--logprobs", type=WHOLE, metavar="K", help="tell log-probabilities, and the K likeliest")
    return parser


def _lookahead(argument: str) -> int | None:
    return None if argument == "auto" else int(WHOLE(argument))


def _stop_text(argument: str) -> str:
    if not argument:
        raise argparse.ArgumentTypeError("'' is in every text")
    return utf8(argument)


def run_generate(args: argparse.Namespace) -> None:
    if args.prompts is not None:
        _generate_many(args)
        return
    if args.output or args.resume or args.logprobs is not None:
        raise PicogptError("--output, --resume and --logprobs go with --prompts only")
    if args.n_samples > 1 and (args.show_probs or args.json):
        raise PicogptError("--show-probs and --json show one text; leave --n-samples at 1")
    encoder, hparams, params = load_model(args)
    ids = encoder.encode(args.text, allow_special=args.allow_special)
    end = [] if encoder.end_of_text is None else [encoder.end_of_text]
    samples = args.n_samples > 1  # several texts are of use only if they differ
    done: set[int] = set()
    # Where functions are compiled, each length of a guess would be.
    can_look_ahead = not (samples or _is_sampled(args) or is_compiled(params["wte"]))
    lookahead = AUTO_LOOKAHEAD if args.lookahead is None and can_look_ahead else args.lookahead
    steps: Iterable[Step] = stream_batch(
        [ids or end] * args.n_samples,
        params,
        hparams["n_head"],
        args.n_tokens,
        temperature=1.0 if samples and args.temperature is None else args.temperature,
        seed=args.seed,
        stop_ids=[] if args.no_stop else end,
        lookahead=lookahead or 0,
        **_shared_options(args),
        done=done,
    )
    if args.show_probs or args.json:
        _show_steps(args, encoder, steps, done)
        return
    if sys.stderr.isatty() and (samples or not sys.stdout.isatty()):
        from tqdm import tqdm

        steps = tqdm(steps, total=args.n_samples * args.n_tokens, unit=" tokens", leave=False)
    texts = [_Text(args.stop) for _ in range(args.n_samples)]
    shown = [args.text if args.echo else ""] * args.n_samples
    try:
        if args.echo and not samples:
            print(args.text, end="", flush=True)
        for row, token, _ in steps:
            piece = texts[row].add(encoder.decode_bytes([token]))
            if texts[row].is_complete:
                done.add(row)
            shown[row] += piece
            if not samples:
                print(piece, end="", flush=True)
    finally:  # an interrupt keeps the text so far
        for i, (text, start) in enumerate(zip(texts, shown, strict=True), 1):
            if samples:
                print(f"=== sample {i} of {args.n_samples} ===\n{start}", end="")
            print(text.end(), flush=True)


def _is_sampled(args: argparse.Namespace) -> bool:
    """Whether the options of one text ask for more than the likeliest token each time."""
    options = args.top_k or args.top_p < 1 or args.seed is not None or args.temperature
    return args.temperature != 0 and bool(options)


def _shared_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("top_k", "top_p", "repetition_penalty", "overflow")
    return {name: getattr(args, name) for name in names}


def _show_steps(
    args: argparse.Namespace, encoder: Encoder, steps: Iterable[Step], done: set[int]
) -> None:
    """Prints each new token with its probability, before all options, and that of the runner-up."""
    text = _Text(args.stop)
    for step in steps:
        new = Generated()
        new.add(step, 2)
        top = new.top_logprobs[0]
        rows = [(step.token, new.logprobs[0]), next((x for x in top if x[0] != step.token), top[0])]
        chosen, other = (
            {
                "id": token,
                "text": encoder.decode([token]),
                "probability": math.exp(logprob),
            }
            for token, logprob in rows
        )
        if args.json:
            print(json.dumps({**chosen, "runner_up": other}), flush=True)
        else:
            pieces = [quoted(encoder.token_bytes(token)) for token, _ in rows]
            p, q = (math.exp(logprob) for _, logprob in rows)
            level = sum(p >= bound for bound in (0.05, 0.2, 0.5, 0.9))
            on, off = (f"\x1b[{CONFIDENCE[level]}m", "\x1b[0m") if in_color() else ("", "")
            print(f"{p:7.1%}  {on}{pieces[0]}{off}  not {pieces[1]} {q:.1%}", flush=True)
        text.add(encoder.decode_bytes([step.token]))
        if text.is_complete:
            done.add(step.row)


def _generate_many(args: argparse.Namespace) -> None:
    """Continues each prompt of a file; writes a JSON object for each on a line of its own."""
    if args.echo or args.show_probs or args.json or args.n_samples > 1 or args.lookahead:
        raise PicogptError(
            "--prompts: goes without --echo, --show-probs, --json, --n-samples and --lookahead"
        )
    names, prompts = _read_prompts(args.prompts)
    lines = _read_lines(Path(args.output), prompts, args.resume) if args.output else []
    seed = args.seed
    if seed is not None and lines and lines[0]["seed"] != seed:
        found = f"was made with the seed {lines[0]['seed']}"
        raise PicogptError(f"{args.output}: {found}; resume with the same, or none")
    if seed is None and _is_sampled(args):
        seed = lines[0]["seed"] if lines else int.from_bytes(os.urandom(4), "big")
    encoder, hparams, params = load_model(args)
    end = [] if encoder.end_of_text is None else [encoder.end_of_text]
    first, n_ctx = len(lines), len(params["wpe"])
    names, prompts = names[first:], prompts[first:]
    all_ids = [encoder.encode(p, allow_special=args.allow_special) or end for p in prompts]
    for name, ids in zip(names, all_ids, strict=True):
        if args.overflow == "error" and len(ids) + args.n_tokens - 1 > n_ctx:
            found = f"prompt is {len(ids)} tokens and {args.n_tokens} more are asked for"
            raise PicogptError(f"{name}: {found}; the model's window is {n_ctx}")
    texts = [_Text(args.stop) for _ in prompts]
    shown = [""] * len(prompts)

    def ends(place: int, token: int) -> bool:
        shown[place] += texts[place].add(encoder.decode_bytes([token]))
        return texts[place].is_complete

    results: Iterable[Generated] = generate_many(
        all_ids,
        params,
        hparams["n_head"],
        args.n_tokens,
        batch_size=args.batch_size,
        first=first,
        ends=ends,
        logprobs=args.logprobs,
        temperature=args.temperature,
        seed=seed,
        stop_ids=[] if args.no_stop else end,
        **_shared_options(args),
    )
    if sys.stderr.isatty():
        from tqdm import tqdm

        results = tqdm(results, total=len(prompts), unit=" prompts", leave=False)
    with Path(args.output).open("ab") if args.output else nullcontext(sys.stdout.buffer) as file:
        for place, new in enumerate(results):
            is_short = len(new) < args.n_tokens
            reason = "stop" if texts[place].is_complete else "end" if is_short else "length"
            line = {
                "prompt": prompts[place],
                "text": shown[place] + texts[place].end(),
                "tokens": new,
                "stop_reason": reason,
                "seed": seed,
            }
            if args.logprobs is not None:
                line["logprobs"] = new.logprobs
                line["top_logprobs"] = [
                    [{"id": i, "text": encoder.decode([i]), "logprob": p} for i, p in top]
                    for top in new.top_logprobs
                ]
            file.write(json.dumps(line).encode() + b"\n")
            file.flush()


def _read_prompts(file: str) -> tuple[list[str], list[str]]:
    """The places and texts of prompts: a line each, but blank ones; of .jsonl, its `prompt`."""
    names, prompts = [], []
    for i, line in enumerate(read_input(file).split("\n"), 1):
        if not line.strip():
            continue
        names.append(f"{file}:{i}")
        prompt: Any = line.removesuffix("\r")
        if file.lower().endswith(".jsonl"):
            prompt = parse_json(line, names[-1]).get("prompt")
            if not isinstance(prompt, str):
                raise PicogptError(f'{names[-1]}: "prompt" is {prompt!r:.40}; expected a string')
        prompts.append(prompt)
    return names, prompts


def _read_lines(path: Path, prompts: list[str], resume: bool) -> list[dict[str, Any]]:
    """What an earlier run wrote for the first prompts. A line that it did not finish is cut off."""
    if not path.exists():
        return []
    if not resume:
        raise PicogptError(f"{path}: is there already; pass --resume to go on, or another name")
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    rows = decode(whole, str(path)).splitlines()
    lines = [parse_json(line, f"{path}:{i}") for i, line in enumerate(rows, 1)]
    for i, line in enumerate(lines):
        if i >= len(prompts) or line.get("prompt") != prompts[i] or "seed" not in line:
            raise PicogptError(f"{path}:{i + 1}: is not of these prompts; choose another name")
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return lines


class _Text:
    """Turns the bytes of tokens into text: whole characters, and none of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_complete = False  # it has met a stop text
        self._stops = stops
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # the beginning of a stop text, perhaps

    def add(self, data: bytes) -> str:
        """Returns what can be shown now."""
        self._held += self._decoder.decode(data)
        ends = [(at + len(s), at) for s in self._stops if (at := self._held.find(s)) >= 0]
        if ends:
            self.is_complete = True
            return self._release(min(ends)[1])
        held = (n for s in self._stops for n in range(len(s)) if self._held.endswith(s[:n]))
        return self._release(len(self._held) - max(held, default=0))

    def end(self) -> str:
        """Returns what was held back; a character that is not whole ends in one U+FFFD."""
        if self.is_complete:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(len(self._held))

    def _release(self, n: int) -> str:
        shown, self._held = self._held[:n], self._held[n:]
        return shown
