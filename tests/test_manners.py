"""What a library must not do to the program that uses it: warn, write, or share state."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from picogpt import Encoder, generate, generate_batch, load, logit_lens, score, stream, trace
from picogpt import encoder as encoder_module

N_THREADS = 8
RUN = """
from picogpt import generate, load
encoder, hparams, params = load("tales")
ids = encoder.encode("Once upon a time")
print(encoder.decode(generate(ids, params, hparams["n_head"], 3)))
print(len(generate(ids, params, hparams["n_head"], 3, top_k=5, top_p=0.9, seed=1)))
"""
SAID = " there was a\n3\n"


def python(*arguments, **options):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, **options)


@pytest.mark.parametrize("script", ["import picogpt", RUN], ids=["import", "generate"])
def test_nothing_warns(script):
    done = python("-W", "error", "-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("" if script == "import picogpt" else SAID)


# Of each kind of mistake that a user can make, with the beginning of its message.
MISTAKES = {
    'load("none")': "none: neither",
    "encoder.decode([4096])": "ids[0]: is 4096",
    "generate([], params, 8, 1)": "prompt is 0 tokens",
    "generate([1.5], params, 8, 1)": "ids[0]: is a float",
    "generate([1], params, 7, 1)": "n_head: is 7",
    "generate([1], params, 8, 999)": "prompt is 1 tokens",
    "generate([1], params, 8, 1, top_p=2)": "top_p: is 2",
    "next_tokens([1] * 257, params, 8)": "text is 257 tokens",
    "token_logprobs([1, 2], params, 8, stride=0)": "stride: is 0",
    'score("", encoder, params, 8)': "text '': is 0 tokens",
    'trace([1], params, 8, keep="x")': "keep: no name",
    'attention_view("a" * 999, encoder, params, 8)': "text is ",
    'to_backend(params, "x")': "backend: is 'x'",
    'merge_adapter(params, "/none")': "/none: no such folder",
    'merge_adapter(params, ".", scale=float("nan"))': "scale: is nan",
    'Encoder({}, [])': "no token for the byte",
}  # fmt: skip


def test_without_asserts_everything_works_and_mistakes_are_still_told(tmp_path):
    script = f"""
assert False, "asserts are on"
{RUN}
import json, picogpt
from picogpt import *
told = {{}}
for mistake in {list(MISTAKES)!r}:
    try:
        eval(mistake)
    except PicogptError as error:
        told[mistake] = str(error)
print(json.dumps(told))
"""
    done = python("-O", "-c", script, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    *said, told = done.stdout.splitlines(keepends=True)
    assert "".join(said) == SAID
    told = json.loads(told)
    assert {mistake: told.get(mistake, "")[: len(MISTAKES[mistake])] for mistake in MISTAKES} == (
        MISTAKES
    )


# Prints what is written, but for compiled modules, which Python may keep where it likes.
AUDIT = """
import os, sys
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGES = {"mkdir", "rename", "remove", "rmdir", "link", "symlink", "truncate", "utime", "chmod"}
def audit(event, arguments):
    path = str(arguments[0]) if arguments else ""
    if path.startswith(sys.pycache_prefix) or path.isdigit():  # a file that is open already
        return
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
        print("open", path)
    elif event.partition(".")[2] in CHANGES or event.startswith(("shutil.", "tempfile.")):
        print(event, path)
sys.addaudithook(audit)
"""
USE = """
import picogpt
encoder, hparams, params = picogpt.load("tales")
encoder.encode("Once upon a time")
"""


def run_audited(script, folder):
    """-> what a script writes, as lines, in a folder that cannot be written to, without a home."""
    nowhere = folder / "nowhere"
    nowhere.mkdir()
    nowhere.chmod(0o555)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONDONTWRITEBYTECODE", "PICOGPT_WEIGHTS", "XDG_CACHE_HOME")
    }
    environment |= {name: str(folder / "no home") for name in ("HOME", "USERPROFILE")}
    environment |= {"PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    done = python("-c", AUDIT + script, cwd=nowhere, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (folder / "no home").exists()
    return done.stdout.splitlines()


def test_to_import_and_load_writes_nothing(tmp_path):
    assert run_audited(USE, tmp_path) == []
    assert list((tmp_path / "nowhere").iterdir()) == []
    assert (tmp_path / "compiled").exists()


def test_the_audit_sees_what_is_written(tmp_path):
    path = str(tmp_path / "x")
    script = f"import pathlib; p = pathlib.Path({path!r}); p.mkdir(); (p / 'y').write_text('')"
    assert run_audited(script, tmp_path) == [f"os.mkdir {path}", f"open {path}/y"]


@pytest.fixture
def many_threads():
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(N_THREADS) as pool:
        yield pool
    sys.setswitchinterval(before)


TEXTS = ["Once upon a time", "'The wolf', she said, ", "naïve 日本 1234 ", "a" * 100 + " b\n\n c"]


def test_threads_can_share_one_encoder(many_threads, monkeypatch):
    monkeypatch.setattr(encoder_module, "MAX_CACHED", 20)  # so that it is often forgotten
    texts = [f"{text}{i} word{i} {text[::-1]}" * 10 for i in range(30) for text in TEXTS]
    alone = Encoder.gpt2()
    expected = [alone.encode(text) for text in texts]
    shared = Encoder.gpt2()
    assert list(many_threads.map(shared.encode, texts * 2)) == expected * 2
    assert list(many_threads.map(shared.decode, expected)) == texts
    found = list(many_threads.map(shared.decode_with_offsets, expected[:40]))
    assert found == [alone.decode_with_offsets(ids) for ids in expected[:40]]


def test_threads_can_share_one_model(many_threads, model_folder):
    encoder, hparams, params = load(model_folder())
    n_head = hparams["n_head"]

    def work(i):
        """-> what all functions say of one text."""
        text = TEXTS[i % len(TEXTS)]
        ids = encoder.encode(text)[:12]  # the window has 32
        best, likely = logit_lens(ids, params, n_head)
        return [
            generate(ids, params, n_head, 4),
            generate(ids, params, n_head, 4, top_k=40, top_p=0.9, seed=i, repetition_penalty=1.1),
            generate(ids, params, n_head, 4, temperature=1e-300),
            generate(ids, params, n_head, 12, lookahead=7),
            generate_batch([ids, [i, 5], ids[:3]], params, n_head, 4, temperature=0.8, seed=i),
            list(stream(ids, params, n_head, 4)),
            score(text, encoder, params, n_head),
            *(x.tobytes() for x in trace(ids, params, n_head).values()),
            best.tobytes(),
            likely.tobytes(),
        ]

    jobs = range(4 * N_THREADS)
    expected = [work(i) for i in jobs]
    assert list(many_threads.map(work, jobs)) == expected
