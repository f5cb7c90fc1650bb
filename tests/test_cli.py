"""The command: what is on stdout, what on stderr, and with which exit code."""

import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from picogpt import (
    Encoder,
    __version__,
    cli,
    generate,
    generate_batch,
    layouts,
    load,
    loader,
    logit_lens,
    next_tokens,
    score,
    scoring,
    token_logprobs,
)
from picogpt.catalog import BUNDLED
from picogpt.cli import VERBS, main
from picogpt.commands import generate as generating
from picogpt.commands import score as scores
from picogpt.commands import terminal
from picogpt.download import OFFICIAL


@pytest.fixture
def folder(model_folder):
    """A model with a window of 32 tokens, whose end of text has the id 299."""
    return model_folder()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def run(*arguments, env=None, stdout=subprocess.PIPE, **options):
    """Runs the command in a process of its own, with nothing on stdin unless it is given."""
    if "input" not in options:
        options["stdin"] = subprocess.DEVNULL
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "picogpt", *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=os.environ | (env or {}),
        check=False,
        **options,
    )


def continuation(model, text, n_tokens):
    """What the API makes of the same prompt."""
    encoder, hparams, params = load(model)
    end = encoder.end_of_text
    ids = encoder.encode(text) or [end]
    return encoder.decode(generate(ids, params, hparams["n_head"], n_tokens, stop_ids=[end]))


def test_stdout_is_the_text_and_a_newline(folder):
    done = run("the king", "--n-tokens", 9, "--model", folder)
    assert done.returncode == 0
    assert done.stdout.decode() == continuation(folder, "the king", 9) + "\n"
    assert done.stderr == b""


def test_forty_tokens_by_default(capsys):
    assert main(["Once upon a time", "--model", "tales"]) == 0
    assert capsys.readouterr() == (continuation("tales", "Once upon a time", 40) + "\n", "")


def test_text_is_streamed_in_whole_characters(folder, monkeypatch):
    """Each token is written and flushed as it comes, except bytes that end inside a character."""
    ids = [*Encoder.from_folder(folder).encode("a日b"), 123, 127]  # and two bytes of no character
    monkeypatch.setattr(
        generating, "stream_batch", lambda *args, **_: ((0, token, None) for token in ids)
    )
    written = []

    class Watched(io.StringIO):
        def flush(self):
            written.append(self.getvalue())
            self.truncate(0)
            self.seek(0)

    monkeypatch.setattr(sys, "stdout", Watched())
    assert main(["x", "--model", str(folder)]) == 0
    assert written[:5] == ["a", "", "", "日", "b"]
    assert "".join(written) == Encoder.from_folder(folder).decode(ids) + "\n"


def test_it_stops_at_the_end_of_text(folder, capsys, monkeypatch):
    encoder, _, params = model = load(folder)
    new = generate(encoder.encode("the king"), params, 4, 9)
    at = next(i for i, token in enumerate(new) if i and token not in new[:i])
    monkeypatch.setattr(encoder, "end_of_text", new[at])
    monkeypatch.setattr(terminal, "load", lambda name, **_: model)
    assert main(["the king", "--model", str(folder), "--n-tokens", "9"]) == 0
    assert capsys.readouterr().out == encoder.decode(new[:at]) + "\n"


def test_an_empty_prompt_starts_from_the_end_of_text(folder, capsys):
    assert main(["", "--model", str(folder), "--n-tokens", "5"]) == 0
    assert capsys.readouterr().out == continuation(folder, "", 5) + "\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["generate", "the king"], "the king"),
        (["generate", "generate"], "generate"),
        (["--", "generate"], "generate"),
        (["--", "--help"], "--help"),
        (["--", "-"], "-"),
        (["--n-tokens", "5", "--", "--n-tokens"], "--n-tokens"),
        ([" "], " "),
        (["日\udce6\udc97\udca5"], "日日"),
        (["a\udcff"], "a\ufffd"),
        (["a<|endoftext|>b"], "a<|endoftext|>b"),
    ],
)
def test_every_prompt_can_be_spelt(folder, monkeypatch, arguments, text):
    """A given prompt never touches stdin; bytes from the shell are read as UTF-8."""
    prompts = []
    verb = (generating.generate_parser, lambda args: prompts.append(args.text))
    monkeypatch.setitem(cli.VERBS, "generate", verb)
    monkeypatch.setattr(sys, "stdin", None)
    assert main(arguments) == 0
    assert prompts == [text]


@pytest.mark.parametrize("arguments", [["-"], []])
@pytest.mark.parametrize(
    ("data", "text"), [(b"a\n\nb", "a\n\nb"), ("日\r\n".encode(), "日\r\n"), (b"a\xff", "a\ufffd")]
)
def test_a_prompt_from_stdin_is_taken_byte_for_byte(arguments, data, text, monkeypatch):
    prompts = []
    verb = (generating.generate_parser, lambda args: prompts.append(args.text))
    monkeypatch.setitem(cli.VERBS, "generate", verb)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="cp1252"))
    assert main(arguments) == 0
    assert prompts == [text]


def test_a_long_prompt_from_stdin_gives_the_window_message(folder):
    done = run("-", "--model", folder, input=b"x" * 200_000)
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.decode() == (
        "picogpt: error: prompt is 200000 tokens and 40 more are asked for; "
        "the model's window of 32 leaves room for 0\n"
    )


def test_no_prompt_at_a_terminal_is_a_usage_error(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "usage: picogpt [PROMPT] [options]\n"
        "picogpt: nothing to work on; expected a text in quotes, or a pipe; --help tells more\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n-tokens", "-1"], "argument --n-tokens: '-1' is not a whole number, 0 or more"),
        (["--n-tokens", "1.5"], "argument --n-tokens: '1.5' is not a whole number, 0 or more"),
        (["--n-tok", "5"], "unrecognized arguments: --n-tok"),
        (["b", "c"], "unrecognized arguments: b c"),
    ],
)
def test_usage_errors_exit_with_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(["a", *arguments])
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]


def test_errors_are_one_line_and_exit_with_1(tmp_path, capsys):
    assert main(["a", "--model", "335M"]) == 1
    names = "tales, 124M, 355M, 774M, 1558M, distilgpt2, and owner/name of the Hub"
    message = f"335M: neither a model nor a folder; the models are {names}"
    assert capsys.readouterr() == ("", f"picogpt: error: {message}\n")


def test_a_file_that_cannot_be_read_is_one_line(folder, capsys):
    path = folder / "model.ckpt.data-00000-of-00001"
    path.unlink()
    assert main(["a", "--model", str(folder)]) == 1
    assert capsys.readouterr() == ("", f"picogpt: error: {path}: No such file or directory\n")


def test_warnings_are_one_line(folder, capsys, monkeypatch):
    monkeypatch.setitem(layouts.HEADS, 16, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["a", "--model", str(folder), "--n-tokens", "0"]) == 0
    assert capsys.readouterr() == (
        "\n",
        f"picogpt: warning: {folder}/hparams.json: n_head=4 is unusual for n_embd=16, "
        "official models have 2; shapes cannot tell which is right\n",
    )


def test_other_exceptions_keep_their_traceback(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr(terminal, "load", fail)
    with pytest.raises(ZeroDivisionError):
        main(["a"])


def test_an_interrupt_keeps_the_text_and_exits_with_130(folder, capsys, monkeypatch):

    def interrupted(*args, **options):
        yield 0, 64, None
        raise KeyboardInterrupt

    monkeypatch.setattr(generating, "stream_batch", interrupted)
    assert main(["x", "--model", str(folder)]) == 130
    assert capsys.readouterr() == ("a\n", "")


def test_a_closed_pipe_is_quiet(folder):
    reading, writing = os.pipe()
    os.close(reading)
    done = run("x", "--n-tokens", 9, "--model", folder, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_one_line(folder):
    with Path("/dev/full").open("wb") as full:
        done = run("x", "--n-tokens", 9, "--model", folder, stdout=full)
    assert done.returncode == 1
    assert done.stderr == b"picogpt: error: stdout: No space left on device\n"


@pytest.mark.parametrize(
    ("encoding", "shown"), [("cp1252", "é\\u65e5"), ("ascii", "\\xe9\\u65e5"), ("utf-8", "é日")]
)
def test_a_console_that_is_not_utf8_shows_what_it_can(folder, monkeypatch, encoding, shown):
    ids = Encoder.from_folder(folder).encode("é日")
    monkeypatch.setattr(
        generating, "stream_batch", lambda *args, **_: ((0, token, None) for token in ids)
    )
    console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", console)
    assert main(["x", "--model", str(folder)]) == 0
    assert console.buffer.getvalue().decode(encoding) == shown + "\n"


@pytest.mark.parametrize("io_encoding", ["utf-8", "ascii"])
def test_prompts_are_utf8_in_any_locale(folder, io_encoding):
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    env["PYTHONIOENCODING"] = io_encoding
    done = run("日本", "--model", folder, "--n-tokens", 9, env=env)
    wanted = continuation(folder, "日本", 9) + "\n"
    assert done.stdout == wanted.encode(io_encoding, "backslashreplace")
    assert done.stderr == b""


@pytest.mark.parametrize("no_color", [None, "1"])
def test_a_terminal_is_told_which_model_runs_unless_it_was_named(folder, monkeypatch, no_color):
    monkeypatch.setenv("PICOGPT_MODEL", str(folder))
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main(["a", "--n-tokens", "0"]) == 0
    line = f"model: {folder}"
    assert sys.stderr.getvalue() == (f"{line}\n" if no_color else f"\x1b[2m{line}\x1b[0m\n")
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main(["a", "--n-tokens", "0", "--model", str(folder)]) == 0
    assert sys.stderr.getvalue() == ""


def test_end_of_text_in_the_prompt_on_request(folder, monkeypatch):
    prompts = []

    def remember(batch, *args, **options):
        prompts.extend(batch)
        return iter([])

    monkeypatch.setattr(generating, "stream_batch", remember)
    for option in ([], ["--allow-special"]):
        assert main(["a<|endoftext|>b", "--model", str(folder), *option]) == 0
    assert prompts[1] == [64, 299, 65]
    assert prompts[0] == Encoder.from_folder(folder).encode("a<|endoftext|>b")


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"picogpt {__version__}\n"


def test_sampling_flags_reach_the_api(folder, capsys):
    flags = "--temperature 0.8 --top-k 50 --top-p 0.9 --repetition-penalty 1.2 --seed 7"
    assert main(["the king", "--model", str(folder), "--n-tokens", "20", *flags.split()]) == 0
    encoder, _, params = load(folder)
    options = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 7}
    new = generate(encoder.encode("the king"), params, 4, 20, stop_ids=[299], **options)
    assert capsys.readouterr() == (encoder.decode(new) + "\n", "")


def test_the_same_seed_gives_the_same_text_in_two_processes(folder):
    flags = ["--seed", 5, "--n-tokens", 20, "--model", folder]
    assert run("the king", *flags).stdout == run("the king", *flags).stdout != b""


@pytest.mark.parametrize("text", ["amy:", " x", "日", "a\n"])
def test_echo_is_the_prompt_and_the_text_byte_for_byte(folder, text):
    flags = ["--n-tokens", 9, "--model", folder]
    alone, echoed = run(text, *flags).stdout, run(text, *flags, "--echo").stdout
    assert echoed == text.encode() + alone


def test_beyond_the_window(folder, capsys):
    flags = ["--model", str(folder), "--n-tokens", "99"]
    assert main(["the king", *flags]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "the model's window of 32 leaves room for" in err
    assert main(["the king", *flags, "--overflow", "slide"]) == 0
    assert len(capsys.readouterr().out) > 32


def says(monkeypatch, *rows):
    """Has the model say texts, a token a character, whatever the prompt is."""

    def steps(prompts, *args, done, **options):
        assert len(prompts) == len(rows)
        for i in range(max(map(len, rows))):
            for row, text in enumerate(rows):
                if i < len(text) and row not in done:
                    taken.append(text[i])
                    yield row, text[i], None

    taken = []
    monkeypatch.setattr(generating, "stream_batch", steps)
    encoder = type("Bytes", (), {"end_of_text": None})()
    encoder.encode = lambda text, **_: [0]
    encoder.decode_bytes = lambda ids: ids[0] if isinstance(ids[0], bytes) else ids[0].encode()
    model = loader.Model(encoder, {"n_head": 1}, {"wte": np.zeros(1)})
    monkeypatch.setattr(terminal, "load", lambda name, **_: model)
    return taken


@pytest.mark.parametrize(
    ("text", "stops", "shown", "n_taken"),
    [
        ("one two three", ["two"], "one ", 7),
        ("one two three", ["three", "e t"], "on", 5),
        ("one two three", ["x"], "one two three", 13),
        ("one two three", ["threes"], "one two three", 13),
        ("aaab", ["aab"], "a", 4),
        ("xabc", ["abc", "b"], "xa", 3),
        ("one", ["one"], "", 3),
        ("日本語", ["本"], "日", 2),
    ],
)
def test_a_stop_text_ends_the_text_before_it(capsys, monkeypatch, text, stops, shown, n_taken):
    taken = says(monkeypatch, text)
    assert main(["p", *(flag for stop in stops for flag in ("--stop", stop))]) == 0
    assert capsys.readouterr() == (shown + "\n", "")
    assert len(taken) == n_taken
    # The same where the text comes in one piece.
    says(monkeypatch, [text])
    assert main(["p", *(flag for stop in stops for flag in ("--stop", stop))]) == 0
    assert capsys.readouterr() == (shown + "\n", "")


def test_nothing_of_a_stop_text_is_shown_while_streaming(monkeypatch):
    says(monkeypatch, "a st stop")
    pieces = []
    monkeypatch.setattr("builtins.print", lambda *text, **_: pieces.append("".join(text)))
    assert main(["p", "--stop", "stop"]) == 0
    assert "".join(pieces) == "a st "
    assert pieces[:5] == ["a", " ", "", "", "st "]


def test_no_stop_goes_on_after_the_end_of_text(folder, monkeypatch):
    stops = []

    def remember(*args, stop_ids, **options):
        stops.append(stop_ids)
        return iter([])

    monkeypatch.setattr(generating, "stream_batch", remember)
    for flags in ([], ["--no-stop"]):
        assert main(["a", "--model", str(folder), *flags]) == 0
    assert stops == [[299], []]


def test_samples_are_the_rows_of_a_batch(folder, capsys):
    flags = "--n-tokens 20 --seed 3 --n-samples 3 --echo"
    assert main(["the king", "--model", str(folder), *flags.split()]) == 0
    encoder, _, params = load(folder)
    ids = encoder.encode("the king")
    rows = generate_batch([ids] * 3, params, 4, 20, seed=3, stop_ids=[299])
    parts = [
        f"=== sample {i} of 3 ===\nthe king{encoder.decode(row)}\n" for i, row in enumerate(rows, 1)
    ]
    assert capsys.readouterr() == ("".join(parts), "")
    assert len(set(parts)) == 3


def test_samples_differ_unless_the_temperature_is_0(folder, capsys):
    flags = ["--model", str(folder), "--n-tokens", "20", "--n-samples", "2"]
    for more, n_texts in (([], 2), (["--temperature", "0"], 1)):
        assert main(["the king", *flags, *more]) == 0
        parts = capsys.readouterr().out.replace("=== sample 1 of 2 ===\n", "")
        assert len(set(parts.split("=== sample 2 of 2 ===\n"))) == n_texts


def test_a_sample_that_meets_a_stop_text_ends(capsys, monkeypatch):
    taken = says(monkeypatch, "ab.cdef", "uvwxyz")
    assert main(["p", "--n-samples", "2", "--stop", "."]) == 0
    assert capsys.readouterr().out == "=== sample 1 of 2 ===\nab\n=== sample 2 of 2 ===\nuvwxyz\n"
    assert "c" not in taken


def test_an_interrupt_keeps_all_samples(capsys, monkeypatch):
    def steps(*args, **options):
        yield from [(0, "a", None), (1, "b", None), (0, b"\xe6\x97", None)]
        raise KeyboardInterrupt

    says(monkeypatch, "", "")
    monkeypatch.setattr(generating, "stream_batch", steps)
    assert main(["p", "--n-samples", "2"]) == 130
    out = capsys.readouterr().out
    assert out == "=== sample 1 of 2 ===\na\ufffd\n=== sample 2 of 2 ===\nb\n"


@pytest.mark.parametrize(
    ("out_is_tty", "flags", "has_bar"),
    [(True, [], False), (False, [], True), (True, ["--n-samples", "2"], True)],
)
def test_progress_is_shown_where_text_is_not(folder, monkeypatch, out_is_tty, flags, has_bar):
    monkeypatch.setattr(sys, "stdout", Terminal() if out_is_tty else io.StringIO())
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert main(["the", "--n-tokens", "9", "--model", str(folder), *flags]) == 0
    assert ("tokens" in sys.stderr.getvalue()) == has_bar
    assert "\r" not in sys.stdout.getvalue()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--temperature -1", "--temperature: '-1' is not a number, 0 or more"),
        ("--temperature nan", "--temperature: 'nan' is not a number, 0 or more"),
        ("--temperature inf", "--temperature: 'inf' is not a number, 0 or more"),
        ("--top-p 1.5", "--top-p: '1.5' is not a number from 0 to 1"),
        ("--top-k -2", "--top-k: '-2' is not a whole number, 0 or more"),
        ("--seed x", "--seed: 'x' is not a whole number, 0 or more"),
        ("--repetition-penalty 0", "--repetition-penalty: '0' is not a number from 0.01 to 100"),
        ("--n-samples 0", "--n-samples: '0' is not a whole number from 1 to 1000"),
        ("--n-samples 1001", "--n-samples: '1001' is not a whole number from 1 to 1000"),
        ("--stop=", "--stop: '' is in every text"),
    ],
)
def test_flags_out_of_range_are_usage_errors(capsys, flags, message):
    with pytest.raises(SystemExit) as exit_:
        main(["a", *flags.split()])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"picogpt: error: argument {message}"


TOKENS = """\
6 tokens
 15496 'Hello'
    11 ','
   220 ' '
   198 '\\n'
 33768 b'\\xe6\\x97'
    98 b'\\xa5'
"""


def test_tokens_shows_number_ids_and_pieces(capsys):
    assert main(["tokens", "Hello, \n日"]) == 0
    assert capsys.readouterr() == (TOKENS, "")


def test_tokens_are_coloured_in_turns_on_a_terminal(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["tokens", "a b c"]) == 0
    shown = "3 tokens\n    64 \x1b[32m'a'\x1b[0m\n   275 \x1b[36m' b'\x1b[0m\n"
    assert sys.stdout.getvalue() == shown + "   269 \x1b[32m' c'\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert main(["tokens", "a"]) == 0
    assert sys.stdout.getvalue() == "1 token\n    64 'a'\n"


def test_tokens_as_json(capsys):
    assert main(["tokens", "a日", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "count": 3,
        "tokens": [
            {"id": 64, "text": "a", "bytes": "61"},
            {"id": 33768, "text": "\ufffd", "bytes": "e697"},
            {"id": 98, "text": "\ufffd", "bytes": "a5"},
        ],
    }


def test_tokens_counts_what_stdin_holds():
    assert run("tokens", "--count", "-", input=b"a\n\nb").stdout == b"4\n"
    assert run("tokens", "--count", input=b"").stdout == b"0\n"


def test_tokens_with_the_vocabulary_of_a_model(folder, capsys):
    assert main(["tokens", "the king", "--model", str(folder), "--count"]) == 0
    wanted = len(Encoder.from_folder(folder).encode("the king"))
    assert capsys.readouterr().out == f"{wanted}\n"
    assert main(["tokens", "a<|endoftext|>", "--allow-special", "--count"]) == 0
    assert capsys.readouterr().out == "2\n"


def test_tokens_of_undecodable_bytes(capsys):
    assert main(["tokens", "a\udcff", "--count"]) == 0
    assert capsys.readouterr().out == "2\n"


def test_a_prompt_that_is_a_verb_is_reached_by_generate(folder, capsys):
    flags = ["--model", str(folder), "--n-tokens", "5"]
    assert main(["generate", "tokens", *flags]) == 0
    assert capsys.readouterr().out == continuation(folder, "tokens", 5) + "\n"


def shell(line, folder):
    """Runs a line of sh with $PICOGPT set to the command and $MODEL to the folder."""
    environment = {"PICOGPT": f"{sys.executable} -m picogpt", "MODEL": str(folder)}
    return subprocess.run(
        ["sh", "-c", line],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | environment,
        check=False,
    )


def test_closed_streams(folder):
    text = continuation(folder, "hi", 3).encode() + b"\n"
    done = shell("$PICOGPT hi --n-tokens 3 --model $MODEL 2>&-", folder)
    assert (done.returncode, done.stdout) == (0, text)
    done = shell("$PICOGPT hi --model nope 2>&-", folder)
    assert (done.returncode, done.stdout) == (1, b"")
    done = shell("$PICOGPT hi --n-tokens 3 --model $MODEL >&-", folder)
    said = b"picogpt: error: stdout: is closed; expected a place for the text\n"
    assert (done.returncode, done.stderr) == (1, said)
    done = shell("$PICOGPT - <&-", folder)
    assert (done.returncode, done.stderr[:15]) == (2, b"usage: picogpt ")
    done = shell("$PICOGPT hi --n-tokens 3 --model $MODEL <&-", folder)
    assert (done.returncode, done.stdout) == (0, text)


def test_a_model_without_a_name_is_an_error_and_not_the_default(capsys):
    assert main(["hi", "--model", ""]) == 1
    assert "neither a model nor a folder" in capsys.readouterr().err


def test_no_memory_is_one_line(capsys, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(terminal, "load", fail)
    assert main(["hi"]) == 1
    said = "not enough memory; ask for fewer samples or a smaller model"
    assert capsys.readouterr() == ("", f"picogpt: error: {said}\n")


def test_messages_stay_in_their_line(capsys):
    assert main(["hi", "--model", "a\nb/\x1b[31m"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert r"a\nb/\x1b[31m: no such folder" in err


def table(text):
    return [line.split() for line in text.splitlines()]


def test_next_is_a_table_of_what_may_come(folder, capsys):
    assert main(["next", "the king", "--model", str(folder), "--top", "3"]) == 0
    encoder, hparams, params = load(folder)
    ids, probabilities = next_tokens(encoder.encode("the king"), params, hparams["n_head"])
    out, err = capsys.readouterr()
    assert err == ""
    rows = table(out)
    assert rows[0] == ["rank", "piece", "id", "probability", "cumulative"]
    assert len(rows) == 4
    sums = probabilities.cumsum()
    for rank, line in enumerate(out.splitlines()[1:]):
        token, p = int(ids[rank]), probabilities[rank]
        assert line[:6] == f"{rank + 1:4}  "
        assert line[6:].startswith(terminal.quoted(encoder.token_bytes(token)))
        assert f"  {token:6}  {p:11.2%} {'█' * round(20 * p):20}  {sums[rank]:10.2%}" in line


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ([], {}),
        (["--temperature", "2"], {"temperature": 2.0}),
        (["--top-k", "5"], {"top_k": 5}),
        (["--top-p", "0.5"], {"top_p": 0.5}),
        (["--repetition-penalty", "2"], {"repetition_penalty": 2.0}),
        (["--temperature", "0"], {"temperature": 0}),
    ],
)
def test_next_takes_the_sampling_flags(folder, capsys, flags, options):
    assert main(["next", "the king", "--model", str(folder), "--json", *flags]) == 0
    encoder, _, params = load(folder)
    ids, probabilities = next_tokens(encoder.encode("the king"), params, 4, **options)
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens"] == len(encoder.encode("the king"))
    assert len(found["next"]) == min(10, len(ids))
    sums = probabilities.cumsum()
    for i, token in enumerate(found["next"]):
        assert token == {
            "rank": i + 1,
            "id": int(ids[i]),
            "text": encoder.decode([ids[i]]),
            "probability": pytest.approx(probabilities[i]),
            "cumulative": pytest.approx(sums[i]),
        }


def test_next_from_nothing_and_where_bars_cannot_be_drawn(folder):
    done = run("next", "", "--model", folder, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0
    assert b"#" in done.stdout
    done = run("next", "x" * 33, "--model", folder)
    message = "text is 33 tokens; the model's window takes 1 to 32"
    assert (done.returncode, done.stderr.decode()) == (1, f"picogpt: error: {message}\n")


def test_the_lens_is_a_table_of_layers(folder, capsys):
    assert main(["lens", "the", "--model", str(folder)]) == 0
    encoder, _, params = load(folder)
    ids = encoder.encode("the")
    best, likely = logit_lens(ids, params, 4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("  ")[0] == "after"
    assert [name for name in lines[0].split("  ") if name] == (
        ["after", *(name for name in ("embedding", "layer 0", "layer 1"))]
    )
    for i, line in enumerate(lines[1:]):
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        said = [
            f"{terminal.quoted(encoder.token_bytes(token))} {p:.0%}"
            for token, p in zip(best[:, i], likely[:, i], strict=True)
        ]
        assert cells == [terminal.quoted(encoder.token_bytes(ids[i])), *said]


def test_layers_that_do_not_fit_the_terminal_come_below(folder, capsys, monkeypatch):
    class Wide(Terminal):
        pass

    monkeypatch.setenv("COLUMNS", "30")
    screen = Wide()
    monkeypatch.setattr(sys, "stdout", screen)
    assert main(["lens", "the", "--model", str(folder)]) == 0
    text = screen.getvalue()
    blocks = text.split("\n\n")
    assert len(blocks) > 1
    assert [block.split()[0] for block in blocks] == ["after"] * len(blocks)
    assert [name for name in ("embedding", "layer 0", "layer 1") if name in text] == (
        ["embedding", "layer 0", "layer 1"]
    )


def test_words_that_are_not_understood(capsys):
    for arguments in (["Once", "upon"], ["--model", "tales", "next", "Once"], ["a", "--ntokens"]):
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith("picogpt: error: unrecognized arguments: ")
        assert said.endswith("; quote a text; a command comes first")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["toknes"], "picogpt: hint: continues 'toknes'; the command is tokens\n"),
        (["generate", "toknes"], ""),
        (["the king"], ""),
    ],
)
def test_a_command_that_is_misspelt_is_hinted_at_on_a_terminal(
    folder, monkeypatch, arguments, hint
):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert main([*arguments, "--model", str(folder), "--n-tokens", "1"]) == 0
    assert hint in screen.getvalue()
    assert ("hint" in screen.getvalue()) == bool(hint)


def test_pictures_are_written(folder, tmp_path, capsys):
    for verb in ("attention", "lens"):
        path = tmp_path / f"{verb}.svg"
        assert main([verb, "the king", "--model", str(folder), "-o", str(path)]) == 0
        assert path.read_text(encoding="utf-8").startswith("<?xml")
    assert capsys.readouterr() == ("", "")
    with pytest.raises(SystemExit) as error:
        main(["attention", "the king"])
    assert error.value.code == 2
    capsys.readouterr()
    run = ["attention", "a", "--model", str(folder), "-o"]
    assert main([*run, "x.gif"]) == 1
    message = "x.gif: ends in '.gif'; expected .png, .svg, .pdf or .html"
    assert capsys.readouterr().err == f"picogpt: error: {message}\n"
    assert main([*run, str(tmp_path / "x.png"), "--head", "4"]) == 1
    message = "head: is 4; expected 0 to 3, all or mean"
    assert capsys.readouterr().err == f"picogpt: error: {message}\n"
    assert main([*run, str(tmp_path / "x.png"), "--layer", "2"]) == 1
    message = "layer: is 2; expected 0 to 1"
    assert capsys.readouterr().err == f"picogpt: error: {message}\n"
    assert not (tmp_path / "x.png").exists()
    with pytest.raises(SystemExit):
        main([*run, "x.png", "--head", "most"])
    assert "'most' is not a whole number, mean or all" in capsys.readouterr().err


@pytest.fixture
def files(tmp_path):
    """Two texts, the second longer than the window, and texts a line."""
    (tmp_path / "a.txt").write_text("the king\r\n", encoding="utf-8", newline="")
    (tmp_path / "b.txt").write_text("and his daughter, " * 5, encoding="utf-8")
    lines = ['{"text": "the king"}\r', "", '{"text": "naïve 日本", "id": 7, "x": "\u2028\x85"}']
    (tmp_path / "c.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [str(tmp_path / name) for name in ("a.txt", "b.txt", "c.jsonl")]


def test_score_has_a_line_a_file_and_the_total(folder, files, capsys):
    assert main(["score", *files, "--model", str(folder)]) == 0
    encoder, _, params = load(folder)
    texts = ["the king\r\n", "and his daughter, " * 5, "the king", "naïve 日本"]
    names = [files[0], files[1], f"{files[2]}:1", f"{files[2]}:3", "total"]
    scores = [score(text, encoder, params, 4) for text in texts]
    scores.append(scores[0] + scores[1] + scores[2] + scores[3])
    lines = capsys.readouterr().out.splitlines()
    columns = ["tokens", "nats", "ppl/token", "ppl/word", "ppl/byte", "bits/byte"]
    assert lines[0].split() == ["file", *columns]
    for line, name, found in zip(lines[1:-1], names, scores, strict=True):
        perplexities = (found.perplexity, found.word_perplexity, found.byte_perplexity)
        figures = [f"{x:.5g}" for x in (*perplexities, found.bits_per_byte)]
        assert line.split() == [name, str(found.n_tokens), f"{found.nll:.3f}", *figures]
    assert lines[-1] == "(with a start token; windows of 32 tokens, every 16)"


def test_score_as_json(folder, files, capsys):
    arguments = [files[1], "--model", str(folder), "--stride", "5", "--no-start", "--json"]
    assert main(["score", *arguments, "--per-token"]) == 0
    encoder, _, params = load(folder)
    text = "and his daughter, " * 5
    found = score(text, encoder, params, 4, stride=5, start_token=False)
    output = json.loads(capsys.readouterr().out)
    (row,) = output.pop("files")
    figures = {
        "n_tokens": found.n_tokens,
        "nll": pytest.approx(found.nll),
        "perplexity": pytest.approx(found.perplexity),
        "word_perplexity": pytest.approx(found.word_perplexity),
        "byte_perplexity": pytest.approx(found.byte_perplexity),
        "bits_per_byte": pytest.approx(found.bits_per_byte),
        "n_words": 15,
        "n_bytes": 90,
    }
    assert output == {"total": figures, "start_token": False, "window": 32, "stride": 5}
    tokens = row.pop("tokens")
    assert row == {"file": files[1], **figures}
    ids = encoder.encode(text)
    logprobs = token_logprobs(ids, params, 4, stride=5)
    assert [token["id"] for token in tokens] == ids
    assert "".join(token["text"] for token in tokens) == text
    assert tokens[0]["logprob"] is None
    assert [token["logprob"] for token in tokens[1:]] == pytest.approx(logprobs[1:].tolist())


def test_json_has_no_infinity(folder, tmp_path, capsys):
    path = tmp_path / "blank.txt"
    path.write_text("  ", encoding="utf-8")
    assert main(["score", str(path), "--model", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["word_perplexity"] is None


def test_tokens_are_shown_with_what_the_model_gives_them(folder, files, capsys, monkeypatch):
    assert main(["score", files[0], "--per-token", "--model", str(folder)]) == 0
    encoder, _, params = load(folder)
    ids = [encoder.end_of_text, *encoder.encode("the king\r\n")]
    logprobs = token_logprobs(ids, params, 4)
    lines = capsys.readouterr().out.splitlines()
    assert lines.pop(0) == "   logprob      id  token"
    for line, token, logprob in zip(lines, ids, logprobs, strict=False):
        piece = terminal.quoted(encoder.token_bytes(token))
        assert line == f"{logprob:10.4f}  {token:6}  {piece}"
    assert lines[len(ids)].startswith("file ")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["score", files[0], "--per-token", "--model", str(folder)]) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert shown.startswith("surprise in bits:  0-2   2-4   4-8   8-16   16- \nthe king\\r\n\nfile")
    assert "\x1b[97;48;5;160m" in screen.getvalue()


def test_the_last_words(folder, files, capsys):
    assert main(["score", files[2], "--last-word", "--model", str(folder), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["total"]["n_texts"], output["total"]["n_right"]) == (2, 0)
    assert output["total"]["accuracy"] == 0
    assert output["total"]["n_words"] == 2
    assert main(["score", files[2], "--last-word", "--model", str(folder)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "last words foreseen: 0 of 2, 0.00%; the figures are of the last words"


def test_score_reads_stdin(folder):
    arguments = ["score", "-", "--model", folder, "--json"]
    done = run(*arguments, input="naïve\n".encode())
    assert done.returncode == 0
    assert json.loads(done.stdout)["total"]["n_bytes"] == 7
    done = run(*arguments, input=b"a\xff")
    message = "stdin: byte 1 is 0xff; expected UTF-8 text"
    assert (done.returncode, done.stderr.decode()) == (1, f"picogpt: error: {message}\n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", None, "{0}: No such file or directory; expected a text to read"),
        ("x.txt", "", "{0}: text '': is 0 tokens; expected 1 or more"),
        (
            "x.jsonl",
            '{"text": "a"}\n{"text": ""}',
            "{0}:2: text '': is 0 tokens; expected 1 or more",
        ),
        ("x.jsonl", "a", "{0}:1: starts with 'a', is not JSON"),
        ("x.jsonl", "\n", "{0}: is empty; expected a JSON object on each line"),
        ("x.jsonl", '{"text": 1}', '{0}:1: "text" is 1; expected a string'),
        ("x.jsonl", "{}", '{0}:1: has no "text"; expected a string'),
    ],
)
def test_files_that_cannot_be_scored(folder, tmp_path, capsys, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main(["score", str(path), "--model", str(folder)]) == 1
    assert capsys.readouterr().err == f"picogpt: error: {message.format(path)}\n"


def test_the_suffix_may_be_in_capitals(folder, tmp_path, capsys):
    path = tmp_path / "X.JSONL"
    path.write_text('{"text": "the king"}', encoding="utf-8")
    assert main(["score", str(path), "--model", str(folder)]) == 0
    assert f"{path}:1 " in capsys.readouterr().out


def test_figures_do_not_run_together_and_names_do_not_command_the_terminal(
    folder, tmp_path, capsys
):
    path = tmp_path / "x\x1b[31m\ny.txt"
    path.write_text("x" * 3_000, encoding="utf-8")
    assert main(["score", str(path), "--model", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert [len(line.split()) for line in out.splitlines()[:2]] == [7, 7]
    scores._show_row("n", 1, ["12345678", "12345678901", *["1.2345e+300"] * 4])
    assert len(capsys.readouterr().out.split()) == 7


def test_a_closed_stdin_is_a_mistake_in_the_call(folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["score", "-", "--model", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("usage: picogpt score FILE...")


def test_the_first_token_is_shown_where_it_is_text(folder, files, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.delenv("NO_COLOR", raising=False)
    arguments = [files[0], "--per-token", "--no-start", "--model", str(folder)]
    assert main(["score", *arguments]) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert "\nthe king" in shown


def test_stdin_can_be_scored_once(folder, capsys):
    assert main(["score", "-", "-", "--model", str(folder)]) == 1
    message = "-: is given twice; stdin can be read once"
    assert capsys.readouterr().err == f"picogpt: error: {message}\n"


def test_progress_of_long_files_is_on_a_terminal_only(folder, files, monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(scoring, "BATCH_TOKENS", 32)
    assert main(["score", files[1], "--model", str(folder)]) == 0
    assert "windows" in screen.getvalue()
    screen.truncate(0)
    assert main(["score", files[0], "--model", str(folder)]) == 0
    assert "windows" not in screen.getvalue()


@pytest.fixture
def prompts(tmp_path):
    """A file of prompts, and the same as JSON Lines."""
    texts = ["the king", "a", "and his daughter", "naïve 日"]
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join([*texts[:2], "", *texts[2:]]) + "\r\n", encoding="utf-8", newline="")
    rows = [json.dumps({"prompt": text, "id": 1}) for text in texts]
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return path, texts


def test_a_file_of_prompts(folder, prompts, capsysbinary):
    path, texts = prompts
    encoder, _, params = load(folder)
    outputs = []
    for file in (path, path.with_suffix(".jsonl")):
        arguments = ["--prompts", str(file), "--model", str(folder), "--n-tokens", "6"]
        assert main([*arguments, "--batch-size", "2"]) == 0
        outputs.append(capsysbinary.readouterr().out)
    assert outputs[0] == outputs[1]
    end = encoder.end_of_text
    for line, text in zip(outputs[0].splitlines(), texts, strict=True):
        new = generate(encoder.encode(text), params, 4, 6, stop_ids=[end])
        assert json.loads(line) == {
            "prompt": text,
            "text": encoder.decode(new),
            "tokens": new,
            "stop_reason": "length",
            "seed": None,
        }


def test_why_a_text_ended(folder, prompts, capsysbinary, monkeypatch):
    path, texts = prompts
    encoder, _, params = model = load(folder)
    new = [generate(encoder.encode(text), params, 4, 9) for text in texts]
    arguments = ["--prompts", str(path), "--model", str(folder), "--n-tokens", "9"]
    stop = encoder.decode(new[1][2:4])
    assert main([*arguments, "--stop", stop]) == 0
    line = json.loads(capsysbinary.readouterr().out.splitlines()[1])
    assert line["stop_reason"] == "stop"
    assert line["text"] == encoder.decode(new[1]).partition(stop)[0]
    monkeypatch.setattr(encoder, "end_of_text", new[0][4])
    monkeypatch.setattr(terminal, "load", lambda name, **_: model)
    assert main(arguments) == 0
    line = json.loads(capsysbinary.readouterr().out.splitlines()[0])
    assert line["stop_reason"] == "end"
    assert line["tokens"] == new[0][: new[0].index(new[0][4])]


def test_log_probabilities_of_prompts(folder, prompts, capsysbinary):
    path, texts = prompts
    encoder, _, params = load(folder)
    arguments = ["--prompts", str(path), "--model", str(folder), "--n-tokens", "3", "--logprobs"]
    assert main([*arguments, "2"]) == 0
    lines = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    new = generate(encoder.encode(texts[0]), params, 4, 3, logprobs=2)
    assert lines[0]["logprobs"] == pytest.approx(new.logprobs, abs=1e-4)
    for found, wanted in zip(lines[0]["top_logprobs"], new.top_logprobs, strict=True):
        for entry, (token, logprob) in zip(found, wanted, strict=True):
            text = encoder.decode([token])
            assert entry == {"id": token, "text": text, "logprob": pytest.approx(logprob, abs=1e-4)}


@pytest.mark.parametrize("flags", [[], ["--top-k", "5"], ["--seed", "7"]])
def test_a_run_that_was_killed_goes_on(folder, prompts, tmp_path, capsys, flags):
    """Behind the last whole line, with the same random numbers."""
    path, _ = prompts
    out = tmp_path / "out.jsonl"
    run = [
        "--prompts",
        str(path),
        "--model",
        str(folder),
        "--n-tokens",
        "6",
        "-o",
        str(out),
        *flags,
    ]
    assert main(run) == 0
    whole = out.read_bytes()
    assert len(whole.splitlines()) == 4
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for size in (ends[0], ends[0] + 1, ends[1] - 1, ends[2], len(whole) - 1, len(whole)):
        out.write_bytes(whole[:size])
        assert main([*run, "--resume"]) == 0
        assert out.read_bytes() == whole
    assert capsys.readouterr() == ("", "")
    assert main(run) == 1
    message = "is there already; pass --resume to go on, or another name"
    assert capsys.readouterr().err == f"picogpt: error: {out}: {message}\n"
    assert out.read_bytes() == whole


def test_a_run_killed_in_earnest_leaves_whole_lines(folder, tmp_path):
    path, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    path.write_text("the king\n" * 200, encoding="utf-8")
    arguments = ["--prompts", path, "--model", folder, "--n-tokens", "20", "-o", out]
    command = [sys.executable, "-m", "picogpt", *map(str, arguments), "--batch-size", "1"]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while not out.exists() or out.stat().st_size < 1_000:
        assert child.poll() is None
    child.kill()
    child.wait()
    n = len(out.read_bytes().splitlines())
    assert 0 < n < 200
    done = subprocess.run([*command, "--resume"], stdin=subprocess.DEVNULL, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = [json.loads(line) for line in out.read_bytes().splitlines()]
    assert len(lines) == 200
    assert len({line["text"] for line in lines}) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--logprobs", "1"], "--output, --resume and --logprobs go with --prompts only"),
        (["a", "-o", "x"], "--output, --resume and --logprobs go with --prompts only"),
        (["--prompts", "x.txt"], "x.txt: No such file or directory; expected a text to read"),
    ],
)
def test_mistakes_with_files_of_prompts(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, "--model", "tales"]) == 1
    assert capsys.readouterr().err == f"picogpt: error: {message}\n"


def test_prompts_that_do_not_fit(folder, prompts, tmp_path, capsys):
    path, _ = prompts
    arguments = ["--model", str(folder), "--n-tokens", "30", "--prompts"]
    assert main([*arguments, str(path)]) == 1
    n = len(Encoder.from_folder(folder).encode("the king"))
    found = f"prompt is {n} tokens and 30 more are asked for; the model's window is 32"
    assert capsys.readouterr() == ("", f"picogpt: error: {path}:1: {found}\n")
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": 1}', encoding="utf-8")
    assert main([*arguments, str(other)]) == 1
    message = f'{other}:1: "prompt" is 1; expected a string'
    assert capsys.readouterr().err == f"picogpt: error: {message}\n"
    out = tmp_path / "out.jsonl"
    out.write_text('{"prompt": "another", "seed": null}\n', encoding="utf-8")
    assert main([*arguments, str(path), "-o", str(out), "--resume"]) == 1
    message = f"{out}:1: is not of these prompts; choose another name"
    assert capsys.readouterr().err == f"picogpt: error: {message}\n"
    with pytest.raises(SystemExit):
        main(["a", "--prompts", str(path)])
    assert "PROMPT and --prompts: expected one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [["--echo"], ["--show-probs"], ["--json"], ["--n-samples", "2"], ["--lookahead", "7"]],
)
def test_options_that_prompts_have_no_use_for_are_not_ignored(prompts, capsys, flags):
    path, _ = prompts
    assert main(["--prompts", str(path), "--model", "tales", *flags]) == 1
    message = "goes without --echo, --show-probs, --json, --n-samples and --lookahead"
    assert capsys.readouterr() == ("", f"picogpt: error: --prompts: {message}\n")


def test_prompts_from_stdin(folder):
    done = run("--prompts", "-", "--model", folder, "--n-tokens", "2", input=b"a\nb\n")
    assert done.returncode == 0
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["a", "b"]


@pytest.mark.parametrize("flags", [[], ["--top-k", "4", "--seed", "1"]])
def test_each_token_with_its_probability_and_the_runner_up(folder, capsys, flags):
    options = {"top_k": 4, "seed": 1} if flags else {}
    encoder, _, params = load(folder)
    ids = encoder.encode("the king")
    new = generate(ids, params, 4, 6, logprobs=2, **options)
    arguments = ["the king", "--model", str(folder), "--n-tokens", "6", *flags]
    assert main([*arguments, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert main([*arguments, "--show-probs"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(lines) == len(shown) == 6
    for i, (token, logprob) in enumerate(zip(new, new.logprobs, strict=True)):
        top = new.top_logprobs[i]
        other, other_logprob = top[1] if top[0][0] == token else top[0]
        p, q = math.exp(logprob), math.exp(other_logprob)
        assert lines[i] == {
            "id": token,
            "text": encoder.decode([token]),
            "probability": pytest.approx(p, rel=1e-3),
            "runner_up": {
                "id": other,
                "text": encoder.decode([other]),
                "probability": pytest.approx(q, rel=1e-3),
            },
        }
        pieces = [terminal.quoted(encoder.token_bytes(t)) for t in (token, other)]
        assert shown[i] == f"{p:7.1%}  {pieces[0]}  not {pieces[1]} {q:.1%}"


def test_probabilities_are_coloured_on_a_terminal(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["Once upon a", "--model", "tales", "--n-tokens", "2", "--show-probs"]) == 0
    first, second = screen.getvalue().splitlines()
    assert first.startswith("  97.0%  \x1b[30;48;5;153m' time'\x1b[0m  not ")
    assert "\x1b[30;48;5;153m" not in second


def test_probabilities_end_where_the_text_does(capsys):
    arguments = ["Once upon a", "--model", "tales", "--json", "--stop", "there"]
    assert main(arguments) == 0
    texts = [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]
    assert texts[-1] == " there"
    assert main([*arguments, "--n-samples", "2"]) == 1
    message = "--show-probs and --json show one text; leave --n-samples at 1"
    assert capsys.readouterr().err == f"picogpt: error: {message}\n"


OPTIONS = {
    verb: [option for action in make()._actions for option in action.option_strings]
    for verb, (make, _) in VERBS.items()
}


def complete_in_bash(*words):
    """-> what bash offers for the last of the words."""
    script = (
        'source <("$0" -m picogpt completion bash); COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))\n'
    )
    script += '_shtab_picogpt 2> /dev/null; printf "%s\\n" "${COMPREPLY[@]}"'
    command = ["bash", "-c", script, sys.executable, *words]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["picogpt", "to"], ["tokens"]),
        (["picogpt", "Once upon", "--n-"], ["--n-tokens", "--n-samples"]),
        (["picogpt", "next", "Once upon", "--backend", ""], ["numpy", "cupy", "jax"]),
        (["picogpt", "score", "--model", "35"], ["355M"]),
        (["picogpt", "download", "--source", "h"], ["huggingface"]),
        (["picogpt", "completion", ""], ["bash", "zsh", "fish"]),
        (["picogpt", "verify", "--"], ["--help", "--weights-dir"]),
    ],
)
def test_completion_in_bash(words, offered):
    assert complete_in_bash(*words) == offered


@pytest.mark.skipif(not shutil.which("bash"), reason="there is no bash")
def test_completion_of_paths_in_bash(tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-text").touch()
    monkeypatch.chdir(tmp_path)
    found = complete_in_bash("picogpt", "x", "--model", "my")
    assert sorted(found) == ["my-model", "my-text"]  # a file can be a model
    assert complete_in_bash("picogpt", "x", "--adapter", "my") == ["my-model"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_command_and_option(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for verb, options in OPTIONS.items():
        assert verb in script
        for option in options:
            written = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            assert (written if shell == "fish" else option) in script
    for model in (*BUNDLED, *OFFICIAL):
        assert model in script


@pytest.mark.parametrize("columns", [50, 80, 120])
@pytest.mark.parametrize("verb", VERBS)
def test_help_is_as_wide_as_the_terminal(verb, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith(" ")) < columns
    if verb == "generate":
        assert max(map(len, lines)) > columns - 15


def test_options_are_grouped(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    groups = re.findall(r"^(\w[\w ]*):$", capsys.readouterr().out, re.MULTILINE)
    assert groups == [
        "positional arguments",
        "options",
        "model",
        "output",
        "length",
        "sampling",
        "many prompts",
        "examples",
    ]


@pytest.mark.parametrize("option", ["--layer=0", "--head=1"])
def test_a_page_has_all_layers_and_heads(tmp_path, capsys, option):
    path = tmp_path / "x.html"
    assert main(["attention", "a", "-o", str(path), option, "--model", "tales"]) == 1
    message = "--layer and --head: go with pictures; a page has all, to choose from"
    assert capsys.readouterr().err == f"picogpt: error: {message}\n"
    assert not path.exists()


def test_prompts_are_resumed_with_the_same_seed_only(folder, tmp_path, capsys):
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("a\nb\n")
    command = ["--model", str(folder), "--prompts", str(prompts), "-o", str(output)]
    assert main([*command, "--seed", "1", "--n-tokens", "2"]) == 0
    whole = output.read_bytes()
    output.write_bytes(whole.partition(b"\n")[0] + b"\n")
    assert main([*command, "--seed", "2", "--n-tokens", "2", "--resume"]) == 1
    message = f"{output}: was made with the seed 1; resume with the same, or none"
    assert capsys.readouterr().err == f"picogpt: error: {message}\n"
    assert main([*command, "--seed", "1", "--n-tokens", "2", "--resume"]) == 0
    assert output.read_bytes() == whole
