"""How fast picogpt encodes, beside tiktoken, Hugging Face tokenizers and OpenAI's loop.

    python benchmarks/encode.py TEXT_FILE

All have GPT-2's vocabulary, run on one thread, in turns in one process. "cold" is the first text
that a new encoder sees, "warm" the same text again. OpenAI's loop is restated here: the rule of
src/encoder.py in openai/gpt-2, with its cache. Every one of them must give the same ids.
"""

import argparse
import functools
import gc
import random
import statistics
import sys
from importlib import resources
from itertools import pairwise
from pathlib import Path

from generate import machine, timed

from picogpt import Encoder
from picogpt.encoder import BYTE_TO_CHARACTER


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


def make_picogpt():
    return Encoder.gpt2().encode


def make_openai():
    return OpenAI().encode


def make_tiktoken():
    import tiktoken
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks
    from tiktoken_ext.openai_public import r50k_pat_str

    folder = resources.files("picogpt") / "vocabulary"
    ranks = data_gym_to_mergeable_bpe_ranks(str(folder / "vocab.bpe"), str(folder / "encoder.json"))
    made = tiktoken.Encoding(
        "gpt2",
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": 50256},
    )
    return made.encode_ordinary


def make_tokenizers():
    from tokenizers import Tokenizer, models, pre_tokenizers

    own = Encoder.gpt2()
    merges = [tuple(pair.split(" ")) for pair in own._ranks]
    made = Tokenizer(models.BPE(own.encoder, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return lambda text: made.encode(text).ids


def repeat(text, n_bytes):
    return text * max(1, n_bytes // len(text.encode()))


def worst_cases(n):
    rng = random.Random(0)
    return {
        f"{n} times a": "a" * n,
        f"{n} blanks, then x": " " * n + "x",
        f"{n} digits": "".join(rng.choices("0123456789", k=n)),
        f"{n} letters": "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=n)),
        f"{n} combining marks": "".join(rng.choices("\u0300\u0301\u0308\u0323", k=n)),
        f"{n} emoji": "".join(rng.choices("🤗👩👧🏽🎉🐍", k=n)),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("text", type=Path, help="a text in UTF-8, 10 MB of English for the README")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (default: 5)")
    parser.add_argument("--worst", type=int, default=100_000, help="characters of a worst case")
    args = parser.parse_args()
    makers = {"picogpt": make_picogpt, "tiktoken": make_tiktoken}
    makers |= {"tokenizers": make_tokenizers, "OpenAI's loop": make_openai}
    for name in list(makers):
        try:
            makers[name]()
        except ImportError as error:
            print(f"left out: {name} ({error})", file=sys.stderr)
            del makers[name]
    source = Path(__file__).read_text(encoding="utf-8")
    texts = {
        args.text.name: args.text.read_text(encoding="utf-8"),
        "Python source, 1 MB": repeat(source, 1_000_000),
        "Chinese, 1 MB": repeat(
            "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。寒来暑往，秋收冬藏。", 1_000_000
        ),
        "emoji, 1 MB": repeat("👩‍👩‍👧 🤗 🎉 🐍 👍🏽 ", 1_000_000),
    }
    print(machine())
    print(f"{'text':28} {'who':14} {'cold MB/s':>10} {'warm MB/s':>10}   (medians)")
    for what, text in texts.items():
        size, ids, rates = len(text.encode()) / 1e6, None, {name: ([], []) for name in makers}
        for _ in range(args.rounds):
            for name, make in makers.items():
                encode = make()
                gc.collect()
                gc.freeze()  # what others hold is not looked through on this one's time
                for times in rates[name]:
                    times.append(timed(encode, text))
                found = list(encode(text[:100_000]))
                ids = ids or found
                assert found == ids, f"{name} has other ids for {what}"
        for name, (cold, warm) in rates.items():
            cold, warm = statistics.median(cold), statistics.median(warm)
            print(f"{what:28} {name:14} {size / cold:10.2f} {size / warm:10.2f}")
    print(f"{'worst case, one word':28} {'who':14} {'us/character':>12}")
    for what, text in worst_cases(args.worst).items():
        for name in ("picogpt", "tiktoken"):
            if name in makers:
                seconds = timed(makers[name](), text)
                print(f"{what:28} {name:14} {seconds / args.worst * 1e6:12.2f}")


if __name__ == "__main__":
    main()
