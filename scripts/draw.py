"""Write what README.md and docs/ show of the command: its help, pictures, and shell completion.

    pip install ".[docs]"
    python scripts/draw.py

Writes docs/terminal.svg, docs/attention.png and docs/lens.png; the help texts in README.md and in
docs/commands.md; and picogpt/completion/, which `picogpt completion` prints.
"""

import io
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path

import shtab
from rich.console import Console
from rich.text import Text

from picogpt.catalog import BUNDLED, OFFICIAL
from picogpt.cli import VERBS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
WIDTH = 84
SESSION = [
    'picogpt "Once upon a time" --seed 2 --top-k 40 --n-tokens 60',
    'picogpt next "Once upon a time there was a" --top 5',
    'picogpt "The king had three" --show-probs --n-tokens 6',
]
PICTURES = {
    "attention.png": 'attention "The wolf said to the little pig that he would eat him" --layer 3',
    "lens.png": 'lens "Once upon a time there"',
}
FOLDERS, FILES = {"adapter", "weights_dir"}, {"output", "prompts", "files"}
MODEL = "_picogpt_model"
PREAMBLE = {
    "bash": 'NAME() {\n  compgen -W "MODELS" -- "$1"\n  compgen -f -- "$1"\n}',
    "zsh": 'NAME() {\n  _alternative "models:model:(MODELS)" "files:file:_files"\n}',
    "fish": "function NAME\n  printf '%s\\n' MODELS\n  __fish_complete_path\nend",
}


def on_a_terminal(command):
    """-> what a command writes to a terminal, escape sequences included."""
    leader, follower = pty.openpty()
    environment = os.environ | {"COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    environment |= {"PICOGPT_MODEL": "tales"}
    environment.pop("NO_COLOR", None)
    arguments = [sys.executable, "-m", *shlex.split(command)]
    options = {"stdout": follower, "stderr": subprocess.DEVNULL, "env": environment}
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, **options) as process:
        os.close(follower)
        output = b""
        try:
            while chunk := os.read(leader, 1 << 16):
                output += chunk
        except OSError:  # the other side is closed
            pass
    os.close(leader)
    assert process.returncode == 0
    return output.decode().replace("\r\n", "\n")


def draw_terminal():
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for command in SESSION:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(on_a_terminal(command).rstrip()), overflow="fold")
        console.print()
    svg = console.export_svg(title="picogpt", unique_id="picogpt")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # they would be fetched
    svg = svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    lines = [line.rstrip() for line in svg.splitlines()]
    (DOCS / "terminal.svg").write_text("\n".join(lines) + "\n", encoding="utf-8")


def help_of(verb):
    """-> what `picogpt VERB --help` prints at a width of 80."""
    command = [sys.executable, "-m", "picogpt", verb, "--help"]
    options = {"env": os.environ | {"COLUMNS": "80"}, "encoding": "utf-8"}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, **options).stdout


def write_help():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start = text.index("```\nusage: picogpt [PROMPT]") + 4
    text = text[:start] + help_of("generate") + text[text.index("```", start) :]
    (ROOT / "README.md").write_text(text, encoding="utf-8")
    parts = ["# Commands\n\nWhat `picogpt COMMAND --help` says, for each command.\n"]
    for verb in VERBS:
        title = "picogpt PROMPT" if verb == "generate" else f"picogpt {verb}"
        parts.append(f"## {title}\n\n```\n{help_of(verb)}```\n")
    (DOCS / "commands.md").write_text("\n".join(parts), encoding="utf-8")


def completing(verb):
    """-> a command's parser, told what its arguments complete to."""
    make_parser, _ = VERBS[verb]
    parser = make_parser()
    for action in parser._actions:
        if action.dest == "model":
            action.complete = dict.fromkeys(PREAMBLE, MODEL) | {"fish": f"({MODEL})"}
        elif action.dest in FOLDERS:
            action.complete = shtab.DIRECTORY
        elif action.dest in FILES:
            action.complete = shtab.FILE
    return parser


def write_completion():
    parser = completing("generate")
    for action in [action for action in parser._actions if not action.option_strings]:
        parser._remove_action(action)  # any prompt, and nothing to choose from
    commands = parser.add_subparsers()
    for verb in VERBS:
        own = completing(verb)
        about = {"description": own.description, "help": own.description}
        commands.add_parser(verb, parents=[own], add_help=False, **about)
    models = " ".join((*BUNDLED, *OFFICIAL))
    for shell, preamble in PREAMBLE.items():
        preamble = preamble.replace("NAME", MODEL).replace("MODELS", models)
        script = shtab.complete(parser, shell, preamble={shell: preamble})
        path = ROOT / "picogpt" / "completion" / f"picogpt.{shell}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(script.strip() + "\n", encoding="utf-8")


def main():
    DOCS.mkdir(exist_ok=True)
    draw_terminal()
    for name, command in PICTURES.items():
        arguments = [*shlex.split(command), "--model", "tales", "-o", str(DOCS / name)]
        subprocess.run([sys.executable, "-m", "picogpt", *arguments], check=True)
    write_completion()
    write_help()


if __name__ == "__main__":
    main()
