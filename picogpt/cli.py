"""The command `picogpt`: arguments, text to the terminal as it is made, exit codes.

stdout carries the text and nothing else. What takes time to import waits until the arguments are
known to be good, so that --help is instant.
"""

import argparse
import codecs
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from . import __version__
from .download import FILES, OFFICIAL, fetch, is_complete
from .encoder import Encoder
from .errors import PicogptError, one_line
from .generation import stream_batch
from .loader import BUNDLED, default_model, find_model, load, load_encoder, measure, verify

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
  models                list the models, and whether and where they are here
  download MODEL        fetch an official model
  verify MODEL          check a model's files
"""
TOKENS_HELP = """\
Without TEXT, or with -, the text is what stdin holds. The vocabulary is GPT-2's, or --model's.

examples:
  picogpt tokens "Not all heroes wear capes."
  picogpt tokens --count - < story.txt
"""
DOWNLOAD_HELP = """\
MODEL is 124M, 355M, 774M or 1558M (0.5, 1.4, 3.1 or 6.2 GB), or distilgpt2 (0.3 GB), which Hugging
Face has only. Where it was interrupted it goes on, and files that are damaged are fetched again.
Prints the folder.

environment:
  PICOGPT_BASE_URL      in place of OpenAI's https://openaipublic.blob.core.windows.net/gpt-2/models
  HF_ENDPOINT           in place of https://huggingface.co
  PICOGPT_OFFLINE=1     never connect
  HTTPS_PROXY, REQUESTS_CA_BUNDLE and so on are those of the package requests
"""
VERIFY_HELP = """\
Reads all of a model's files: its vocabulary, its tensors' names and shapes, their checksums where
the format has them (TensorFlow's has, safetensors has none), and whether all numbers are finite.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 done, 1 failed, 2 usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments.pop(0) if arguments and arguments[0] in VERBS else "generate"
    make_parser, run = VERBS[verb]
    parser = make_parser()
    args = parser.parse_args(arguments)
    if sys.stderr is None:  # closed: what is for it is lost, but must not go to stdout
        sys.stderr = io.StringIO()
    text = getattr(args, "text", "")  # not every command takes one
    from_stdin = text is None or (text == "-" and "--" not in arguments)
    if from_stdin and (sys.stdin is None or (text is None and sys.stdin.isatty())):
        parser.print_usage(sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for what the terminal cannot show
    try:
        if sys.stdout is None:
            raise PicogptError("stdout: is closed; expected a place for the text")
        with warnings.catch_warnings():
            warnings.showwarning = lambda warning, *_: _say(f"warning: {warning}")
            if from_stdin:
                args.text = sys.stdin.buffer.read().decode("utf-8", "replace")
            run(args)
        return 0
    except KeyboardInterrupt:
        return 130
    except PicogptError as error:
        _say(f"error: {error}")
    except MemoryError:
        _say("error: not enough memory; ask for fewer samples or a smaller model")
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # else whoever read the text has had enough
            _say(f"error: {error.filename or 'stdout'}: {error.strerror}")
        _give_up_stdout()
    return 1


def _parser(verb: str, operand: str, description: str, help_: str) -> argparse.ArgumentParser:
    name = f"picogpt {verb}".strip()
    parser = argparse.ArgumentParser(
        prog=name,
        usage=" ".join(filter(None, [name, operand, "[options]"])),
        description=description,
        epilog=help_,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--weights-dir", metavar="DIR", help="the folder of the official models")
    return parser


def _text_parser(verb: str, text: str, description: str, help_: str) -> argparse.ArgumentParser:
    parser = _parser(verb, f"[{text}]", description, help_)
    parser.add_argument("text", nargs="?", type=_utf8, metavar=text, help="- reads it from stdin")
    parser.add_argument(
        "--model", metavar="MODEL", help=f"{', '.join((*BUNDLED, *OFFICIAL))} or a folder"
    )
    parser.add_argument(
        "--allow-special",
        action="store_true",
        help="read <|endoftext|> as the special token, not as text",
    )
    return parser


def _generate_parser() -> argparse.ArgumentParser:
    parser = _text_parser("", "PROMPT", "Continue a text with GPT-2.", GENERATE_HELP)
    whole = _number(int, 0, math.inf, "a whole number, 0 or more")
    add = parser.add_argument
    add("--echo", action="store_true", help="print the prompt before the text")
    add("--version", action="version", version=f"picogpt {__version__}")

    add = parser.add_argument_group("length").add_argument
    add("--n-tokens", type=whole, default=40, metavar="N", help="add at most N (default: 40)")
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

    add = parser.add_argument_group(
        "sampling",
        "Unless one of these is set, but for the penalty, the likeliest token is taken each time.",
    ).add_argument
    add(
        "--temperature",
        type=_number(float, 0, sys.float_info.max, "a number, 0 or more"),
        metavar="T",
        help="divide the logits by T; 0 takes the likeliest (default: 1 with the next three)",
    )
    add(
        "--top-k",
        type=whole,
        default=0,
        metavar="K",
        help="only from the K likeliest tokens (default: 0, all)",
    )
    add(
        "--top-p",
        type=_number(float, 0, 1, "a number from 0 to 1"),
        default=1.0,
        metavar="P",
        help="only from the fewest likeliest tokens that have the probability P together",
    )
    add("--seed", type=whole, metavar="N", help="the same seed gives the same text")
    add(
        "--repetition-penalty",
        type=_number(float, 0.01, 100, "a number from 0.01 to 100"),
        default=1.0,
        metavar="R",
        help="divide the logits of tokens already in the text by R (default: 1)",
    )
    add(
        "--n-samples",
        type=_number(int, 1, 1000, "a whole number from 1 to 1000"),
        default=1,
        metavar="K",
        help="make K texts side by side, sampled (default: 1)",
    )

    return parser


def _tokens_parser() -> argparse.ArgumentParser:
    description = "Show how a text is cut into tokens: their number, then the id and text of each."
    parser = _text_parser("tokens", "TEXT", description, TOKENS_HELP)
    parser.add_argument("--count", action="store_true", help="print their number only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _models_parser() -> argparse.ArgumentParser:
    description = "List the models: parameters, size, and whether and where they are here."
    return _parser("models", "", description, "")


def _download_parser() -> argparse.ArgumentParser:
    parser = _parser("download", "MODEL", "Fetch an official model.", DOWNLOAD_HELP)
    parser.add_argument("model", metavar="MODEL", help=", ".join(OFFICIAL))
    parser.add_argument(
        "--source", choices=list(FILES), help="where from (default: openai, if it has the model)"
    )
    return parser


def _verify_parser() -> argparse.ArgumentParser:
    parser = _parser("verify", "MODEL", "Check a model's files.", VERIFY_HELP)
    parser.add_argument("model", metavar="MODEL", help="a model's name, or a folder")
    return parser


def _number(kind: type, low: float, high: float, expected: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            if low <= (value := kind(text)) <= high:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return convert


def _utf8(argument: str) -> str:
    """What the shell gave, read as UTF-8 whatever the locale; other bytes become U+FFFD."""
    return os.fsencode(argument).decode("utf-8", "replace")


def _stop_text(argument: str) -> str:
    if not argument:
        raise argparse.ArgumentTypeError("'' is in every text")
    return _utf8(argument)


def _generate(args: argparse.Namespace) -> None:
    model = default_model(args.weights_dir) if args.model is None else args.model
    if args.model is None and sys.stderr.isatty():
        dim, plain = ("", "") if os.environ.get("NO_COLOR") else ("\x1b[2m", "\x1b[0m")
        print(f"{dim}model: {find_model(model, args.weights_dir)}{plain}", file=sys.stderr)
    encoder, hparams, params = load(model, weights_dir=args.weights_dir)
    ids = encoder.encode(args.text, allow_special=args.allow_special)
    end = [] if encoder.end_of_text is None else [encoder.end_of_text]
    samples = args.n_samples > 1  # several texts are of use only if they differ
    done: set[int] = set()
    steps: Iterable[tuple[int, int]] = stream_batch(
        [ids or end] * args.n_samples,
        params,
        hparams["n_head"],
        args.n_tokens,
        temperature=1.0 if samples and args.temperature is None else args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop_ids=[] if args.no_stop else end,
        overflow=args.overflow,
        done=done,
    )
    if sys.stderr.isatty() and (samples or not sys.stdout.isatty()):
        from tqdm import tqdm

        steps = tqdm(steps, total=args.n_samples * args.n_tokens, unit=" tokens", leave=False)
    texts = [_Text(args.stop) for _ in range(args.n_samples)]
    shown = [args.text if args.echo else ""] * args.n_samples
    try:
        if args.echo and not samples:
            print(args.text, end="", flush=True)
        for row, token in steps:
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


def _tokens(args: argparse.Namespace) -> None:
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
        in_color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for i, (token, piece) in enumerate(zip(ids, pieces, strict=True)):
            try:
                shown = repr(piece.decode("utf-8"))
            except UnicodeDecodeError:  # bytes of a character that other tokens complete
                shown = repr(piece)
            on, off = (f"\x1b[{32 + 4 * (i % 2)}m", "\x1b[0m") if in_color else ("", "")
            print(f"{token:6} {on}{shown}{off}")


def _models(args: argparse.Namespace) -> None:
    print(f"{'model':<12}{'parameters':>14}{'MB':>8}  folder")
    for name in (*BUNDLED, *OFFICIAL):
        folder = find_model(name, args.weights_dir, fetch=False)
        if name in BUNDLED or is_complete(folder):
            n_parameters, n_bytes = measure(folder)
            where = str(folder)
        else:
            n_parameters = OFFICIAL[name].n_parameters
            n_bytes = 4 * n_parameters
            where = f"not whole in {folder}" if folder.exists() else "not here"
        print(f"{name:<12}{n_parameters:>14,}{round(n_bytes / 1e6):>8,}  {where}")


def _download(args: argparse.Namespace) -> None:
    folder = find_model(args.model, args.weights_dir, fetch=False)
    if args.model in OFFICIAL:
        fetch(args.model, folder, args.source)
        load(folder, verify=False)  # do the files fit each other?
    elif args.model not in BUNDLED:
        names = ", ".join(OFFICIAL)
        raise PicogptError(f"{args.model}: is a folder; what can be fetched is {names}")
    print(folder)


def _verify(args: argparse.Namespace) -> None:
    model, warned = args.model, warnings.catch_warnings()
    folder = find_model(model, args.weights_dir, fetch=False)
    if model in OFFICIAL and not is_complete(folder):
        raise PicogptError(f'{model}: is not whole in {folder}; run "picogpt download {model}"')
    with warned:
        warnings.filterwarnings("error", message="checksums not checked")
        try:
            print(f"{folder}: {verify(folder, is_official=model in OFFICIAL)}")
        except UserWarning as warning:
            raise PicogptError(f"{folder}: {warning}") from None


VERBS = {
    "generate": (_generate_parser, _generate),
    "tokens": (_tokens_parser, _tokens),
    "models": (_models_parser, _models),
    "download": (_download_parser, _download),
    "verify": (_verify_parser, _verify),
}


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


def _say(message: str) -> None:
    print(f"picogpt: {one_line(message)}", file=sys.stderr)


def _give_up_stdout() -> None:
    """Keeps Python from writing at its end what could not be written before."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
