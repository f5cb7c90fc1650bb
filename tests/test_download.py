"""Fetching official models: from a real server on loopback that behaves as badly as servers do."""

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources

import pytest
from conftest import DATA

from picogpt import PicogptError, download, load
from picogpt.cli import main
from picogpt.download import FILES, fetch, is_complete

VOCABULARY = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}
BIG = {"openai": "model.ckpt.data-00000-of-00001", "huggingface": "model.safetensors"}


def read_files(source):
    """-> the files of a small model as that source has them: name to bytes."""
    checkpoint = DATA / ("plain" if source == "openai" else "transformers")
    files = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    for path in (DATA / "vocabulary").iterdir():
        name = path.name if source == "openai" else VOCABULARY[path.name]
        files[name] = path.read_bytes()
    assert files.keys() == set(FILES[source])
    return files


class Server:
    """Serves files, and does as `misbehave(handler, name, data)` says where it returns True.

    Attributes:
        files: name to bytes, for every model.
        requests: (path, Range) of each request so far.
    """

    def __init__(self):
        self.files = read_files("openai") | read_files("huggingface")
        self.requests = []
        self.etag = '"1"'
        self.misbehave = lambda handler, name, data: False
        self.released = threading.Event()  # what a stalling server waits for
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                outer.requests.append((self.path, self.headers.get("Range")))
                name = self.path.rpartition("/")[2]
                data = outer.files.get(name)
                if data is None:
                    self.send_error(404)
                elif not outer.misbehave(self, name, data):
                    self.serve(data)

            def serve(self, data, cut=None, **headers):
                """Answers a range if one is asked for; with `cut`, ends after so many bytes."""
                start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
                if start >= len(data) > 0:
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                if start:
                    of = f"bytes {start}-{len(data) - 1}/{len(data)}"
                    headers.setdefault("Content-Range", of)
                self.answer(data[start:][:cut], len(data) - start, **headers)

            def answer(self, body, length, **headers):
                if outer.etag:
                    headers.setdefault("ETag", outer.etag)
                headers.setdefault("Content-Length", length)
                for name, value in headers.items():
                    if value is not None:
                        self.send_header(name.replace("_", "-"), str(value))
                self.end_headers()
                self.wfile.write(body)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *_: None  # clients that hang up are what is tested
        self.address = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.released.set()
        self.http.shutdown()
        self.http.server_close()

    def ranges(self, name):
        return [range_ for path, range_ in self.requests if path.endswith("/" + name)]


@pytest.fixture
def server(monkeypatch):
    server = Server()
    monkeypatch.setenv("PICOGPT_BASE_URL", server.address)
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("PICOGPT_OFFLINE", raising=False)
    monkeypatch.setattr(download, "DELAYS", (0, 0, 0, 0))
    monkeypatch.setattr(download, "CHUNK_BYTES", 100)
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "weights" / "124M"


def check_whole(folder, source, server):
    """The folder has exactly the files of the source, each as the server has it."""
    assert {path.name for path in folder.iterdir()} == set(FILES[source])
    for name in FILES[source]:
        assert (folder / name).read_bytes() == server.files[name]


def failure(folder, source="openai", **options):
    with pytest.raises(PicogptError) as error:
        fetch("124M", folder, source, **options)
    assert "\n" not in str(error.value)
    assert not is_complete(folder)
    return str(error.value)


@pytest.mark.parametrize("source", FILES)
def test_a_model_is_fetched_in_order_the_settings_last(server, folder, source):
    fetch("124M", folder, source)
    check_whole(folder, source, server)
    prefix = "/124M" if source == "openai" else "/openai-community/gpt2/resolve/main"
    assert server.requests == [(f"{prefix}/{name}", None) for name in FILES[source]]
    assert FILES[source][-1] in ("hparams.json", "config.json")
    assert load(folder).hparams["n_vocab"] == 300


def test_what_is_whole_is_not_fetched_again(server, folder):
    fetch("124M", folder)
    server.requests.clear()
    fetch("124M", folder)
    assert server.requests == []


def test_what_is_damaged_is_fetched_again(server, folder):
    fetch("124M", folder)
    server.requests.clear()
    path = folder / BIG["openai"]
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    (folder / "encoder.json").write_text("<html>", encoding="utf-8")
    fetch("124M", folder)
    assert [path.rpartition("/")[2] for path, _ in server.requests] == ["encoder.json", path.name]
    check_whole(folder, "openai", server)


def test_the_first_use_of_a_name_fetches_it(server, tmp_path, capsys):
    assert load("124M", weights_dir=tmp_path).hparams["n_layer"] == 2
    n_requests = len(server.requests)
    assert n_requests == len(FILES["openai"])
    arguments = ["the", "--model", "124M", "--weights-dir", str(tmp_path), "--n-tokens", "1"]
    assert main(arguments) == 0
    assert capsys.readouterr().err == ""
    assert len(server.requests) == n_requests
    assert main(["tokens", "the", "--model", "distilgpt2", "--count"]) == 0
    assert capsys.readouterr() == ("2\n", "")
    assert server.requests[-1][0] == "/distilbert/distilgpt2/resolve/main/config.json"


@pytest.mark.parametrize("source", FILES)
@pytest.mark.parametrize("cut", [0, 100, 5_000])
def test_a_connection_that_breaks_is_resumed(server, folder, source, cut):
    """Each answer but the last brings `cut` bytes of what is missing."""
    n_broken = 3

    def misbehave(handler, name, data):
        if name == BIG[source] and len(server.ranges(name)) <= n_broken:
            handler.serve(data, cut)
            return True
        return False

    server.misbehave = misbehave
    fetch("124M", folder, source)
    check_whole(folder, source, server)
    resumed = [f"bytes={i * cut}-" for i in range(1, n_broken + 1)] if cut else [None] * n_broken
    assert server.ranges(BIG[source]) == [None, *resumed]


def test_it_goes_on_as_long_as_each_try_brings_something(server, folder):
    def misbehave(handler, name, data):
        handler.serve(data, 3_000)
        return True

    server.misbehave = misbehave
    fetch("124M", folder)
    check_whole(folder, "openai", server)
    assert len(server.ranges(BIG["openai"])) == 16  # for 47,616 bytes


def test_a_later_run_resumes(server, folder):
    def misbehave(handler, name, data):
        if name == BIG["openai"]:
            handler.serve(data, 0 if handler.headers.get("Range") else 20_000)
        return name == BIG["openai"]

    server.misbehave = misbehave
    message = failure(folder)
    assert message == (
        f"{server.address}/124M/{BIG['openai']}: ended after 20000 of 47616 bytes; "
        "gave up after 5 tries; run the command again to go on"
    )
    assert (folder / f"{BIG['openai']}.part").stat().st_size == 20_000
    server.misbehave = lambda *_: False
    server.requests.clear()
    fetch("124M", folder)
    assert server.requests == [
        (f"/124M/{BIG['openai']}", "bytes=20000-"),
        ("/124M/hparams.json", None),
    ]
    check_whole(folder, "openai", server)


def test_a_file_that_was_whole_when_the_process_died_is_not_asked_for(server, folder):
    fetch("124M", folder)
    place = folder / BIG["openai"]
    place.rename(f"{place}.part")
    (folder / f"{place.name}.part.of").write_text('47616 "1"', encoding="utf-8")
    server.requests.clear()
    fetch("124M", folder)
    assert server.requests == []
    check_whole(folder, "openai", server)


@pytest.mark.parametrize("etag", ['"1"', 'W/"1"', None])
def test_resuming_needs_the_same_version(server, folder, etag):
    """By ETag; without one the length must be the same, and checksums tell the rest."""
    server.etag = etag
    name = BIG["openai"]

    def misbehave(handler, name_, data):
        if name_ == name and len(server.ranges(name)) == 1:
            handler.serve(data, 20_000)
            return True
        return False

    server.misbehave = misbehave
    fetch("124M", folder)
    assert server.ranges(name) == [None, "bytes=20000-"]
    check_whole(folder, "openai", server)


@pytest.mark.parametrize("change", ["etag", "length", "place"])
def test_a_file_that_has_changed_meanwhile_is_fetched_from_its_start(server, folder, change):
    name = "model.safetensors"
    old = server.files[name]

    def misbehave(handler, name_, data):
        n_requests = len(server.ranges(name))
        if name_ != name or n_requests > 2:
            return False
        if n_requests == 1:
            handler.serve(old, 20_000)
        elif change == "etag":
            server.etag = '"2"'
            handler.serve(data)
        elif change == "length":
            handler.serve(data, Content_Range=f"bytes 20000-{len(data)}/{len(data) + 1}")
        else:
            handler.serve(data, Content_Range=f"bytes 19999-{len(data) - 1}/{len(data)}")
        return True

    server.misbehave = misbehave
    server.files[name] = old[:-4] + b"\0\0\0\0" if change == "etag" else old
    fetch("124M", folder, "huggingface")
    assert server.ranges(name) == [None, "bytes=20000-", None]
    check_whole(folder, "huggingface", server)


def test_a_part_of_another_file_is_not_built_on(server, folder):
    folder.mkdir(parents=True)
    part = folder / f"{BIG['openai']}.part"
    part.write_bytes(b"x" * 100)  # whose it is nobody noted
    (folder / "vocab.bpe.part").write_bytes(b"x" * 5_000)
    (folder / "vocab.bpe.part.of").write_text("torn", encoding="utf-8")
    fetch("124M", folder)
    check_whole(folder, "openai", server)
    assert server.ranges(BIG["openai"]) == [None]
    assert server.ranges("vocab.bpe") == ["bytes=5000-", None]  # 416: it is shorter


def test_a_server_without_ranges(server, folder):
    def misbehave(handler, name, data):
        if name != BIG["openai"]:
            return False
        del handler.headers["Range"]
        handler.serve(data, 20_000 if len(server.ranges(name)) < 3 else None)
        return True

    server.misbehave = misbehave
    fetch("124M", folder)
    assert server.ranges(BIG["openai"]) == [None, "bytes=20000-", "bytes=20000-"]
    check_whole(folder, "openai", server)


def test_a_server_that_changes_and_breaks_for_ever_is_given_up(server, folder):
    def misbehave(handler, name, data):
        server.etag = f'"{len(server.requests)}"'
        handler.serve(data, len(data) // 2)
        return True

    server.misbehave = misbehave
    message = failure(folder)
    assert message.endswith("; gave up after 5 tries; run the command again to go on")
    assert len(server.requests) < 20


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_transient_answers_are_tried_again(server, folder, status):
    def misbehave(handler, name, data):
        if len(server.requests) > 2:
            return False
        handler.send_error(status)
        return True

    server.misbehave = misbehave
    fetch("124M", folder)
    check_whole(folder, "openai", server)
    assert len(server.requests) == len(FILES["openai"]) + 2


def test_how_long_it_waits(server, folder, monkeypatch):
    """As the server asks, within limits, else longer each time."""
    waits, wanted = [], iter(["7", "100000", "soon", None])
    monkeypatch.setattr(download, "DELAYS", (1, 2, 4, 8))
    monkeypatch.setattr(time, "sleep", waits.append)

    def misbehave(handler, name, data):
        if name != "checkpoint" or len(server.requests) > 4:
            return False
        handler.send_response(429)
        handler.answer(b"", 0, Retry_After=next(wanted))
        return True

    server.misbehave = misbehave
    fetch("124M", folder)
    assert waits == [7, 60, 4, 8]


@pytest.mark.parametrize(("status", "said"), [(404, "404 Not Found"), (403, "403 Forbidden")])
def test_final_answers_are_not_tried_again(server, folder, status, said):
    def misbehave(handler, name, data):
        handler.send_error(status)
        return True

    server.misbehave = misbehave
    message = f"{said}; expected the file; check the address, or try later"
    assert failure(folder) == f"{server.address}/124M/checkpoint: {message}"
    assert len(server.requests) == 1
    assert list(folder.iterdir()) == []


def test_a_server_that_stalls_is_given_up(server, folder, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUTS", (5, 0.05))

    def misbehave(handler, name, data):
        handler.serve(data, 0 if handler.headers.get("Range") else 200)
        handler.wfile.flush()
        server.released.wait(10)
        return True

    server.misbehave = misbehave
    server.files["checkpoint"] = bytes(300)
    message = failure(folder)
    assert message.endswith("gave up after 5 tries; run the command again to go on")
    assert "timed out" in message
    assert (folder / "checkpoint.part").stat().st_size == 200


def test_a_server_that_never_answers(server, folder, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUTS", (5, 0.05))
    server.misbehave = lambda *_: server.released.wait(10)
    said = "no answer within 0.05 seconds; gave up after 5 tries; run the command again to go on"
    assert failure(folder) == f"{server.address}/124M/checkpoint: {said}"


def test_a_refused_connection_is_given_up(server, folder, monkeypatch):
    server.http.server_close()
    said = "Connection refused; gave up after 5 tries; run the command again to go on"
    assert failure(folder) == f"{server.address}/124M/checkpoint: {said}"


def test_a_refused_connection_is_given_up_within_a_minute():
    n_tries, connect = len(download.DELAYS) + 1, download.TIMEOUTS[0]
    assert sum(download.DELAYS) + n_tries * connect <= 60


@pytest.mark.parametrize("length", [+5, -5])
@pytest.mark.parametrize("name", [name for names in FILES.values() for name in names])
def test_a_server_that_lies_about_a_length(server, folder, name, length):
    if (name, length) == ("checkpoint", -5):
        name = "hparams.json"  # without its end a state file is as good
    source = "openai" if name in FILES["openai"] else "huggingface"

    def misbehave(handler, name_, data):
        if name_ == name:
            handler.send_response(200)
            handler.answer(data, len(data) + length)
        return name_ == name

    server.misbehave = misbehave
    message = failure(folder, source)
    assert name in message
    if length > 0:
        n = len(server.files[name])
        said = f"ended after {n // 100 * 100} of {n + 5} bytes; gave up after 5 tries"
        assert said in message
    else:
        assert "what it sent is not the file; " in message
        assert not (folder / f"{name}.part").exists()
    assert not (folder / name).exists()


PAGE = b"<!DOCTYPE html><html><body>Log in to the network</body></html>"


@pytest.mark.parametrize("name", [name for names in FILES.values() for name in names])
def test_a_page_with_status_200_is_not_taken_for_a_file(server, folder, name):
    source = "openai" if name in FILES["openai"] else "huggingface"
    server.files[name] = PAGE
    message = failure(folder, source)
    path = server.requests[0][0].rpartition("/")[0]
    assert message.startswith(f"{server.address}{path}/{name}: what it sent is not the file; ")
    assert str(folder) not in message.replace(str(folder / "vocab.json"), "").replace(
        str(folder / "encoder.json"), ""
    )
    assert not [path for path in folder.iterdir() if path.name.startswith(name)]


def test_tensors_with_a_wrong_checksum_are_not_kept(server, folder):
    name = BIG["openai"]
    server.files[name] = server.files[name][:-1] + b"\xff"
    message = failure(folder)
    said = "model/wte is damaged (wrong checksum); fetch it again"
    assert message == f"{server.address}/124M/{name}: what it sent is not the file; {said}"
    assert not (folder / f"{name}.part").exists()


def test_gpt2s_vocabulary_is_known(server, folder, monkeypatch):
    """By its hash, where it has as many tokens."""
    monkeypatch.setattr(download, "GPT2_N_VOCAB", 300)
    for source, name in (("openai", "encoder.json"), ("huggingface", "vocab.json")):
        message = failure(folder, source)
        assert f"/{name}: what it sent is not the file; sha256 is " in message
        assert message.endswith(f"; GPT-2's is {download.SHA256['.json']}; fetch it again")
    monkeypatch.setattr(download, "GPT2_N_VOCAB", 50257)
    bundled = resources.files("picogpt") / "vocabulary"
    for name, theirs in VOCABULARY.items():
        download.check(bundled / name)
        server.files[theirs] = (bundled / name).read_bytes()
    server.files["merges.txt"] = server.files["merges.txt"].replace(b"\nh e\n", b"\n") + b"h e\n"
    message = failure(folder, "huggingface")
    assert "/merges.txt: what it sent is not the file; sha256 is " in message
    assert message.endswith(f"; GPT-2's is {download.SHA256['merges']}; fetch it again")


ERROR = b'{"error": {"code": 404}}'


@pytest.mark.parametrize("name", [name for names in FILES.values() for name in names])
def test_an_error_in_json_is_not_taken_for_a_file(server, folder, name):
    """And the file is fetched again when the server has it."""
    source = "openai" if name in FILES["openai"] else "huggingface"
    whole = server.files[name]
    server.files[name] = b'model_checkpoint_path: "other"' if name == "checkpoint" else ERROR
    message = failure(folder, source)
    assert f"/{name}: what it sent is not the file; " in message
    assert not (folder / name).exists()
    server.files[name] = whole
    fetch("124M", folder, source)
    check_whole(folder, source, server)


@pytest.mark.parametrize("etag", ["Last-Modified", None])
def test_without_a_version_only_what_has_checksums_is_resumed(server, folder, etag):
    server.etag = None
    headers = {etag: "Mon, 01 Jan 2024 00:00:00 GMT"} if etag else {}

    def misbehave(handler, name, data):
        cut = 20_000 if len(server.ranges(name)) == 1 else None
        handler.serve(data, cut, **headers)
        return True

    server.misbehave = misbehave
    fetch("124M", folder, "huggingface")
    check_whole(folder, "huggingface", server)
    again = [] if etag else [None]
    assert server.ranges("model.safetensors") == [None, "bytes=20000-", *again]


def test_a_note_that_is_not_text(server, folder):
    folder.mkdir(parents=True)
    (folder / "checkpoint.part").write_bytes(b"x")
    (folder / "checkpoint.part.of").write_bytes(b"\xff")
    fetch("124M", folder)
    check_whole(folder, "openai", server)


def test_an_endless_answer_is_cut(server, folder, monkeypatch):
    monkeypatch.setattr(download, "MAX_SMALL_BYTES", 10_000)

    def misbehave(handler, name, data):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(1_000):
            handler.wfile.write(bytes(1_000))
        return True

    server.misbehave = misbehave
    message = failure(folder)
    assert message.endswith("/checkpoint: more than 10000 bytes; expected less")


@pytest.mark.parametrize(
    "location", ["http://a..b/", "http://[::1", "http://[abc]/", "http://" + "a" * 70 + ".com/"]
)
def test_redirects_to_nowhere(server, folder, location):
    def misbehave(handler, name, data):
        handler.send_response(302)
        handler.answer(b"", 0, Location=location)
        return True

    server.misbehave = misbehave
    assert failure(folder).startswith(f"{server.address}/124M/checkpoint: ")


def test_a_chunk_of_a_length_that_is_none(server, folder):
    def misbehave(handler, name, data):
        handler.send_response(200)
        handler.answer(b"-5\r\n", None, Transfer_Encoding="chunked", Content_Length=None)
        return True

    server.misbehave = misbehave
    assert failure(folder).startswith(f"{server.address}/124M/checkpoint: ")


def test_certificates_that_are_not_there(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("PICOGPT_OFFLINE", raising=False)
    monkeypatch.setenv("PICOGPT_BASE_URL", "https://127.0.0.1:1")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none.pem"))
    message = failure(folder)
    assert message.startswith("https://127.0.0.1:1/124M/checkpoint: Could not find a suitable TLS")
    assert message.endswith("; check the environment")


def test_addresses_may_end_in_a_slash_and_passwords_are_not_told(server, folder, monkeypatch):
    address = server.address.replace("//", "//user:secret@")
    monkeypatch.setenv("PICOGPT_BASE_URL", f"{address}/")
    monkeypatch.setenv("HF_ENDPOINT", f"{address}/")
    server.files["encoder.json"] = PAGE
    assert failure(folder).startswith(f"{server.address}/124M/encoder.json: ")
    fetch("124M", folder.with_name("355M"), "huggingface")
    assert {path.partition("//")[1] for path, _ in server.requests} == {""}


def test_compressed_answers_are_refused(server, folder):
    def misbehave(handler, name, data):
        handler.serve(data, Content_Encoding="gzip")
        return True

    server.misbehave = misbehave
    message = failure(folder)
    assert message.endswith("/checkpoint: sent as gzip; expected it as it is")


def test_a_file_without_a_length(server, folder):
    def misbehave(handler, name, data):
        handler.serve(data, Content_Length=None)
        return True

    server.misbehave = misbehave
    fetch("124M", folder)
    check_whole(folder, "openai", server)


def test_too_little_space(server, folder, monkeypatch):
    usage = shutil.disk_usage(folder.parent.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5 << 20))
    server.files[BIG["openai"]] = bytes(20 << 20)
    message = f"5 MB free; {BIG['openai']} needs 20 MB; free some space or pass --weights-dir"
    assert failure(folder) == f"{folder}: {message}"


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of file sizes there")
def test_a_full_disk_keeps_what_is_there(server, folder):
    """The system lets no file of the process grow beyond 20,000 bytes."""
    script = (
        "import resource, sys; from picogpt.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        f"sys.exit(main(['download', '124M', '--weights-dir', {str(folder.parent)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    part = folder / f"{BIG['openai']}.part"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"picogpt: error: {part}: {os.strerror(errno.EFBIG)}; free some space or choose another "
        "folder, and run the command again to go on\n"
    )
    assert part.stat().st_size == 20_000
    server.requests.clear()
    fetch("124M", folder)
    assert server.ranges(part.stem) == ["bytes=20000-"]
    check_whole(folder, "openai", server)


@pytest.mark.parametrize(("source", "n_kills"), [("openai", 50), ("huggingface", 10)])
def test_a_process_killed_at_any_moment_leaves_nothing_that_passes_for_whole(
    server, folder, source, n_kills
):
    """SIGKILL after a random number of bytes, then a look at what is there."""
    rng = random.Random(0)
    script = (
        "import sys; from picogpt.download import fetch; from pathlib import Path\n"
        f"fetch('124M', Path({str(folder)!r}), {source!r})"
    )
    whole = {name: server.files[name] for name in FILES[source]}
    n_left, child = 0, None

    def misbehave(handler, name, data):
        nonlocal n_left
        start = int((handler.headers.get("Range") or "bytes=0-")[6:-1])
        n, n_left = n_left, n_left - (len(data) - start)
        if n_left >= 0:
            return False
        handler.serve(data, n)
        handler.wfile.flush()
        has_child.wait(60)
        child.kill()
        return True

    for i in range(n_kills):
        n_left = rng.randrange(60_000)
        server.misbehave = misbehave
        has_child = threading.Event()
        child = subprocess.Popen([sys.executable, "-c", script])
        has_child.set()
        child.wait(60)
        for path in folder.iterdir() if folder.exists() else []:
            if not path.name.endswith((".part", ".part.of")):
                assert path.read_bytes() == whole[path.name]
        assert is_complete(folder) == all((folder / name).is_file() for name in whole)
        if i % 5 == 4:
            server.misbehave = lambda *_: False
            fetch("124M", folder, source)
            check_whole(folder, source, server)
            shutil.rmtree(folder)


def test_two_processes_that_fetch_the_same_model(server, folder):
    """The second waits until the first is done, and finds all there."""
    script = (
        "from picogpt.download import fetch; from pathlib import Path\n"
        f"fetch('124M', Path({str(folder)!r}))"
    )
    has_begun, may_end = threading.Event(), threading.Event()

    def misbehave(handler, name, data):
        if name == BIG["openai"]:
            has_begun.set()
            may_end.wait(60)
        return False

    server.misbehave = misbehave
    command = [sys.executable, "-c", script]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert has_begun.wait(60)
    second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert "waiting for another process that fetches it" in second.stderr.readline()
    may_end.set()
    assert first.wait(60) == second.wait(60) == 0
    first.stderr.close(), second.stderr.close()
    assert len(server.requests) == len(FILES["openai"])
    check_whole(folder, "openai", server)


def test_a_folder_is_of_one_source(server, folder):
    fetch("124M", folder, "huggingface")
    with pytest.raises(PicogptError) as error:
        fetch("124M", folder, "openai")
    message = "holds the files of the other source; pass --weights-dir"
    assert str(error.value) == f"{folder}: {message}"
    fetch("124M", folder)  # the source it came from


def test_the_source_that_was_begun_with_is_gone_on_with(server, folder):
    server.files["config.json"] = PAGE
    failure(folder, "huggingface")
    server.files |= read_files("huggingface")
    fetch("124M", folder)
    check_whole(folder, "huggingface", server)


def test_remains_of_the_other_source_do_no_harm(server, folder):
    hparams = server.files.pop("hparams.json")
    failure(folder)
    fetch("124M", folder, "huggingface")
    assert load(folder).hparams["n_layer"] == 2
    server.files["hparams.json"] = hparams


def test_offline_nothing_is_connected_to(server, folder, monkeypatch):
    monkeypatch.setenv("PICOGPT_OFFLINE", "1")
    files = ", ".join(FILES["openai"])
    assert failure(folder) == (
        f"124M: is not whole in {folder}, and PICOGPT_OFFLINE forbids to fetch it; "
        f"put {files} there, or unset PICOGPT_OFFLINE"
    )
    assert server.requests == []
    monkeypatch.setenv("PICOGPT_OFFLINE", "0")
    fetch("124M", folder)
    monkeypatch.setenv("PICOGPT_OFFLINE", "1")
    fetch("124M", folder)


def test_an_address_that_is_none(folder, monkeypatch):
    monkeypatch.setenv("PICOGPT_BASE_URL", "nowhere")
    monkeypatch.delenv("PICOGPT_OFFLINE", raising=False)
    assert failure(folder).startswith("nowhere/124M/checkpoint: Invalid URL")


def test_a_proxy_is_that_of_requests(server, folder, monkeypatch):
    monkeypatch.setenv("PICOGPT_BASE_URL", "http://picogpt.invalid")
    monkeypatch.setenv("http_proxy", server.address)
    fetch("124M", folder)
    assert server.requests[0][0] == "http://picogpt.invalid/124M/checkpoint"
    check_whole(folder, "openai", server)


def test_the_command_download(server, tmp_path, capsys):
    folder = tmp_path / "w" / "124M"
    assert main(["download", "124M", "--weights-dir", str(folder.parent)]) == 0
    assert capsys.readouterr() == (f"{folder}\n", "")
    assert main(["verify", "124M", "--weights-dir", str(folder.parent)]) == 0
    said = "28 tensors, checksums right, all numbers finite"
    assert capsys.readouterr() == (f"{folder}: {said}\n", "")
    assert main(["models", "--weights-dir", str(folder.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", "parameters", "MB", "folder"]
    assert lines[2].split() == ["124M", "11,904", "0", str(folder)]
    assert lines[3].split() == ["355M", "354,823,168", "1,419", "not", "here"]
    (folder / "hparams.json").unlink()
    assert main(["models", "--weights-dir", str(folder.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[1:] == ["124,439,808", "498", "not", "whole", "in", str(folder)]
    assert main(["verify", "124M", "--weights-dir", str(folder.parent)]) == 1
    said = f'124M: is not whole in {folder}; run "picogpt download 124M"'
    assert capsys.readouterr() == ("", f"picogpt: error: {said}\n")


def test_one_damaged_model_does_not_hide_the_others(tmp_path, capsys):
    for name in FILES["openai"]:
        (tmp_path / "124M").mkdir(exist_ok=True)
        (tmp_path / "124M" / name).touch()
    assert main(["models", "--weights-dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    damaged = f"damaged: {tmp_path}/124M/hparams.json: is empty; "
    assert damaged in lines[2]
    assert lines[3].startswith("355M")


def test_files_that_do_not_fit_each_other_are_said_to(server, tmp_path, capsys):
    server.files["hparams.json"] = server.files["hparams.json"].replace(b"32", b"64")
    assert main(["download", "124M", "--weights-dir", str(tmp_path)]) == 1
    assert "model/wpe is (32, 16), expected (64, 16)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["335M"], "335M: neither a model nor a folder; the models are tales, {0}"),
        (["117M"], "117M: was renamed; use 124M"),
        (["./x"], "./x: is a folder; what can be fetched is {0}"),
        (
            ["distilgpt2", "--source", "openai"],
            "distilgpt2: is not OpenAI's; pass --source huggingface",
        ),
    ],
)
def test_what_cannot_be_fetched(server, capsys, arguments, message):
    assert main(["download", *arguments]) == 1
    names = "124M, 355M, 774M, 1558M, distilgpt2, and owner/name of the Hub"
    assert capsys.readouterr() == ("", f"picogpt: error: {message.format(names)}\n")
    assert server.requests == []


def test_the_bundled_model_needs_no_fetching(server, capsys):
    assert main(["download", "tales"]) == 0
    assert capsys.readouterr().out.endswith("tales\n")
    assert main(["verify", "tales"]) == 0
    assert capsys.readouterr().out.endswith("76 tensors, checksums right, all numbers finite\n")
    assert server.requests == []


def test_verify_says_what_is_damaged(server, tmp_path, capsys):
    fetch("124M", tmp_path / "124M")
    path = tmp_path / "124M" / "vocab.bpe"
    path.write_text("<html>", encoding="utf-8")
    assert main(["verify", "124M", "--weights-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"picogpt: error: {path.with_name('encoder.json')}")


def test_verify_does_not_say_that_it_checked_what_it_did_not(monkeypatch, capsys):
    import google_crc32c

    monkeypatch.setattr(google_crc32c, "implementation", "python")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["verify", "tales"]) == 1
    said = "checksums not checked: google-crc32c lacks its C code\n"
    assert capsys.readouterr().err.endswith(said)
