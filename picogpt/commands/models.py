"""`picogpt models`, `download` and `verify`: which models are here, whole and right."""

import argparse
import warnings

from ..catalog import BUNDLED, find_model
from ..download import FILES, OFFICIAL, fetch, is_complete
from ..errors import PicogptError, one_line
from ..loader import load, measure, verify
from .terminal import add_weights_dir, make_parser

DOWNLOAD_HELP = """\
MODEL is 124M, 355M, 774M or 1558M (0.5, 1.4, 3.1 or 6.2 GB), or distilgpt2 (0.3 GB), which only
Hugging Face has. Where it was interrupted it goes on, and files that are damaged are fetched again.
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


def models_parser() -> argparse.ArgumentParser:
    description = "List the models: parameters, size, and whether and where they are here."
    parser = make_parser("models", "", description, "")
    add_weights_dir(parser)
    return parser


def run_models(args: argparse.Namespace) -> None:
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


def download_parser() -> argparse.ArgumentParser:
    parser = make_parser("download", "MODEL", "Fetch an official model.", DOWNLOAD_HELP)
    add_weights_dir(parser)
    parser.add_argument("model", metavar="MODEL", help=", ".join(OFFICIAL))
    parser.add_argument(
        "--source", choices=list(FILES), help="where from (default: openai, if it has the model)"
    )
    return parser


def run_download(args: argparse.Namespace) -> None:
    folder = find_model(args.model, args.weights_dir, fetch=False)
    if args.model in OFFICIAL:
        fetch(args.model, folder, args.source)
        load(folder, verify=False)  # do the files fit each other?
    elif args.model not in BUNDLED:
        names = ", ".join(OFFICIAL)
        raise PicogptError(f"{args.model}: is a folder; what can be fetched is {names}")
    print(folder)


def verify_parser() -> argparse.ArgumentParser:
    parser = make_parser("verify", "MODEL", "Check a model's files.", VERIFY_HELP)
    add_weights_dir(parser)
    parser.add_argument("model", metavar="MODEL", help="a model's name, or a folder")
    return parser


def run_verify(args: argparse.Namespace) -> None:
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
