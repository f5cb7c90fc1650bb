"""Models of the Hugging Face Hub: the real huggingface_hub, a server on loopback, its cache."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import DATA

from picogpt import PicogptError, catalog, load
from picogpt.catalog import HUB, default_model, find_adapter, find_cached, find_model, hub_cache
from picogpt.cli import main

COMMIT = "0123456789abcdef0123456789abcdef01234567"
JUNK = {"README.md": b"# tiny", ".gitattributes": b"", "tf_model.h5": b"h5", "onnx/x.onnx": b"x"}


def read_folder(*names):
    return {path.name: path.read_bytes() for name in names for path in (DATA / name).iterdir()}


def vocabulary():
    names = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}
    return {names[name]: data for name, data in read_folder("vocabulary").items()}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server of a few repositories, in the Hub's manner."""
    files = {
        "me/tiny": read_folder("transformers") | vocabulary() | JUNK,
        "me/both": read_folder("transformers", "torch") | vocabulary() | JUNK,
        "me/shards": read_folder("shards") | vocabulary(),
        "me/old": read_folder("torch_shards") | vocabulary(),
        "me/gguf": {"tiny-Q4_0.gguf": (DATA / "gguf" / "tiny-Q4_0.gguf").read_bytes()} | JUNK,
        "me/ggufs": read_folder("gguf"),
        "me/lora": read_folder("adapter"),
        "me/none": JUNK,
    }
    asked = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = self.path.partition("?")[0]
            asked.append(path)
            parts = path.strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if api else parts[:2])
            known = files.get(name)
            revision = (parts[5] if api else parts[3]) if len(parts) > 5 - 2 * (not api) else "main"
            if known is None or revision not in ("main", "v1", COMMIT):
                code = "RepoNotFound" if known is None else "RevisionNotFound"
                return self.answer(b"{}", 404, {"X-Error-Code": code})
            if api and "tree" in parts:
                listed = [
                    {"type": "file", "path": file, "size": len(data), "oid": sha1(data)}
                    for file, data in known.items()
                ]
                return self.answer(json.dumps(listed).encode())
            if api:
                siblings = [{"rfilename": file} for file in known]
                about = {"id": name, "sha": COMMIT, "siblings": siblings}
                return self.answer(json.dumps(about).encode())
            data = known.get("/".join(parts[4:]))
            if data is None:
                return self.answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
            about = {"X-Repo-Commit": COMMIT, "ETag": f'"{sha1(data)}"'}
            return self.answer(data, 200, about)

        def answer(self, body, status=200, headers=None):
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    server.asked = asked
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def sha1(data):
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def picogpt(*arguments, **environment):
    """Runs the command in a process of its own, since huggingface_hub reads its settings once."""
    return subprocess.run(
        [sys.executable, "-m", "picogpt", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


def cached(name, *folders, commit=COMMIT, ref="main"):
    """Makes a folder of the cache, as huggingface_hub lays it out."""
    repository = hub_cache() / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / commit
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in (read_folder(*folders) | vocabulary()).items():
        (folder / file).write_bytes(data)
    (repository / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / ref).write_text(commit, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("me/tiny", ["model.safetensors"]),
        ("me/both", ["model.safetensors"]),
        ("me/shards@v1", [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]),
        ("me/old", [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]),
        ("me/gguf", ["tiny-Q4_0.gguf"]),
    ],
)
def test_a_model_is_fetched_and_stays(hub, name, weights):
    done = picogpt("Once", "--model", name, "--n-tokens", "3")
    assert (done.returncode, done.stderr) == (0, "")
    name, _, revision = name.partition("@")
    folder = find_cached(name, revision or "main")
    found = {path.name for path in folder.iterdir()}
    assert {path for path in found if path.endswith((".safetensors", ".bin", ".gguf"))} == (
        set(weights)
    )
    assert not found & set(JUNK)
    n_asked = len(hub.asked)
    again = picogpt("Once", "--model", name + f"@{revision}" * bool(revision), "--n-tokens", "3")
    assert again.stdout == done.stdout
    assert len(hub.asked) == n_asked  # what is here is not asked for
    offline = {"PICOGPT_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    commit = picogpt("Once", "--model", f"{name}@{COMMIT}", "--n-tokens", "3", **offline)
    assert commit.stdout == done.stdout


def test_download_and_verify(hub):
    done = picogpt("download", "me/tiny")
    assert done.returncode == 0
    assert done.stdout == f"{find_cached('me/tiny')}\n"
    done = picogpt("verify", "me/tiny")
    assert done.stdout.endswith("28 tensors, no checksums in this format, all numbers finite\n")
    done = picogpt("models")
    line = next(line for line in done.stdout.splitlines() if line.startswith("me/tiny"))
    assert line.split()[1:3] == ["11,904", "0"]
    assert line.endswith(str(find_cached("me/tiny")))
    assert "me/lora" not in done.stdout


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("me/nosuch", "me/nosuch: no folder, and the Hub says: 404"),
        ("me/tiny@nosuch", "me/tiny: no folder, and the Hub says: 404"),
        ("me/none", "me/none: holds no weights that are read here; expected a GPT-2"),
        (
            "me/ggufs",
            "me/ggufs: holds tiny-F16.gguf, tiny-F32.gguf, tiny-Q4_0.gguf, tiny-Q8_0.gguf",
        ),
    ],
)
def test_what_cannot_be_fetched(hub, name, said):
    for command in (["Once", "--model", name], ["download", name]):
        done = picogpt(*command)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith(f"picogpt: error: {said}")
        assert done.stderr.count("\n") == 1


def test_offline_nothing_is_asked_for(hub):
    done = picogpt("Once", "--model", "me/tiny", PICOGPT_OFFLINE="1")
    said = "picogpt: error: me/tiny: is not here, and PICOGPT_OFFLINE forbids to fetch it\n"
    assert done.stderr == said
    done = picogpt("Once", "--model", "me/tiny", HF_HUB_OFFLINE="1")
    assert done.stderr.startswith("picogpt: error: me/tiny: no folder, and the Hub says: ")
    assert "offline" in done.stderr.lower()
    assert hub.asked == []
    done = picogpt("verify", "me/tiny")
    assert done.stderr == 'picogpt: error: me/tiny: is not here; run "picogpt download me/tiny"\n'
    assert hub.asked == []


def test_an_adapter_of_the_hub(hub, expected, monkeypatch):
    cached("me/tiny", "transformers")
    done = picogpt("next", "He", "--json", "--model", "me/tiny", "--adapter", "me/lora")
    assert (done.returncode, done.stderr) == (0, "")
    plain = picogpt("next", "He", "--json", "--model", "me/tiny")
    assert json.loads(done.stdout) != json.loads(plain.stdout)
    folder = find_adapter("me/lora")
    assert {path.name for path in folder.iterdir()} == (
        {"adapter_config.json", "adapter_model.safetensors"}
    )
    params = load("me/tiny", adapter="me/lora").params
    assert params["blocks"][0]["attn"]["c_attn"]["w"].shape == (16, 48)


def test_without_huggingface_hub(monkeypatch, expected):
    folder = cached("me/tiny", "transformers")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert find_model("me/tiny") == folder
    assert load(f"me/tiny@{COMMIT}").hparams["n_layer"] == 2
    with pytest.raises(PicogptError) as error:
        load("me/other")
    found = "me/other: no folder, and not in the Hub's cache"
    assert str(error.value) == f'{found}; to fetch it, run "pip install huggingface_hub"'


def test_official_models_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folder = cached("openai-community/gpt2", "transformers")
    assert find_model("124M") == find_model("gpt2") == folder
    (tmp_path / "gpt2").mkdir()
    assert find_model("gpt2") == tmp_path / "gpt2"
    assert find_model("gpt2-xl", fetch=False) == tmp_path / "weights" / "1558M"
    shutil.copytree(DATA / "plain", tmp_path / "weights" / "124M")
    shutil.copytree(DATA / "vocabulary", tmp_path / "weights" / "124M", dirs_exist_ok=True)
    assert find_model("124M") == tmp_path / "weights" / "124M"


def test_models_lists_official_ones_where_they_are(capsys):
    folder = cached("openai-community/gpt2", "transformers")
    cached("someone/else", "transformers")
    (cached("an/other", "transformers") / "config.json").write_text('{"model_type": "llama"}')
    (cached("half/of-it", "transformers") / "model.safetensors").unlink()
    cached("a/lora", "adapter")
    assert main(["models"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines.keys() == {"model", "tales", *catalog.OFFICIAL, "someone/else"}
    assert lines["124M"].endswith(str(folder))
    assert lines["355M"].endswith("not here")


def test_an_adapter_brings_its_model(tmp_path, monkeypatch):
    folder = shutil.copytree(DATA / "adapter", tmp_path / "lora")
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))

    def made_for(base):
        config["base_model_name_or_path"] = base
        (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        return default_model(adapter=folder)

    assert made_for(None) == made_for("") == "tales"
    assert made_for("tales") == "tales"
    cached("me/tiny", "transformers")
    assert made_for("me/tiny") == "me/tiny"
    (tmp_path / "base").mkdir()
    assert made_for(str(tmp_path / "base")) == str(tmp_path / "base")
    for lost in ("me/lost", "/content/base", "gpt2", "lost"):
        with pytest.raises(PicogptError) as error:
            made_for(lost)
        found = f"{folder}: was made for {lost}, which is not here; name a model"
        assert str(error.value) == found
    monkeypatch.setenv("PICOGPT_MODEL", "tales")
    assert made_for("lost") == "tales"
    assert made_for("me/tiny") == "me/tiny"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("owner/name", True),
        ("owner/name@main", True),
        ("owner/name@refs/pr/1", True),
        ("o-w_n.er/na.me-2@v1.0", True),
        ("./name", False),
        ("../name", False),
        ("owner/..", False),
        ("owner/.", False),
        ("owner/name/more", False),
        ("/owner/name", False),
        ("owner/", False),
        ("~/name", False),
        ("owner\\name", False),
        ("öwner/name", False),
        ("owner/name@", False),
        ("owner/name@a/../../b", False),
        ("owner/name@/a", False),
        ("owner/na me", False),
    ],
)
def test_what_is_a_name_of_the_hub(name, is_one):
    assert bool(HUB.fullmatch(name)) == is_one


def test_a_folder_of_that_name_wins(tmp_path, monkeypatch, model_folder):
    monkeypatch.chdir(tmp_path)
    cached("me/tiny", "transformers")
    shutil.copytree(model_folder("plain"), tmp_path / "me" / "tiny")
    assert find_model("me/tiny") == tmp_path / "me" / "tiny"
    shutil.copy(DATA / "gguf" / "tiny-F32.gguf", tmp_path / "x.gguf")
    assert find_model("x.gguf") == tmp_path / "x.gguf"
    assert load("x.gguf").hparams["n_layer"] == 1
    assert np.isfinite(load("me/tiny").params["wte"]).all()


def test_where_the_cache_is(monkeypatch, tmp_path):
    names = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"]
    for name in names:
        monkeypatch.setenv(name, str(tmp_path / name))
    wanted = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME/hub"]
    wanted += ["XDG_CACHE_HOME/huggingface/hub"]
    for name, place in zip(names, wanted, strict=True):
        assert hub_cache() == tmp_path / place
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_cache() == tmp_path / ".cache" / "huggingface" / "hub"


def test_damaged_caches_are_as_none(tmp_path):
    folder = cached("me/tiny", "transformers")
    ref = folder.parent.parent / "refs" / "main"
    for text in ("", "../../..", "a/b", "\n\n", "0" * 40):
        ref.write_text(text, encoding="utf-8")
        assert find_cached("me/tiny") is None
    ref.write_bytes(b"\xff\xfe")
    assert find_cached("me/tiny") is None
    shards = cached("me/shards", "shards")
    assert find_cached("me/shards") == shards
    next(shards.glob("*-of-*")).unlink()
    assert find_cached("me/shards") is None
    for index in ("[]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": []}}'):
        (shards / "model.safetensors.index.json").write_text(index, encoding="utf-8")
        assert find_cached("me/shards") is None
