"""Text to token ids and back: GPT-2's byte-level byte-pair encoding.

Text is cut into pieces by a pattern, each piece becomes its UTF-8 bytes, and the bytes are joined
pair by pair, always the pair that was learnt first. To store bytes in text files, GPT-2 writes each
of the 256 as a printable character ("Ġ" is the blank); tokens are written in these characters.

Source: openai/gpt-2, src/encoder.py; Sennrich et al., 2016 (the pair encoding).
"""

import codecs
import heapq
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, count, pairwise
from pathlib import Path

from .errors import PicogptError, find_files, read_json, read_text

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"  # Hugging Face's, which holds both of the others
ADDED_FILE = "added_tokens.json"  # Hugging Face's, beside the two: tokens that no merge makes
CHARACTERS_FILE = "meta.pkl"  # nanoGPT's, with a vocabulary of characters
SAVED_FILES = ("vocab.json", "merges.txt", ADDED_FILE, CHARACTERS_FILE)
GPT2_N_VOCAB = 50257
VOCABULARY_FILES = (
    f"encoder.json or {TOKENIZER_FILE} or vocab.json",
    f"vocab.bpe or {TOKENIZER_FILE} or merges.txt",
)

# Cuts text into pieces; no token reaches from one into the next. For the package `regex`: the
# standard library's `re` has no \p{L} (letters) and \p{N} (numbers). OpenAI's pattern has the
# contractions first; nothing else that begins with ' comes before them here, so it cuts the same.
PIECES = (
    r" ?[\p{L}]+"  # letters, and one blank before; most pieces are such
    r"|'s|'t|'re|'ve|'m|'ll|'d"  # the ends of contractions, in lower case only
    r"| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+"  # numbers or others, and one blank before
    r"|\s+(?!\S)|\s+"  # white space, but its last blank goes with what follows
)
# The same for ASCII alone, which `re` cuts in half the time.
ASCII_PIECES = PIECES.replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9")
# Before white space text can be cut anywhere: what comes before is a piece's end in any case.
CUT = r"\S(?=\s)"
PART = 1 << 16  # characters between cuts, at least: so the pieces of a long text need little memory
LONG = 64  # bytes of a piece; beyond, looking at all its pairs for each join takes longer
MAX_CACHED = 1 << 17  # pieces whose ids are remembered; some 40 MB
MAX_CACHED_LENGTH = 64  # characters; longer pieces seldom come again


def _byte_characters() -> dict[int, str]:
    """The character that stands for each byte: its own if printable, else one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("ÿ") + 1)} - {0xAD}
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


BYTE_TO_CHARACTER = _byte_characters()
CHARACTER_TO_BYTE = {character: byte for byte, character in BYTE_TO_CHARACTER.items()}


def check_ids(ids: Iterable[int], n_vocab: int) -> list[int]:
    """Returns ids as a list of Python integers, each from 0 to n_vocab - 1.

    Args:
        ids: a list, a one-dimensional array of integers, or anything else that yields integers.

    Raises:
        PicogptError: names the first that is no integer or out of range.
    """
    checked: list[int] = []
    for i, token in enumerate(ids):
        try:
            checked.append(operator.index(token))
        except TypeError:
            found = f"is a {type(token).__name__}"
            raise PicogptError(f"ids[{i}]: {found}; expected an integer") from None
        if not 0 <= checked[i] < n_vocab:
            raise PicogptError(f"ids[{i}]: is {token}; expected 0 to {n_vocab - 1}")
    return checked


def with_whole_characters(text: str) -> str:
    """Returns a text with the halves of surrogate pairs joined, and lone ones as U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class _Ids(dict[str, tuple[int, ...]]):
    """The ids of pieces: worked out when a piece is first met, forgotten when they are too many."""

    def __init__(self, encode: Callable[[str], tuple[int, ...]]) -> None:
        self.encode = encode

    def __missing__(self, piece: str) -> tuple[int, ...]:
        ids = self.encode(piece)
        if len(piece) <= MAX_CACHED_LENGTH:
            if len(self) >= MAX_CACHED:
                self.clear()
            self[piece] = ids
        return ids


class Encoder:
    """GPT-2's tokenizer, exact for every string.

    Attributes:
        encoder: token to id; a token is written in the characters that stand for its bytes.
        decoder: id to token.
        n_vocab: number of tokens; ids run from 0 to n_vocab - 1.
        merges: the pairs to join, "left right" each, the first learnt first.
        end_of_text: id of `<|endoftext|>`, or None where the vocabulary lacks it.

    >>> from picogpt import Encoder
    >>> encoder = Encoder.gpt2()
    >>> encoder.encode("Not all heroes wear capes.")
    [3673, 477, 10281, 5806, 1451, 274, 13]
    """

    def __init__(self, encoder: dict[str, int], merges: Iterable[str]) -> None:
        """Makes an encoder of a vocabulary and its merges; `from_folder` reads both from files.

        Args:
            encoder: token to id, as the attribute; kept, not copied.
            merges: the pairs to join, "left right" each, the first learnt first.

        Raises:
            PicogptError: the two do not fit each other.
        """
        import regex

        if not set(map(type, encoder.values())) <= {int}:
            raise PicogptError("an id is no integer; expected 0, 1, 2 and so on")
        if not set(map(type, encoder)) <= {str}:
            raise PicogptError("a token is no string")
        self.encoder = encoder
        self.decoder = dict(zip(encoder.values(), encoder, strict=True))
        self.n_vocab = len(encoder)
        self.end_of_text = encoder.get(END_OF_TEXT)
        self.merges = list(merges)
        self._ranks = dict(zip(self.merges, count()))
        if len(self._ranks) < len(self.merges):
            raise PicogptError("a merge comes twice; expected each once")
        self._check()
        # Special tokens by their text: those that no merge makes. The longest comes first.
        loose = [self.encoder[token] for token in self._loose if len(token) > 1]
        self._special_ids = {self.decode([token]): token for token in loose}
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self._special = f"({'|'.join(map(re.escape, longest_first))})" if loose else ""
        self._find_all = regex.compile(PIECES).findall
        self._find_ascii = re.compile(ASCII_PIECES, re.ASCII).findall
        self._cut = regex.compile(CUT).search
        self._ids = _Ids(self._join)

    def _check(self) -> None:
        if sorted(self.decoder) != list(range(self.n_vocab)):
            free = set(range(self.n_vocab)) - self.decoder.keys()
            found = f"no token has the id {min(free)}"
            raise PicogptError(f"{found}; expected 0 to {self.n_vocab - 1}, once each")
        for byte, character in BYTE_TO_CHARACTER.items():
            if character not in self.encoder:
                raise PicogptError(f"no token for the byte {byte:#04x}; expected {character!r}")
        known = re.escape("".join(CHARACTER_TO_BYTE))
        if strange := re.search(f"[^{known}]", "".join(self.encoder)):
            raise PicogptError(f"a token holds {strange[0]!r}; expected what stands for bytes")
        # Whole texts are looked through faster than their lines, one by one.
        pairs = "\n".join(self._ranks)
        joined = set(pairs.replace(" ", "").split("\n")) if pairs else set()
        self._loose = [token for token in self.encoder if token not in joined]  # made by no merge
        has_results = len(joined) + len(self._loose) == self.n_vocab
        if has_results and pairs.count(" ") == len(self._ranks) and joined.isdisjoint(self._ranks):
            return
        for pair, rank in self._ranks.items():  # which one it is takes longer to find out
            if pair.count(" ") != 1 or pair.replace(" ", "") not in self.encoder:
                found = f"merge {rank + 1} is {pair!r:.40}"
                raise PicogptError(f"{found}; expected two tokens that join to a third")

    def _check_complete(self, n_merged: int) -> None:
        """Raises PicogptError where a token cannot come about, as when the merges are cut short.

        Ids from n_merged on need no merge, nor do special tokens, such as the end of text: those
        that are not two other tokens, joined.
        """
        for token in self._loose:
            halves = ((token[:i], token[i:]) for i in range(1, len(token)))
            is_joined = any(a in self.encoder and b in self.encoder for a, b in halves)
            if is_joined and self.encoder[token] < n_merged:
                found = f"no merge makes {token!r:.40}"
                raise PicogptError(f"{found}; expected one among the {len(self._ranks)}")

    @classmethod
    def from_folder(cls, path: str | Path) -> "Encoder":
        """Reads the vocabulary in a folder.

        Args:
            path: of a folder with `encoder.json` and `vocab.bpe` (OpenAI's names), `vocab.json` and
                `merges.txt` (Hugging Face's), or `tokenizer.json` alone.

        Raises:
            PicogptError: a file is missing or damaged, or is of another kind of tokenizer.
        """
        vocabulary, merges = find_files(Path(path).absolute(), *VOCABULARY_FILES)
        if TOKENIZER_FILE in (vocabulary.name, merges.name):
            vocabulary = merges = vocabulary.with_name(TOKENIZER_FILE)
        return cls.from_files(vocabulary, merges)

    @classmethod
    def from_files(cls, vocabulary: Path, merges: Path) -> "Encoder":
        """Reads two files, whatever they are called.

        Args:
            vocabulary: in the format of `encoder.json` and `vocab.json`, or a `tokenizer.json`.
            merges: in the format of `vocab.bpe` and `merges.txt`, or the same `tokenizer.json`.

        Raises:
            PicogptError: one is damaged, or is of another kind of tokenizer.
            OSError: one cannot be read.
        """
        if merges == vocabulary:
            encoder, lines = _read_tokenizer(vocabulary)
        else:
            encoder, lines = read_json(vocabulary), read_text(merges).splitlines()
            if lines and lines[0].startswith("#version"):
                del lines[0]
            settings = vocabulary.with_name("tokenizer_config.json")
            if settings.is_file() and read_json(settings).get("add_prefix_space"):
                raise PicogptError(f"{settings}: add_prefix_space is true; GPT-2's is false")
            n_merged = len(encoder)
            added = vocabulary.with_name(ADDED_FILE)
            if added.is_file():
                _add_tokens(encoder, read_json(added), added)
        try:
            made = cls(encoder, lines)
            if merges != vocabulary:
                made._check_complete(n_merged)
            return made
        except PicogptError as error:
            files = f"{vocabulary} and {merges.name}" if merges != vocabulary else f"{vocabulary}"
            raise PicogptError(f"{files}: {error}; fetch again") from None

    def save(self, folder: Path) -> None:
        """Writes Hugging Face's files into a folder.

        They are `vocab.json`, `merges.txt`, and `added_tokens.json` where tokens were added.
        """
        loose = {self.encoder[token] for token in self._loose if len(token) > 1}
        n_merged = self.n_vocab  # what comes behind is added; transformers gives it the next ids
        while n_merged - 1 in loose and self.decoder[n_merged - 1] != END_OF_TEXT:
            n_merged -= 1
        vocabulary = {token: i for token, i in self.encoder.items() if i < n_merged}
        added = {self.decode([i]): i for i in range(n_merged, self.n_vocab)}
        texts = (
            json.dumps(vocabulary, ensure_ascii=False),
            "\n".join(["#version: 0.2", *self._ranks]),
            json.dumps(added, ensure_ascii=False, indent=2) if added else "",
        )
        for name, text in zip(SAVED_FILES, texts, strict=False):
            if text:
                (folder / name).write_bytes(f"{text}\n".encode())

    @classmethod
    def gpt2(cls) -> "Encoder":
        """Reads the vocabulary of the official GPT-2 models, 50,257 tokens, which picogpt brings.

        >>> from picogpt import Encoder
        >>> Encoder.gpt2().n_vocab
        50257
        """
        from importlib import resources

        folder = resources.files("picogpt").joinpath("vocabulary")
        with resources.as_file(folder) as path:
            return cls.from_folder(path)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Returns the ids of text.

        Args:
            text: any string; the halves of surrogate pairs are joined, lone ones become U+FFFD.
            allow_special: read `<|endoftext|>`, and tokens that were added later, as the special
                tokens, not as ordinary text.

        >>> from picogpt import Encoder
        >>> encoder = Encoder.gpt2()
        >>> encoder.encode("a<|endoftext|>b", allow_special=True)
        [64, 50256, 65]
        """
        text = with_whole_characters(text)
        ids: list[int] = []
        split = re.split(self._special, text) if allow_special and self._special else [text]
        for i, section in enumerate(split):
            if i % 2:
                ids.append(self._special_ids[section])
                continue
            for part in self._parts(section):
                ids += chain.from_iterable(map(self._ids.__getitem__, self._pieces(part)))
        return ids

    def encode_batch(self, texts: Iterable[str], *, allow_special: bool = False) -> list[list[int]]:
        """Returns the ids of each of several texts.

        Args:
            texts: any strings.
            allow_special: as for `encode`.

        >>> from picogpt import Encoder
        >>> encoder = Encoder.gpt2()
        >>> encoder.encode_batch(["hello world", ""])
        [[31373, 995], []]
        """
        return [self.encode(text, allow_special=allow_special) for text in texts]

    def _parts(self, text: str) -> Iterator[str]:
        """Cuts a long text where no piece is cut."""
        start = 0
        while start < len(text):
            cut = self._cut(text, start + PART)
            end = cut.end() if cut else len(text)
            yield text[start:end]
            start = end

    def _pieces(self, text: str) -> list[str]:
        return self._find_ascii(text) if text.isascii() else self._find_all(text)

    def _join(self, piece: str) -> tuple[int, ...]:
        """Encodes one piece: joins the pair of lowest rank, the leftmost first, until none is left.

        Each time it looks at all pairs, which for a word of ordinary length takes least.
        """
        tokens = [BYTE_TO_CHARACTER[byte] for byte in piece.encode("utf-8")]
        if len(tokens) > LONG:
            return self._join_long(tokens)
        get, never = self._ranks.get, len(self._ranks)
        ranks = [get(pair, never) for pair in map(" ".join, pairwise(tokens))]
        while ranks and (rank := min(ranks)) < never:
            i = ranks.index(rank)
            tokens[i] += tokens.pop(i + 1)
            del ranks[i]
            if i > 0:
                ranks[i - 1] = get(f"{tokens[i - 1]} {tokens[i]}", never)
            if i < len(ranks):
                ranks[i] = get(f"{tokens[i]} {tokens[i + 1]}", never)
        return tuple([self.encoder[token] for token in tokens])

    def _join_long(self, tokens: list[str]) -> tuple[int, ...]:
        """Does the same for a piece of any length, in time n log n for n bytes.

        The heap holds the pairs that can be joined, by rank, then from left to right. An entry is
        out of date, and passed over, when the pair at its place has another rank by now.
        """
        n = len(tokens)
        before, after = list(range(-1, n - 1)), list(range(1, n + 1))  # neighbours still there
        ranks = self._ranks
        pairs = map(" ".join, pairwise(tokens))
        heap = [(ranks[pair], i) for i, pair in enumerate(pairs) if pair in ranks]
        heapq.heapify(heap)
        while heap:
            rank, left = heapq.heappop(heap)
            right = after[left]
            if right == n or ranks.get(f"{tokens[left]} {tokens[right]}") != rank:
                continue
            tokens[left] += tokens[right]
            tokens[right] = ""
            after[left] = after[right]
            if after[left] < n:
                before[after[left]] = left
            for i in (before[left], left):
                if i >= 0 and after[i] < n:
                    rank = ranks.get(f"{tokens[i]} {tokens[after[i]]}", -1)
                    if rank >= 0:
                        heapq.heappush(heap, (rank, i))
        return tuple(self.encoder[token] for token in tokens if token)

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes that one token stands for.

        Args:
            token: its id.

        Raises:
            PicogptError: it is no integer or out of range.

        >>> from picogpt import Encoder
        >>> encoder = Encoder.gpt2()
        >>> encoder.token_bytes(447)
        b'\\xe2\\x80'
        """
        return self.decode_bytes([token])

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes that ids stand for; a token may end inside a character.

        Raises:
            PicogptError: an id is no integer or out of range.

        >>> from picogpt import Encoder
        >>> Encoder.gpt2().decode_bytes([88, 318, 447])
        b'y is\\xe2\\x80'
        """
        text = "".join([self.decoder[token] for token in check_ids(ids, self.n_vocab)])
        return bytes([CHARACTER_TO_BYTE[character] for character in text])

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            PicogptError: an id is no integer or out of range.

        >>> from picogpt import Encoder
        >>> encoder = Encoder.gpt2()
        >>> encoder.decode([88, 318, 5633])
        'y is ?'
        """
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_with_offsets(self, ids: Iterable[int]) -> tuple[str, list[int]]:
        """Returns the text of ids, and for each the index of the character that it begins in.

        Raises:
            PicogptError: an id is no integer or out of range.

        >>> from picogpt import Encoder
        >>> encoder = Encoder.gpt2()
        >>> encoder.decode_with_offsets([39, 2634, 75])
        ('Hél', [0, 1, 2])
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text, starts = "", []
        for token in check_ids(ids, self.n_vocab):
            data = self.token_bytes(token)
            text += decoder.decode(data[:1])
            # The first byte is in the last character, unless that is still to come.
            starts.append(len(text) - (not decoder.getstate()[0]))
            text += decoder.decode(data[1:])
        return text + decoder.decode(b"", final=True), starts


class CharacterEncoder(Encoder):
    """A vocabulary of single characters, such as nanoGPT's examples train with."""

    def __init__(self, characters: dict[str, int]) -> None:
        """Makes an encoder of characters.

        Args:
            characters: each with its id.

        Raises:
            PicogptError: one is no character, or the ids are not 0, 1, 2 and so on.
        """
        if not all(isinstance(c, str) and len(c) == 1 for c in characters):
            raise PicogptError("a token is no single character")
        if sorted(map(repr, characters.values())) != sorted(map(repr, range(len(characters)))):
            raise PicogptError("ids are not 0, 1, 2 and so on, once each")
        self._characters = characters
        self.encoder = {in_characters(c): i for c, i in characters.items()}
        self.decoder = {i: token for token, i in self.encoder.items()}
        self.n_vocab = len(characters)
        self.merges = []
        self.end_of_text = None

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Returns the ids of text.

        Args:
            text: any string.
            allow_special: changes nothing, since there are no special tokens.

        Raises:
            PicogptError: a character is not in the vocabulary; names it, and where it is.
        """
        ids = [self._characters.get(character, -1) for character in text]
        if -1 in ids:
            place = ids.index(-1)
            found = f"character {place} is {text[place]!r}"
            raise PicogptError(f"text: {found}; expected one of the model's {self.n_vocab}")
        return ids

    def save(self, folder: Path) -> None:
        """Writes nanoGPT's file of characters, `meta.pkl`, into a folder."""
        import pickle

        back = {i: character for character, i in self._characters.items()}
        meta = {"vocab_size": self.n_vocab, "itos": back, "stoi": self._characters}
        (folder / CHARACTERS_FILE).write_bytes(pickle.dumps(meta, protocol=4))


def in_characters(text: str) -> str:
    """A text in the characters that stand for its bytes."""
    return "".join(BYTE_TO_CHARACTER[byte] for byte in text.encode("utf-8", "replace"))


def _read_tokenizer(path: Path) -> tuple[dict[str, int], list[str]]:
    """Reads the vocabulary and the merges from a `tokenizer.json` of GPT-2's kind.

    Raises:
        PicogptError: it is of another kind, or damaged.
    """
    settings = read_json(path)
    try:
        model, splitting = settings["model"], settings["pre_tokenizer"] or {"type": None}
        unlike = {
            "model.type": (model.get("type", "BPE"), "BPE"),
            "pre_tokenizer.type": (splitting["type"], "ByteLevel"),
            "pre_tokenizer.add_prefix_space": (splitting.get("add_prefix_space", False), False),
            "pre_tokenizer.use_regex": (splitting.get("use_regex", True), True),
            "normalizer": (settings.get("normalizer"), None),
            "model.dropout": (model.get("dropout"), None),
            "model.continuing_subword_prefix": (model.get("continuing_subword_prefix") or "", ""),
            "model.end_of_word_suffix": (model.get("end_of_word_suffix") or "", ""),
            "model.byte_fallback": (model.get("byte_fallback", False), False),
            "model.ignore_merges": (model.get("ignore_merges", False), False),
        }
        for name, (found, wanted) in unlike.items():
            if found != wanted:
                raise PicogptError(f"{path}: {name} is {found!r:.60}; GPT-2's is {wanted!r}")
        encoder = dict(model["vocab"])
        lines = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        added = settings.get("added_tokens") or []
        _add_tokens(encoder, {token["content"]: token["id"] for token in added}, path)
    except PicogptError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        found = f"{type(error).__name__}: {error}"
        raise PicogptError(f"{path}: is no tokenizer of Hugging Face's format ({found})") from None
    return encoder, lines


def _add_tokens(encoder: dict[str, int], added: dict[str, int], path: Path) -> None:
    """Adds tokens given as text, such as special ones, in the characters that stand for bytes."""
    for text, token in added.items():
        token_text = text if text in encoder else in_characters(text)
        if (other := encoder.setdefault(token_text, token)) != token:
            raise PicogptError(f"{path}: {text!r:.40} has the ids {other} and {token}")
