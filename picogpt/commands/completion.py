"""`picogpt completion`: what the shell must know to complete the command's words."""

import argparse

from .terminal import make_parser

SHELLS = ("bash", "zsh", "fish")
COMPLETION_HELP = """\
Prints a script for the shell to read.

examples:
  eval "$(picogpt completion bash)"                     in ~/.bashrc
  picogpt completion zsh > ~/.zfunc/_picogpt            with ~/.zfunc in fpath
  picogpt completion fish > ~/.config/fish/completions/picogpt.fish
"""


def completion_parser() -> argparse.ArgumentParser:
    description = "Let the shell complete commands, options, models and files."
    parser = make_parser("completion", "SHELL", description, COMPLETION_HELP)
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def run_completion(args: argparse.Namespace) -> None:
    from importlib import resources

    script = resources.files("picogpt") / "completion" / f"picogpt.{args.shell}"
    print(script.read_text(encoding="utf-8"), end="")
