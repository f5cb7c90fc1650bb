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
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from . import __version__
from .backend import BACKENDS, to_backend
from .download import FILES, OFFICIAL, fetch, is_complete
from .encoder import Encoder
from .errors import PicogptError, decode, one_line, parse_json, read_text
from .generation import Generated, Step, generate_many, next_tokens, stream_batch
from .loader import BUNDLED, Model, default_model, find_model, load, load_encoder, measure, verify
from .pictures import attention_plot, check_picture, lens_plot, save_picture
from .scoring import Score, Scored, score_texts
from .tracing import logit_lens

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
  download MODEL        fetch an official model
  verify MODEL          check a model's files
"""
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
A row shows how one token divides its attention among the tokens up to itself.

examples:
  picogpt attention "The wolf said that he" -o attention.png
  picogpt attention "The wolf said that he" --layer 2 --head 5 -o attention.svg
"""
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


def _number(kind: type, low: float, high: float, expected: str) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            if low <= (value := kind(text)) <= high:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return convert


AUTO_LOOKAHEAD = 31  # tokens; how many of them are guessed is decided by how it goes
WHOLE = _number(int, 0, math.inf, "a whole number, 0 or more")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0 done, 1 failed, 2 usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = arguments.pop(0) if arguments and arguments[0] in VERBS else "generate"
    make_parser, run = VERBS[verb]
    parser = make_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        words = " ".join(map(one_line, unknown))
        parser.error(f"unrecognized arguments: {words}; quote a text; a command comes first")
    if sys.stderr is None:  # closed: what is for it is lost, but must not go to stdout
        sys.stderr = io.StringIO()
    text, prompts = getattr(args, "text", ""), getattr(args, "prompts", None)
    if prompts is not None:
        if text is not None:
            parser.error("PROMPT and --prompts: expected one of them")
        text = args.text = ""
    is_dash = text == "-" and "--" not in arguments
    from_stdin = text is None or is_dash or "-" in (prompts, *getattr(args, "files", []))
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
            if text is None or is_dash:
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


def _model_parser(verb: str, operand: str, description: str, help_: str) -> argparse.ArgumentParser:
    parser = _parser(verb, operand, description, help_)
    parser.add_argument(
        "--model", metavar="MODEL", help=f"{', '.join((*BUNDLED, *OFFICIAL))} or a folder"
    )
    return parser


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend", choices=BACKENDS, default="numpy", help="array library (default: numpy)"
    )


def _text_parser(verb: str, text: str, description: str, help_: str) -> argparse.ArgumentParser:
    parser = _model_parser(verb, f"[{text}]", description, help_)
    parser.add_argument("text", nargs="?", type=_utf8, metavar=text, help="- reads it from stdin")
    parser.add_argument(
        "--allow-special",
        action="store_true",
        help="read <|endoftext|> as the special token, not as text",
    )
    return parser


def _generate_parser() -> argparse.ArgumentParser:
    parser = _text_parser("", "PROMPT", "Continue a text with GPT-2.", GENERATE_HELP)
    add = parser.add_argument
    add("--echo", action="store_true", help="print the prompt before the text")
    add("--show-probs", action="store_true", help="print a line for each token: its probability")
    add("--json", action="store_true", help="the same as JSON, an object a line")
    add("--version", action="version", version=f"picogpt {__version__}")

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
    add = _sampling_group(
        parser,
        "Unless one of these is set, but for the penalty, the likeliest token is taken each time.",
        "1 with --top-k, --top-p or --seed",
    )
    add("--seed", type=WHOLE, metavar="N", help="the same seed gives the same text")
    add(
        "--n-samples",
        type=_number(int, 1, 1000, "a whole number from 1 to 1000"),
        default=1,
        metavar="K",
        help="make K texts side by side, sampled (default: 1)",
    )

    add = parser.add_argument_group(
        "many prompts", "Continue each prompt of a file, several side by side."
    ).add_argument
    add("--prompts", metavar="FILE", help="one a line, or .jsonl with a prompt in each; - is stdin")
    add("-o", "--output", metavar="FILE", help="write a JSON object a line there, not to stdout")
    add("--resume", action="store_true", help="go on behind what the output file has already")
    add(
        "--batch-size",
        type=_number(int, 1, 1000, "a whole number from 1 to 1000"),
        default=32,
        metavar="N",
        help="prompts side by side (default: 32)",
    )
    add("--logprobs", type=WHOLE, metavar="K", help="tell log-probabilities, and the K likeliest")
    _add_backend(parser)
    return parser


def _sampling_group(
    parser: argparse.ArgumentParser, description: str, default: str
) -> Callable[..., Any]:
    add = parser.add_argument_group("sampling", description).add_argument
    add(
        "--temperature",
        type=_number(float, 0, sys.float_info.max, "a number, 0 or more"),
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
        type=_number(float, 0, 1, "a number from 0 to 1"),
        default=1.0,
        metavar="P",
        help="only from the fewest likeliest tokens that have the probability P together",
    )
    add(
        "--repetition-penalty",
        type=_number(float, 0.01, 100, "a number from 0.01 to 100"),
        default=1.0,
        metavar="R",
        help="divide the logits of tokens already in the text by R (default: 1)",
    )
    return add


def _tokens_parser() -> argparse.ArgumentParser:
    description = "Show how a text is cut into tokens: their number, then the id and text of each."
    parser = _text_parser("tokens", "TEXT", description, TOKENS_HELP)
    parser.add_argument("--count", action="store_true", help="print their number only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _next_parser() -> argparse.ArgumentParser:
    description = "Show which tokens may come next, and how likely each is."
    parser = _text_parser("next", "TEXT", description, NEXT_HELP)
    add = parser.add_argument
    add("--top", type=WHOLE, default=10, metavar="N", help="show the N likeliest (default: 10)")
    add("--json", action="store_true", help="print one JSON object")
    _sampling_group(parser, "How the probabilities are changed before one would be picked.", "1")
    _add_backend(parser)
    return parser


def _lens_parser() -> argparse.ArgumentParser:
    description = "Show what each layer would say next, after each token of a text."
    parser = _text_parser("lens", "TEXT", description, LENS_HELP)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="draw it instead: a .png, .svg or .pdf"
    )
    _add_backend(parser)
    return parser


def _attention_parser() -> argparse.ArgumentParser:
    description = "Draw where each token of a text looks."
    parser = _text_parser("attention", "TEXT", description, ATTENTION_HELP)
    parser.usage = "picogpt attention [TEXT] -o FILE [options]"
    add = parser.add_argument
    add("-o", "--output", required=True, metavar="FILE", help="a .png, .svg or .pdf")
    add("--layer", type=WHOLE, metavar="N", help="from 0 (default: the last)")
    add("--head", type=_head, default="all", metavar="N", help="from 0, mean or all (default: all)")
    _add_backend(parser)
    return parser


def _score_parser() -> argparse.ArgumentParser:
    description = "Tell how well the model foresees texts: perplexity, bits per byte and so on."
    parser = _model_parser("score", "FILE...", description, SCORE_HELP)
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
    _add_backend(parser)
    return parser


def _lookahead(argument: str) -> int | None:
    return None if argument == "auto" else int(WHOLE(argument))


def _head(argument: str) -> int | str:
    if argument not in ("all", "mean") and not argument.isdecimal():
        raise argparse.ArgumentTypeError(f"{argument!r} is not a whole number, mean or all")
    return int(argument) if argument.isdecimal() else argument


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


def _utf8(argument: str) -> str:
    """What the shell gave, read as UTF-8 whatever the locale; other bytes become U+FFFD."""
    return os.fsencode(argument).decode("utf-8", "replace")


def _stop_text(argument: str) -> str:
    if not argument:
        raise argparse.ArgumentTypeError("'' is in every text")
    return _utf8(argument)


def _load(args: argparse.Namespace) -> Model:
    """Loads the model that is asked for; tells which one, if none is."""
    model = default_model(args.weights_dir) if args.model is None else args.model
    if args.model is None and sys.stderr.isatty():
        dim, plain = ("", "") if os.environ.get("NO_COLOR") else ("\x1b[2m", "\x1b[0m")
        print(f"{dim}model: {find_model(model, args.weights_dir)}{plain}", file=sys.stderr)
    loaded = load(model, weights_dir=args.weights_dir)
    if args.backend == "numpy":
        return loaded
    return loaded._replace(params=to_backend(loaded.params, args.backend))


def _generate(args: argparse.Namespace) -> None:
    if args.prompts is not None:
        _generate_many(args)
        return
    if args.output or args.resume or args.logprobs is not None:
        raise PicogptError("--output, --resume and --logprobs go with --prompts only")
    if args.n_samples > 1 and (args.show_probs or args.json):
        raise PicogptError("--show-probs and --json show one text; leave --n-samples at 1")
    encoder, hparams, params = _load(args)
    ids = encoder.encode(args.text, allow_special=args.allow_special)
    end = [] if encoder.end_of_text is None else [encoder.end_of_text]
    samples = args.n_samples > 1  # several texts are of use only if they differ
    done: set[int] = set()
    is_sampled = args.top_k or args.top_p < 1 or args.seed is not None or args.temperature
    can_look_ahead = not samples and (args.temperature == 0 or not is_sampled)
    lookahead = AUTO_LOOKAHEAD if args.lookahead is None and can_look_ahead else args.lookahead
    steps: Iterable[Step] = stream_batch(
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
        lookahead=lookahead or 0,
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
            pieces = [_quoted(encoder.token_bytes(token)) for token, _ in rows]
            p, q = (math.exp(logprob) for _, logprob in rows)
            level = sum(p >= bound for bound in (0.05, 0.2, 0.5, 0.9))
            on, off = (f"\x1b[{CONFIDENCE[level]}m", "\x1b[0m") if _in_color() else ("", "")
            print(f"{p:7.1%}  {on}{pieces[0]}{off}  not {pieces[1]} {q:.1%}", flush=True)
        text.add(encoder.decode_bytes([step.token]))
        if text.is_complete:
            done.add(step.row)


# From doubtful to sure, in colours that all can tell apart, by brightness too.
CONFIDENCE = ("97;48;5;160", "30;48;5;215", "30;48;5;223", "30;48;5;195", "30;48;5;153")


def _generate_many(args: argparse.Namespace) -> None:
    """Continues each prompt of a file; writes a JSON object for each on a line of its own."""
    names, prompts = _read_prompts(args.prompts)
    lines = _read_lines(Path(args.output), prompts, args.resume) if args.output else []
    is_sampled = args.top_k or args.top_p < 1 or args.seed is not None or args.temperature
    seed = args.seed
    if seed is None and is_sampled and args.temperature != 0:
        seed = lines[0]["seed"] if lines else int.from_bytes(os.urandom(4), "big")
    encoder, hparams, params = _load(args)
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
        top_k=args.top_k,
        top_p=args.top_p,
        repetition_penalty=args.repetition_penalty,
        seed=seed,
        stop_ids=[] if args.no_stop else end,
        overflow=args.overflow,
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
    for i, line in enumerate(_read_input(file).split("\n"), 1):
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
        for i, (token, piece) in enumerate(zip(ids, pieces, strict=True)):
            on, off = (f"\x1b[{32 + 4 * (i % 2)}m", "\x1b[0m") if _in_color() else ("", "")
            print(f"{token:6} {on}{_quoted(piece)}{off}")


def _in_color() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _quoted(piece: bytes) -> str:
    """A token as Python writes it: a string, or bytes that other tokens complete."""
    try:
        return repr(piece.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(piece)


def _next(args: argparse.Namespace) -> None:
    encoder, hparams, params = _load(args)
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
    width = max((len(_quoted(piece)) for _, _, piece, _, _ in rows), default=5)
    block = _drawable("█", "#")
    print(f"rank  {'piece':{width}}      id  probability {'':20}  cumulative")
    for rank, token, piece, p, sum_ in rows:
        bar = block * round(20 * p)
        print(f"{rank:4}  {_quoted(piece):{width}}  {token:6}  {p:11.2%} {bar:20}  {sum_:10.2%}")


def _drawable(character: str, otherwise: str) -> str:
    try:
        character.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return otherwise
    return character


def _lens(args: argparse.Namespace) -> None:
    if args.output is not None:
        check_picture(args.output)
    encoder, hparams, params = _load(args)
    ids = encoder.encode(args.text, allow_special=args.allow_special)
    if args.output is not None:
        save_picture(lens_plot(ids, encoder, params, hparams["n_head"]), args.output)
        return
    best, likely = logit_lens(ids, params, hparams["n_head"])
    names = ["embedding", *(f"layer {i}" for i in range(len(best) - 1))]
    columns = [["after", *(_quoted(encoder.token_bytes(token)) for token in ids)]]
    for name, layer, chances in zip(names, best, likely, strict=True):
        said = [
            f"{_quoted(encoder.token_bytes(token))} {p:.0%}"
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


def _attention(args: argparse.Namespace) -> None:
    check_picture(args.output)
    encoder, hparams, params = _load(args)
    ids = encoder.encode(args.text, allow_special=args.allow_special)
    options = {"layer": args.layer, "head": args.head}
    save_picture(attention_plot(ids, encoder, params, hparams["n_head"], **options), args.output)


def _score(args: argparse.Namespace) -> None:
    if args.files.count("-") > 1:
        raise PicogptError("-: is given twice; stdin can be read once")
    encoder, hparams, params = _load(args)
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


SCORE_COLUMNS = ("tokens", "nats", "ppl/token", "ppl/word", "ppl/byte", "bits/byte")


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
    if not _in_color():
        print("   logprob      id  token")
        for token, logprob in zip(ids, scored.logprobs, strict=True):
            print(f"{logprob:10.4f}  {token:6}  {_quoted(encoder.token_bytes(token))}")
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


# A darker ground for each doubling; blue to red by way of white, which all can tell apart.
SURPRISE = {
    "0-2": "30;48;5;153",
    "2-4": "30;48;5;195",
    "4-8": "30;48;5;223",
    "8-16": "30;48;5;215",
    "16-": "97;48;5;160",
}


def _score_progress(batches: list[Any]) -> Iterable[Any]:
    if not sys.stderr.isatty() or len(batches) < 2:
        return batches
    from tqdm import tqdm

    return tqdm(batches, unit=" windows", leave=False)


def _read_input(file: str) -> str:
    try:
        return decode(sys.stdin.buffer.read(), "stdin") if file == "-" else read_text(Path(file))
    except OSError as error:
        raise PicogptError(f"{file}: {error.strerror}; expected a text to read") from None


def _read_texts(file: str) -> tuple[list[str], list[str]]:
    """The names and contents of the texts in a file: one, or one a line in .jsonl."""
    text = _read_input(file)
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


def _models(args: argparse.Namespace) -> None:
    print(f"{'model':<12}{'parameters':>14}{'MB':>8}  folder")
    for name in (*BUNDLED, *OFFICIAL):
        folder = find_model(name, args.weights_dir, fetch=False)
        official = OFFICIAL.get(name)
        if official and not is_complete(folder):
            where = f"not whole in {folder}" if folder.exists() else "not here"
            n_parameters = official.n_parameters
            n_bytes = 4 * n_parameters
        else:
            try:
                where, (n_parameters, n_bytes) = str(folder), measure(folder)
            except (PicogptError, OSError) as error:
                where, n_parameters, n_bytes = f"damaged: {error}", 0, 0
        print(f"{name:<12}{n_parameters:>14,}{round(n_bytes / 1e6):>8,}  {one_line(where)}")


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
        state = "is not whole in" if folder.exists() else "is not here; it would be in"
        raise PicogptError(f'{model}: {state} {folder}; run "picogpt download {model}"')
    with warned:
        warnings.filterwarnings("error", message="checksums not checked")
        try:
            print(one_line(f"{folder}: {verify(folder, is_official=model in OFFICIAL)}"))
        except UserWarning as warning:
            raise PicogptError(f"{folder}: {warning}") from None


VERBS = {
    "generate": (_generate_parser, _generate),
    "tokens": (_tokens_parser, _tokens),
    "next": (_next_parser, _next),
    "lens": (_lens_parser, _lens),
    "attention": (_attention_parser, _attention),
    "score": (_score_parser, _score),
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
