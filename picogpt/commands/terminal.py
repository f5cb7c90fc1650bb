"""What the commands share: arguments, the model, files and the terminal."""

import argparse
import itertools
import math
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..backend import BACKENDS, to_backend
from ..catalog import BUNDLED, default_model, find_model
from ..download import OFFICIAL
from ..errors import PicogptError, decode, one_line
from ..loader import GELUS, Model, load


def number(kind: type, low: float, high: float, expected: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            if low <= (value := kind(text)) <= high:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return convert


WHOLE = number(int, 0, math.inf, "a whole number, 0 or more")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help whose paragraphs are as wide as the terminal; indented lines stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for is_indented, group in itertools.groupby(text.splitlines(), lambda x: x[:1] in " "):
            if is_indented:
                lines += group
            else:
                lines += textwrap.wrap(" ".join(group), width, break_on_hyphens=False)
        return "".join(f"{indent}{line}\n" for line in lines)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Options as Python 3.13 words them, whatever version runs."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, action.dest.upper())
        return f"{', '.join(action.option_strings)} {value}"


def make_parser(verb: str, operand: str, description: str, help_: str) -> argparse.ArgumentParser:
    name = f"picogpt {verb}".strip()
    return argparse.ArgumentParser(
        prog=name,
        usage=" ".join(filter(None, [name, operand, "[options]"])),
        description=description,
        epilog=help_,
        formatter_class=_Help,
        allow_abbrev=False,
    )


def add_weights_dir(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--weights-dir", metavar="DIR", help="the folder of the official models")


def add_changes(parser: argparse._ActionsContainer) -> None:
    """Adds what makes another model of the same files."""
    parser.add_argument(
        "--adapter",
        metavar="FOLDER",
        help="merge a LoRA adapter of PEFT's, or owner/name of the Hub, into the model",
    )
    parser.add_argument(
        "--gelu",
        choices=GELUS,
        help="that of a nanoGPT checkpoint, which does not say; tanh before mid-2023 "
        "(default: erf)",
    )


def model_parser(
    verb: str, operand: str, description: str, help_: str, *, runs: bool = True
) -> argparse.ArgumentParser:
    """A parser with the options that say which model, and how it runs."""
    parser = make_parser(verb, operand, description, help_)
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="MODEL",
        help=f"{', '.join((*BUNDLED, *OFFICIAL))}, owner/name of the Hub, or a folder or file",
    )
    add_weights_dir(group)
    if runs:
        add_changes(group)
        group.add_argument(
            "--backend", choices=BACKENDS, default="numpy", help="array library (default: numpy)"
        )
    return parser


def text_parser(
    verb: str, text: str, description: str, help_: str, *, runs: bool = True
) -> argparse.ArgumentParser:
    parser = model_parser(verb, f"[{text}]", description, help_, runs=runs)
    parser.add_argument("text", nargs="?", type=utf8, metavar=text, help="- reads it from stdin")
    parser.add_argument(
        "--allow-special",
        action="store_true",
        help="read <|endoftext|> as the special token, not as text",
    )
    return parser


def sampling_group(
    parser: argparse.ArgumentParser, description: str, default: str
) -> Callable[..., Any]:
    add = parser.add_argument_group("sampling", description).add_argument
    add(
        "--temperature",
        type=number(float, 0, sys.float_info.max, "a number, 0 or more"),
        metavar="T",
        help=f"divide the logits by T; 0 takes the likeliest (default: {default})",
    )
    add(
        "--top-k",
        type=WHOLE,
        default=0,
        metavar="K",
        help="only from the K likeliest tokens (default: 0, all)",
    )
    add(
        "--top-p",
        type=number(float, 0, 1, "a number from 0 to 1"),
        default=1.0,
        metavar="P",
        help="only from the likeliest tokens, as few as have the probability P in sum (default: 1)",
    )
    add(
        "--repetition-penalty",
        type=number(float, 0.01, 100, "a number from 0.01 to 100"),
        default=1.0,
        metavar="R",
        help="make tokens already in the text less likely, R times in their logits (default: 1)",
    )
    return add


def utf8(argument: str) -> str:
    """What the shell gave, read as UTF-8 whatever the locale; other bytes become U+FFFD."""
    return os.fsencode(argument).decode("utf-8", "replace")


def load_model(args: argparse.Namespace) -> Model:
    """Loads the model that is asked for; tells which one, if none is."""
    model = default_model(args.weights_dir, args.adapter) if args.model is None else args.model
    if args.model is None and sys.stderr.isatty():
        dim, plain = ("", "") if os.environ.get("NO_COLOR") else ("\x1b[2m", "\x1b[0m")
        print(f"{dim}model: {find_model(model, args.weights_dir)}{plain}", file=sys.stderr)
    loaded = load(model, weights_dir=args.weights_dir, adapter=args.adapter, gelu=args.gelu)
    if args.backend == "numpy":
        return loaded
    return loaded._replace(params=to_backend(loaded.params, args.backend))


def read_input(file: str) -> str:
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise PicogptError(f"{file}: {error.strerror}; expected a text to read") from None
    return decode(data, "stdin" if file == "-" else file)


def say(message: str) -> None:
    print(f"picogpt: {one_line(message)}", file=sys.stderr)


def in_color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def quoted(piece: bytes) -> str:
    """A token as Python writes it: a string, or bytes that other tokens complete."""
    try:
        return repr(piece.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(piece)


def drawable(character: str, otherwise: str) -> str:
    try:
        character.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return otherwise
    return character
