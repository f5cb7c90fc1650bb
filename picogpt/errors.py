"""What goes wrong with input and files, in words for the user; and files read with such words."""

import json
from pathlib import Path
from typing import Any

MAX_TOLD = 100  # files that are missing, or whatever else goes wrong many times


class PicogptError(ValueError):
    """A mistake in input or a bad file; the message is one line, meant to be shown as it is.

    Its form is `WHERE: what was found; what was needed; what to do`.

    >>> from picogpt import Encoder, PicogptError
    >>> try:
    ...     Encoder.gpt2().decode([50257])
    ... except PicogptError as error:
    ...     print(error)
    ids[0]: is 50257; expected 0 to 50256
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """Escapes what would break the line or command the terminal, such as a name with an ESC."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)


def find_files(folder: Path, *choices: str) -> list[Path]:
    """Finds a file for each choice, such as "hparams.json" or "checkpoint or *.index".

    Raises:
        PicogptError: names all that the folder lacks.
    """
    found, missing = [], []
    for choice in choices:
        paths = [path for name in choice.split(" or ") for path in sorted(folder.glob(name))]
        files = [path for path in paths if path.is_file()]
        if files:
            found.append(files[0])
        else:
            missing.append(choice)
    if missing:
        if len(missing) > MAX_TOLD:
            missing[MAX_TOLD:] = [f"and {len(missing) - MAX_TOLD} more"]
        state = "is a file; expected a folder with" if folder.is_file() else "lacks"
        state = state if folder.exists() else "no such folder; expected one with"
        raise PicogptError(f"{folder}: {state} {', '.join(missing)}")
    return found


def refuse_pointer(path: Path, head: bytes) -> None:
    """Raises PicogptError if a file that begins with `head` is what Git LFS left in its place."""
    if head.startswith(b"version https://git-lfs.github.com/"):
        raise PicogptError(f'{path}: is a Git LFS pointer, not the file; run "git lfs pull"')


def read_text(path: Path) -> str:
    """Reads a UTF-8 text file, whatever the platform's encoding is, with or without its mark.

    Raises:
        PicogptError: it is not UTF-8, or a Git LFS pointer.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    refuse_pointer(path, data)
    return decode(data, str(path), "; fetch it again")


def decode(data: bytes, where: str, advice: str = "") -> str:
    """Decodes UTF-8, with or without its mark.

    Raises:
        PicogptError: it is something else; names `where` it is from.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is {data[error.start]:#04x}"
        raise PicogptError(f"{where}: {found}; expected UTF-8 text{advice}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds one object.

    Raises:
        PicogptError: it holds something else.
        OSError: it cannot be read.
    """
    advice = "; most likely a failed download; fetch it again"
    return parse_json(read_text(path), str(path), advice)


def parse_json(text: str, where: str, advice: str = "") -> dict[str, Any]:
    """Returns the object that a JSON text holds.

    Raises:
        PicogptError: it holds something else; names `where` it is from, and gives `advice`.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        start = text.strip()[:20]
        found = f"starts with {start!r}, is not JSON" if start else "is empty"
        raise PicogptError(f"{where}: {found}{advice}") from None
    if not isinstance(value, dict):
        found = type(value).__name__
        again = "; fetch it again" if advice else ""
        raise PicogptError(f"{where}: holds a {found}; expected a JSON object{again}")
    return value
