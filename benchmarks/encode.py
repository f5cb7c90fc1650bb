"""How fast picogpt encodes, beside tiktoken, Hugging Face tokenizers and OpenAI's loop.

All have GPT-2's vocabulary, run on one thread, in turns in one process. At first sight is the first
text that a new encoder sees, again the same text once more. OpenAI's loop is restated here: the
rule of src/encoder.py in openai/gpt-2, with its cache. Every one of them must give the same ids.
"""

import functools
import gc
import operator
import random
from importlib import resources
from itertools import accumulate, pairwise
from pathlib import Path

from common import installed, timed

from picogpt import Encoder
from picogpt.encoder import BYTE_TO_CHARACTER

TABLE = "encoding, MB/s"
TEXT, AGAIN = "English to ids, at first sight", "the same text again"
OPENAI = "OpenAI's loop"


class OpenAI:
    """Joins the best pair everywhere in a word, then looks for the next best."""

    PATTERN = r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

    def __init__(self):
        import regex

        own = Encoder.gpt2()
        self.encoder = own.encoder
        self.ranks = {tuple(pair.split(" ")): rank for pair, rank in own._ranks.items()}
        self.pattern = regex.compile(self.PATTERN)
        self.bpe = functools.cache(self.join)

    def join(self, word):
        parts = tuple(word)
        while len(parts) > 1:
            best = min(pairwise(parts), key=lambda pair: self.ranks.get(pair, float("inf")))
            if best not in self.ranks:
                break
            joined, i = [], 0
            while i < len(parts):
                if parts[i : i + 2] == best:
                    joined.append(best[0] + best[1])
                    i += 2
                else:
                    joined.append(parts[i])
                    i += 1
            parts = tuple(joined)
        return parts

    def encode(self, text):
        ids = []
        for piece in self.pattern.findall(text):
            word = "".join(BYTE_TO_CHARACTER[byte] for byte in piece.encode("utf-8"))
            ids.extend(self.encoder[token] for token in self.bpe(word))
        return ids


def vocabulary_files():
    folder = resources.files("picogpt") / "vocabulary"
    return [str(folder / name) for name in ("encoder.json", "vocab.bpe")]


def make_picogpt():
    return Encoder.gpt2().encode


def make_openai():
    return OpenAI().encode


def make_tiktoken():
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    ranks = data_gym_to_mergeable_bpe_ranks(*reversed(vocabulary_files()))
    made = tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 50256},
    )
    return made.encode_ordinary


def make_tokenizers():
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.BPE.from_file(*vocabulary_files()))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return lambda text: made.encode(text).ids


MAKERS = {"picogpt": make_picogpt, "tiktoken": make_tiktoken}
MAKERS |= {"tokenizers": make_tokenizers, OPENAI: make_openai}


def made_up(n_bytes):
    """-> text that a tokenizer takes for English: words by Zipf's law, the likelier ones tokens,
    the seldom ones two of them, joined; as many different ones as in books, about.
    """
    rng = random.Random(0)
    tokens = [token.replace("Ġ", " ") for token in Encoder.gpt2().encoder if token.isalpha()]
    starts = [token[1:] for token in tokens if token[0] == " " and token.isascii()]
    ends = [token for token in tokens if token.isascii() and token.islower() and token[0] != " "]
    words = starts[:8000]
    words += map(operator.add, rng.choices(words, k=28_000), rng.choices(ends, k=28_000))
    sums = list(accumulate(1 / (rank + 5) for rank in range(len(words))))
    n = n_bytes // 5
    between = rng.choices([" ", ", ", ". ", "\n"], [86, 6, 4, 4], k=n)
    return "".join(map(operator.add, rng.choices(words, cum_weights=sums, k=n), between))[:n_bytes]


def repeated(n_bytes):
    """-> {what: text}, of other kinds."""
    texts = {
        "Python source, repeated": Path(__file__).read_text(encoding="utf-8"),
        "Chinese, repeated": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。寒来暑往，秋收冬藏。",
        "emoji, repeated": "👩‍👩‍👧 🤗 🎉 🐍 👍🏽 ",
    }
    return {what: x * max(1, n_bytes // len(x.encode())) for what, x in texts.items()}


def long_words(n):
    """-> {what: text}, of n characters that hardly anything cuts."""
    rng = random.Random(0)
    return {
        f"a word of {n:,} letters": "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=n)),
        f"{n:,} times the letter a": "a" * n,
        f"{n:,} digits": "".join(rng.choices("0123456789", k=n)),
        f"{n:,} blanks": " " * n + "x",
        f"{n:,} combining marks": "".join(rng.choices("\u0300\u0301\u0308\u0323", k=n)),
        f"{n:,} emoji in one word": "".join(rng.choices("🤗👩👧🏽🎉🐍", k=n)),
    }


def measure(setup, note):
    makers = {who: MAKERS[who] for who in installed(MAKERS)}
    long = long_words(1000 if setup.is_smoke else 100_000)
    texts = {TEXT: setup.text} | repeated(10_000 if setup.is_smoke else 1_000_000) | long
    for what, text in texts.items():
        size, ids = len(text.encode()) / 1e6, []
        for _ in range(setup.rounds):
            for who, make in makers.items():
                if who == OPENAI and what in long:
                    continue  # whose length, squared, is the time that it takes
                encode = make()
                gc.collect()
                gc.freeze()  # what others hold is not looked through on this one's time
                note(TABLE, what, who, size / timed(encode, text))
                if what == TEXT:
                    note(TABLE, AGAIN, who, size / timed(encode, text))
                found = list(encode(text[:100_000]))
                ids = ids or found
                assert found == ids, f"{who} has other ids for {what}"
