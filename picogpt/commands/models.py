"""`picogpt models`, `download` and `verify`: which models are here, whole and right."""

import argparse
import warnings
from pathlib import Path

from ..catalog import BUNDLED, HUB, HUB_NAMES, find_model, list_cached, weights_folder
from ..download import FILES, OFFICIAL, fetch, is_complete
from ..errors import PicogptError, one_line
from ..loader import load, measure, verify
from ..saving import DTYPES, PACKAGES, save
from .terminal import add_changes, add_weights_dir, make_parser

DOWNLOAD_HELP = """\
MODEL is 124M, 355M, 774M or 1558M (0.5, 1.4, 3.1 or 6.2 GB), or distilgpt2 (0.3 GB), which only
Hugging Face has. Where it was interrupted it goes on, and files that are damaged are fetched again.
Or it is owner/name, or owner/name@revision, of the Hugging Face Hub: a model or an adapter, which
the package huggingface_hub fetches into its own cache. Prints the folder.

environment:
  PICOGPT_BASE_URL      in place of OpenAI's https://openaipublic.blob.core.windows.net/gpt-2/models
  HF_ENDPOINT           in place of https://huggingface.co
  PICOGPT_OFFLINE=1     never connect
  HF_HUB_CACHE, HF_TOKEN, HF_HUB_OFFLINE and so on are those of the package huggingface_hub
  HTTPS_PROXY, REQUESTS_CA_BUNDLE and so on are those of the package requests
"""
CONVERT_HELP = """\
Reads MODEL as all commands do, whatever its format, and writes it anew: in Hugging Face's layout
(config.json, model.safetensors and the vocabulary), which transformers reads, or as a GGUF, which
llama.cpp runs. It needs the package safetensors or gguf. A GGUF cannot hold the exact gelu, nor a
vocabulary of single characters. Nothing that exists is written to.

examples:
  picogpt convert ckpt.pt my-folder
  picogpt convert 124M gpt2.gguf --dtype float16
"""
VERIFY_HELP = """\
Reads all of a model's files: its vocabulary, its tensors' names and shapes, their checksums where
the format has them (TensorFlow's and PyTorch's archives have), and whether all numbers are finite.
"""


def models_parser() -> argparse.ArgumentParser:
    description = "List the models: parameters, size, and whether and where they are here."
    parser = make_parser("models", "", description, "")
    add_weights_dir(parser)
    return parser


def run_models(args: argparse.Namespace) -> None:
    official_ones = {official.repository for official in OFFICIAL.values()}
    others = [name for name in list_cached() if name not in official_ones]
    width = max(map(len, ("distilgpt2", *others))) + 2
    print(f"{'model':<{width}}{'parameters':>14}{'MB':>8}  folder")
    for name in (*BUNDLED, *OFFICIAL, *others):
        folder = find_model(name, args.weights_dir, fetch=False)
        official = OFFICIAL.get(name)
        if (
            official
            and folder.parent == weights_folder(args.weights_dir)
            and not is_complete(folder)
        ):
            where = f"not whole in {folder}" if folder.exists() else "not here"
            n_parameters = official.n_parameters
            n_bytes = 4 * n_parameters
        else:
            try:
                where, (n_parameters, n_bytes) = str(folder), measure(folder)
            except (PicogptError, OSError) as error:
                where, n_parameters, n_bytes = f"damaged: {error}", 0, 0
        print(f"{name:<{width}}{n_parameters:>14,}{round(n_bytes / 1e6):>8,}  {one_line(where)}")


def download_parser() -> argparse.ArgumentParser:
    parser = make_parser("download", "MODEL", "Fetch a model.", DOWNLOAD_HELP)
    add_weights_dir(parser)
    parser.add_argument("model", metavar="MODEL", help=f"{', '.join(OFFICIAL)} or owner/name")
    parser.add_argument(
        "--source", choices=list(FILES), help="where from (default: openai, if it has the model)"
    )
    return parser


def run_download(args: argparse.Namespace) -> None:
    model = HUB_NAMES.get(args.model, args.model)
    if model in OFFICIAL:
        folder = weights_folder(args.weights_dir) / model
        fetch(model, folder, args.source)
        load(folder, verify=False)  # do the files fit each other?
    elif HUB.fullmatch(model) and not Path(model).exists():
        if args.source == "openai":
            raise PicogptError(f"{model}: is not OpenAI's; pass --source huggingface")
        folder = find_model(model)
        if not (folder / "adapter_config.json").is_file():
            load(folder, verify=False)
    else:
        folder = find_model(model, args.weights_dir, fetch=False)
        if model not in BUNDLED:
            names = ", ".join(OFFICIAL)
            raise PicogptError(
                f"{model}: is a folder; what can be fetched is {names}, and owner/name of the Hub"
            )
    print(folder)


def convert_parser() -> argparse.ArgumentParser:
    description = "Write a model in another format."
    parser = make_parser("convert", "MODEL PATH", description, CONVERT_HELP)
    parser.add_argument("model", metavar="MODEL", help="a model's name, or a folder or file")
    parser.add_argument("path", metavar="PATH", help="a new folder, or a new file *.gguf")
    parser.add_argument(
        "--to", choices=PACKAGES, help="the format (default: by the end of PATH, else safetensors)"
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="of the numbers (default: float32); float16 halves the size",
    )
    add_weights_dir(parser)
    add_changes(parser)
    return parser


def run_convert(args: argparse.Namespace) -> None:
    options = {"weights_dir": args.weights_dir, "adapter": args.adapter, "gelu": args.gelu}
    encoder, hparams, params = load(args.model, **options)
    save(args.path, encoder, hparams, params, format=args.to, dtype=args.dtype)


def verify_parser() -> argparse.ArgumentParser:
    parser = make_parser("verify", "MODEL", "Check a model's files.", VERIFY_HELP)
    add_weights_dir(parser)
    parser.add_argument("model", metavar="MODEL", help="a model's name, or a folder or file")
    return parser


def run_verify(args: argparse.Namespace) -> None:
    model, warned = args.model, warnings.catch_warnings()
    folder = find_model(model, args.weights_dir, fetch=False)
    is_official = folder.parent == weights_folder(args.weights_dir) and folder.name in OFFICIAL
    if is_official and not is_complete(folder):
        state = "is not whole in" if folder.exists() else "is not here; it would be in"
        raise PicogptError(f'{model}: {state} {folder}; run "picogpt download {model}"')
    with warned:
        warnings.filterwarnings("error", message="checksums not checked")
        try:
            print(one_line(f"{folder}: {verify(folder, is_official=is_official)}"))
        except UserWarning as warning:
            raise PicogptError(f"{folder}: {warning}") from None
