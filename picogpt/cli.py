"""The command `picogpt`: which command is meant, what goes wrong in words, and exit codes.

stdout carries the text and nothing else. What takes time to import waits until the arguments are
known to be good, so that --help is instant.
"""

import difflib
import io
import os
import sys
import warnings
from collections.abc import Sequence

from .commands import completion, generate, inspect, models, score
from .commands.terminal import say
from .errors import PicogptError, one_line

VERBS = {
    "generate": (generate.generate_parser, generate.run_generate),
    "tokens": (inspect.tokens_parser, inspect.run_tokens),
    "next": (inspect.next_parser, inspect.run_next),
    "lens": (inspect.lens_parser, inspect.run_lens),
    "attention": (inspect.attention_parser, inspect.run_attention),
    "score": (score.score_parser, score.run_score),
    "models": (models.models_parser, models.run_models),
    "download": (models.download_parser, models.run_download),
    "verify": (models.verify_parser, models.run_verify),
    "convert": (models.convert_parser, models.run_convert),
    "completion": (completion.completion_parser, completion.run_completion),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 done, 1 failed, 2 usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_verb = bool(arguments) and arguments[0] in VERBS
    make_parser, run = VERBS[arguments.pop(0) if is_verb else "generate"]
    parser = make_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        words = " ".join(map(one_line, unknown))
        parser.error(f"unrecognized arguments: {words}; quote a text; a command comes first")
    if sys.stderr is None:  # closed: what is for it is lost, but must not go to stdout
        sys.stderr = io.StringIO()
    text, prompts = getattr(args, "text", ""), getattr(args, "prompts", None)
    if not is_verb and text and sys.stderr.isatty():
        for name in difflib.get_close_matches(text, VERBS, 1, 0.75):
            say(f"hint: continues {text!r}; the command is {name}")
    if prompts is not None:
        if text is not None:
            parser.error("PROMPT and --prompts: expected one of them")
        text = args.text = ""
    is_dash = text == "-" and "--" not in arguments
    from_stdin = text is None or is_dash or "-" in (prompts, *getattr(args, "files", []))
    if from_stdin and (sys.stdin is None or (text is None and sys.stdin.isatty())):
        parser.print_usage(sys.stderr)
        say("nothing to work on; expected a text in quotes, or a pipe; --help tells more")
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for what the terminal cannot show
    try:
        if sys.stdout is None:
            raise PicogptError("stdout: is closed; expected a place for the text")
        with warnings.catch_warnings():
            warnings.showwarning = lambda warning, *_: say(f"warning: {warning}")
            if text is None or is_dash:
                args.text = sys.stdin.buffer.read().decode("utf-8", "replace")
            run(args)
        return 0
    except KeyboardInterrupt:
        return 130
    except PicogptError as error:
        say(f"error: {error}")
    except MemoryError:
        say("error: not enough memory; ask for fewer samples or a smaller model")
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # else whoever read the text has had enough
            say(f"error: {error.filename or 'stdout'}: {error.strerror}")
        _give_up_stdout()
    return 1


def _give_up_stdout() -> None:
    """Keeps Python from writing at its end what could not be written before."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
