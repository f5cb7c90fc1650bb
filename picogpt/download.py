"""Models from the network: whole files, or none.

Other models of the Hugging Face Hub are fetched by the package huggingface_hub, into its own cache;
`fetch_from_hub` only says which files. The rest is about official models.

Each file streams to NAME.part beside its place, and gets its name only when it is complete and what
it holds is right. An interrupted one goes on where it stopped, if the server still has the same:
NAME.part.of notes its length and version. The settings come last, so a folder that lacks anything
is no model yet.

Files are compared with what the server and they themselves say, never with figures built in, since
a mirror may serve any GPT-2; only GPT-2's vocabulary is known here.
"""

import contextlib
import hashlib
import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .encoder import GPT2_N_VOCAB, Encoder
from .errors import PicogptError, read_json
from .formats import safetensors, tensorflow
from .formats.tensors import read_tensors

if TYPE_CHECKING:
    import requests


class Official(NamedTuple):
    """An official model."""

    repository: str  # at Hugging Face
    n_parameters: int  # for a list of what can be fetched; what was fetched is not held against it


OFFICIAL = {
    "124M": Official("openai-community/gpt2", 124_439_808),
    "355M": Official("openai-community/gpt2-medium", 354_823_168),
    "774M": Official("openai-community/gpt2-large", 774_030_080),
    "1558M": Official("openai-community/gpt2-xl", 1_557_611_200),
    "distilgpt2": Official("distilbert/distilgpt2", 81_912_576),  # not in OpenAI's bucket
}
FILES = {  # of each source, in the order in which they are fetched
    "openai": (
        "checkpoint",
        "encoder.json",
        "vocab.bpe",
        "model.ckpt.index",
        "model.ckpt.data-00000-of-00001",
        "hparams.json",
    ),
    "huggingface": ("vocab.json", "merges.txt", "model.safetensors", "config.json"),
}
SETTINGS = {  # what they must say, each in its names
    "hparams.json": ("n_vocab", "n_ctx", "n_embd", "n_head", "n_layer"),
    "config.json": ("vocab_size", "n_positions", "n_embd", "n_head", "n_layer"),
}
# Of a model at the Hub: what is taken of what is there, and the first of these weights.
HUB_FILES = {"config.json", "generation_config.json", "hparams.json", "adapter_config.json"}
HUB_FILES |= {"vocab.json", "merges.txt", "tokenizer.json", "tokenizer_config.json", "meta.pkl"}
HUB_FILES |= {"special_tokens_map.json", "added_tokens.json", "encoder.json", "vocab.bpe"}
HUB_WEIGHTS = (
    r"model\.safetensors",
    r"model(\.safetensors\.index\.json|-\d+-of-\d+\.safetensors)",
    r"pytorch_model\.bin",
    r"pytorch_model(\.bin\.index\.json|-\d+-of-\d+\.bin)",
    r"adapter_model\.safetensors",
    r"adapter_model\.bin",
    r".*\.gguf",
    r".*\.(pt|pth|bin)",
)
BUCKET = "https://openaipublic.blob.core.windows.net/gpt-2/models"
HUGGING_FACE = "https://huggingface.co"
SHA256 = {
    ".json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "merges": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
TIMEOUTS = (8, 30)  # seconds: to connect, and for each read
DELAYS = (1, 2, 4, 8)  # seconds between tries that bring nothing
MAX_DELAY = 60  # seconds, of what a server asks for
TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
MAX_SMALL_BYTES = 1 << 24  # of a file without weights, where the server does not say how long it is
CHUNK_BYTES = 1 << 14  # at most as many are lost when a connection breaks


class _FinalError(Exception):
    """What went wrong, and will again."""


class _TryAgainError(Exception):
    """What went wrong, perhaps only this time, and after how many seconds the server wants more."""

    def __init__(self, reason: str, delay: float = 0) -> None:
        super().__init__(reason)
        self.delay = delay


def is_complete(folder: Path) -> bool:
    """Whether a folder has all files of an official model, from either source."""
    return any(all((folder / name).is_file() for name in names) for names in FILES.values())


def fetch(model: str, folder: Path, source: str | None = None) -> None:
    """Fetches what a folder lacks of an official model; files that are damaged are replaced.

    Args:
        model: one of OFFICIAL.
        folder: is made where it does not exist. Processes that fetch into one wait for each other.
        source: "openai" or "huggingface"; None: the one that was begun with, else OpenAI, who have
            all but distilgpt2.

    Raises:
        PicogptError: the server cannot be reached, or does not send a whole and right file.
    """
    if source is None:
        is_theirs = model == "distilgpt2" or any(folder.glob("vocab.json*"))
        source = "huggingface" if is_theirs else "openai"
    if source == "openai" and model == "distilgpt2":
        raise PicogptError(f"{model}: is not OpenAI's; pass --source huggingface")
    if is_complete(folder) and not all((folder / name).is_file() for name in FILES[source]):
        raise PicogptError(f"{folder}: holds the files of the other source; pass --weights-dir")
    if all(_is_right(folder / name) for name in FILES[source]):
        return
    if is_offline():
        raise PicogptError(
            f"{model}: is not whole in {folder}, and PICOGPT_OFFLINE forbids to fetch it; put "
            f"{', '.join(FILES[source])} there, or unset PICOGPT_OFFLINE"
        )
    import requests

    from . import __version__

    if source == "openai":
        base = os.environ.get("PICOGPT_BASE_URL") or BUCKET
        address = f"{base.rstrip('/')}/{model}"
    else:
        endpoint = os.environ.get("HF_ENDPOINT") or HUGGING_FACE
        address = f"{endpoint.rstrip('/')}/{OFFICIAL[model].repository}/resolve/main"
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder), requests.Session() as session:
        session.headers["User-Agent"] = f"picogpt/{__version__}"
        session.headers["Accept-Encoding"] = "identity"  # lengths and ranges are of the file itself
        for name in FILES[source]:
            if not _is_right(folder / name):
                _fetch(session, f"{address}/{name}", folder / name)


def is_offline() -> bool:
    """Whether PICOGPT_OFFLINE forbids every connection."""
    return os.environ.get("PICOGPT_OFFLINE", "0") not in ("", "0")


def fetch_from_hub(name: str, revision: str) -> Path:
    """Fetches a model or an adapter of the Hugging Face Hub into its cache.

    Args:
        name: of the repository, "owner/name".
        revision: a branch, a tag or a commit.

    Returns:
        the folder in the cache.

    Raises:
        PicogptError: it is not there, cannot be reached, or has no weights that are read here.
    """
    if is_offline():
        raise PicogptError(f"{name}: is not here, and PICOGPT_OFFLINE forbids to fetch it")
    try:
        import huggingface_hub
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        found = f"{name}: no folder, and not in the Hub's cache"
        raise PicogptError(f'{found}; to fetch it, run "pip install huggingface_hub"') from None
    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bars()
    try:
        files = huggingface_hub.HfApi().list_repo_files(name, revision=revision)
        wanted = _choose(name, files)
        return Path(
            huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=wanted)
        )
    except PicogptError:
        raise
    except Exception as error:  # of its own kinds, of the network's and of the disk's
        said = " ".join(str(error).split()) or type(error).__name__
        raise PicogptError(f"{name}: no folder, and the Hub says: {said:.300}") from None


def _choose(name: str, files: list[str]) -> list[str]:
    for pattern in HUB_WEIGHTS:
        weights = [file for file in files if re.fullmatch(pattern, file) and "/" not in file]
        if len(weights) > 1 and pattern.startswith(".*"):
            shown = ", ".join(sorted(weights)[:10])
            raise PicogptError(f"{name}: holds {shown}; expected one; fetch and name that file")
        if weights:
            return [*weights, *HUB_FILES.intersection(files)]
    raise PicogptError(f"{name}: holds no weights that are read here; expected a GPT-2")


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Waits until no other process fetches into a folder. The system ends a dead one's lock."""
    try:
        import fcntl
    except ImportError:  # on Windows two processes write the same bytes to the same places
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            warnings.warn(f"{folder}: waiting for another process that fetches it", stacklevel=4)
            fcntl.flock(opened, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(opened)


def _fetch(session: "requests.Session", url: str, place: Path) -> None:
    """Fetches one file, in as many tries as it takes while each brings some of it."""
    part, note = place.with_name(f"{place.name}.part"), place.with_name(f"{place.name}.part.of")
    shown = re.sub("//[^/]*@", "//", url)  # without a password
    n_tries = most = 0
    while True:
        try:
            if not part.exists() or _size(part) != _total(note):
                most = max(most, _size(part))
                _stream(session, url, part, note)
            break
        except _FinalError as error:
            raise PicogptError(f"{shown}: {error}") from None
        except _TryAgainError as error:
            n_tries = 1 if _size(part) > most else n_tries + 1
            if n_tries > len(DELAYS):
                raise PicogptError(
                    f"{shown}: {error}; gave up after {n_tries} tries; "
                    "run the command again to go on"
                ) from None
            time.sleep(max(DELAYS[n_tries - 1], min(error.delay, MAX_DELAY)))
        except OSError as error:  # of the disk; those of the network are dealt with in _stream
            raise PicogptError(
                f"{error.filename or part}: {error.strerror}; free some space or choose another "
                "folder, and run the command again to go on"
            ) from None
    try:
        check(place, part)
    except PicogptError as error:
        _discard(part, note)
        said = str(error).removeprefix(f"{part}: ")
        raise PicogptError(f"{shown}: what it sent is not the file; {said}") from None
    part.replace(place)
    note.unlink(missing_ok=True)


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _total(note: Path) -> int | None:
    """The length that a file is to have, by what was noted at its beginning."""
    return _number(_read_note(note).partition(" ")[0])


def _read_note(note: Path) -> str:
    return note.read_text("utf-8", "replace") if note.is_file() else ""


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,15}", text) else None


def _discard(part: Path, note: Path) -> None:
    part.unlink(missing_ok=True)
    note.unlink(missing_ok=True)


def _stream(session: "requests.Session", url: str, part: Path, note: Path) -> None:
    """Fetches what is missing of a file, all at once, or raises _TryAgainError with some of it."""
    import requests

    start = _size(part) if _read_note(note) else 0
    headers = {"Range": f"bytes={start}-"} if start else {}
    try:
        try:
            response = session.get(url, headers=headers, stream=True, timeout=TIMEOUTS)
        except requests.RequestException:
            raise
        except OSError as error:  # such as certificates that are not where they should be
            raise _FinalError(f"{error}; check the environment") from None
        with response:
            _receive(response, part, note, start)
    except PicogptError:
        raise
    except requests.Timeout:
        raise _TryAgainError(f"no answer within {TIMEOUTS[1]} seconds") from None
    except (requests.exceptions.SSLError, requests.TooManyRedirects) as error:
        raise _FinalError(f"{error}; check the address") from None
    except (requests.ConnectionError, requests.exceptions.ChunkedEncodingError) as error:
        cause = re.search(r"\[Errno -?\d+\] ([\w ]+)|timed out|IncompleteRead", str(error))
        reason = (cause[1] or cause[0]) if cause else type(error).__name__
        if reason == "IncompleteRead":
            reason = f"ended after {_size(part)} of {_total(note) or '?'} bytes"
        raise _TryAgainError(reason) from None
    except (
        requests.RequestException,
        ValueError,
    ) as error:  # of addresses and lengths that are none
        raise _FinalError(f"{error}; check the address") from None


def _receive(response: "requests.Response", part: Path, note: Path, start: int) -> None:
    """Writes what a server answers to the file, if that is what it should answer."""
    from tqdm import tqdm

    said, status = response.headers, f"{response.status_code} {response.reason}"
    if response.status_code in TRANSIENT:
        raise _TryAgainError(status, _number(said.get("Retry-After", "")) or 0)
    if response.status_code == 416:  # there is nothing behind what is here: another file
        _discard(part, note)
        raise _TryAgainError(status)
    if response.status_code not in (200, 206):
        raise _FinalError(f"{status}; expected the file; check the address, or try later")
    encoding = said.get("Content-Encoding") or "identity"
    if encoding.lower() != "identity":
        raise _FinalError(f"sent as {encoding}; expected it as it is")
    version = said.get("ETag") or said.get("Last-Modified")
    if response.status_code == 206:
        sent = re.fullmatch(r"bytes (\d{1,15})-\d+/(\d{1,15})", said.get("Content-Range", ""))
        is_rest = sent and int(sent[1]) == start and _read_note(note) == f"{sent[2]} {version}"
        # Without a version the length must do, but only where checksums would show a mix of two.
        if not sent or not is_rest or not (version or ".data-" in part.name):
            _discard(part, note)
            raise _TryAgainError("the file has changed meanwhile")
        total: int | None = int(sent[2])
    else:
        start, total = 0, _number(said.get("Content-Length", ""))
        _discard(part, note)
        note.write_text(f"{'?' if total is None else total} {version}", encoding="utf-8")
    free = shutil.disk_usage(part.parent).free
    if total is not None and free < total - start:
        raise PicogptError(
            f"{part.parent}: {free >> 20} MB free; {part.stem} needs {total - start >> 20} MB; "
            "free some space or pass --weights-dir"
        )
    is_large = ".data-" in part.name or ".safetensors" in part.name
    bar = tqdm(
        desc=part.stem, total=total, initial=start, unit="B", unit_scale=True, disable=None
    )  # disable=None: where stderr is no terminal
    with bar, part.open("ab") as file:
        for chunk in response.iter_content(CHUNK_BYTES):
            file.write(chunk)
            bar.update(len(chunk))
            if total is None and not is_large and file.tell() > MAX_SMALL_BYTES:
                raise _FinalError(f"more than {MAX_SMALL_BYTES} bytes; expected less")
        file.flush()
        os.fsync(file.fileno())
    if total is not None and _size(part) != total:
        raise _TryAgainError(f"ended after {_size(part)} of {total} bytes")


def _is_right(place: Path) -> bool:
    try:
        check(place)
    except (PicogptError, FileNotFoundError):
        return False
    return True


def check(place: Path, file: Path | None = None) -> None:
    """Looks whether a file of an official model holds what it should.

    Args:
        place: of the file, beside those that it must fit.
        file: where it still is, if elsewhere.

    Raises:
        PicogptError: it does not.
        OSError: it cannot be read.
    """
    name, file = place.name, file or place
    if name == "checkpoint":
        found = tensorflow.read_state(file)
        if f"{found}.index" not in FILES["openai"]:
            raise PicogptError(f"{file}: names {found:.40}; expected model.ckpt")
    elif name.endswith(".index"):
        tensorflow.list_tensors(file, place.with_suffix(""))
    elif ".data-" in name:
        index = tensorflow.list_tensors(place.with_suffix(".index"))
        model = {n: entry for n, entry in index.items() if n.startswith("model/")}
        if {entry.file for entry in model.values()} != {place}:
            raise PicogptError(f"{file}: model.ckpt.index is not of this one file")
        read_tensors({n: entry._replace(file=file) for n, entry in model.items()})
    elif name.endswith(".safetensors"):
        safetensors.list_tensors(file)
    elif name in SETTINGS:
        values = read_json(file)
        if lost := [key for key in SETTINGS[name] if type(values.get(key)) is not int]:
            raise PicogptError(f"{file}: {lost[0]} is {values.get(lost[0])!r:.40}")
    elif name.endswith(".json"):
        try:
            encoder = Encoder(read_json(file), [])
        except PicogptError as error:
            raise PicogptError(f"{file}: {str(error).removeprefix(f'{file}: ')}") from None
        if encoder.n_vocab == GPT2_N_VOCAB:
            _compare(file, SHA256[".json"])
    else:
        other = place.with_name("encoder.json" if name == "vocab.bpe" else "vocab.json")
        if Encoder.from_files(other, file).n_vocab == GPT2_N_VOCAB:
            _compare(file, SHA256["merges"])


def _compare(file: Path, sha256: str) -> None:
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != sha256:
        raise PicogptError(f"{file}: sha256 is {found}; GPT-2's is {sha256}; fetch it again")
