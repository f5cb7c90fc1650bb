"""The command `picogpt`: arguments, text to the terminal as it is made, exit codes.

stdout carries the text and nothing else. What takes time to import waits until the arguments are
known to be good, so that --help is instant.
"""

import argparse
import codecs
import io
import os
import sys
import warnings
from collections.abc import Sequence

from . import __version__
from .errors import PicogptError
from .loader import default_model, find_model, load

EPILOG = """\
Without PROMPT, or with -, the prompt is what stdin holds, byte for byte. Anything after -- is
prompt text, and so is what follows the word generate.

Without --model, $PICOGPT_MODEL runs, else 124M if it lies in the weights folder, else tales, which
comes with picogpt. The weights folder is $PICOGPT_WEIGHTS, else `picogpt` in the user's cache.

examples:
  picogpt "Once upon a time" --n-tokens 100
  picogpt "Once upon a time" --model path/to/folder
  printf 'Once upon a time' | picogpt
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 done, 1 failed, 2 usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["generate"]:
        del arguments[0]
    parser = _parser()
    args = parser.parse_args(arguments)
    from_stdin = args.prompt is None or (args.prompt == "-" and "--" not in arguments)
    if args.prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        parser.print_usage(sys.stderr)
        return 2
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda warning, *_: _say(f"warning: {warning}")
            prompt = sys.stdin.buffer.read() if from_stdin else os.fsencode(args.prompt)
            _generate(prompt.decode("utf-8", "replace"), args)
        return 0
    except KeyboardInterrupt:
        print(flush=True)
        return 130
    except PicogptError as error:
        _say(f"error: {error}")
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # else whoever read the text has had enough
            _say(f"error: {error.filename or 'stdout'}: {error.strerror}")
        _give_up_stdout()
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="picogpt",
        description="Continue a text with GPT-2.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the text to continue")
    parser.add_argument(
        "--n-tokens",
        type=_count,
        default=40,
        metavar="N",
        help="tokens to add, a word or a part of one each (default: 40)",
    )
    parser.add_argument(
        "--model", metavar="NAME|FOLDER", help="tales, 124M, 355M, 774M, 1558M or a folder"
    )
    parser.add_argument(
        "--allow-special",
        action="store_true",
        help="read <|endoftext|> in the prompt as the special token, not as text",
    )
    parser.add_argument("--version", action="version", version=f"picogpt {__version__}")
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 0 or more")
    return int(text)


def _generate(prompt: str, args: argparse.Namespace) -> None:
    from .generation import stream

    model = args.model or default_model()
    if not args.model and sys.stderr.isatty():
        dim, plain = ("", "") if os.environ.get("NO_COLOR") else ("\x1b[2m", "\x1b[0m")
        print(f"{dim}model: {find_model(model)}{plain}", file=sys.stderr)
    encoder, hparams, params = load(model)
    ids = encoder.encode(prompt, allow_special=args.allow_special)
    end = [] if encoder.end_of_text is None else [encoder.end_of_text]
    new = stream(ids or end, params, hparams["n_head"], args.n_tokens, stop_ids=end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for what the terminal cannot show
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a token may end inside a character
    for token in new:
        print(decoder.decode(encoder.decode_bytes([token])), end="", flush=True)
    print(decoder.decode(b"", final=True), flush=True)


def _say(message: str) -> None:
    print(f"picogpt: {message}", file=sys.stderr)


def _give_up_stdout() -> None:
    """Keeps Python from writing at its end what could not be written before."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
