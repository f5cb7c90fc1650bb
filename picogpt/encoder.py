"""Text to token ids and back: GPT-2's byte-level byte-pair encoding.

Text is cut into pieces by a pattern, each piece becomes its UTF-8 bytes, and the bytes are joined
pair by pair, always the pair that was learnt first. To store bytes in text files, GPT-2 writes each
of the 256 as a printable character ("Ġ" is the blank); tokens are written in these characters.

Source: openai/gpt-2, src/encoder.py; Sennrich et al., 2016 (the pair encoding).
"""

import heapq
import operator
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from .errors import PicogptError, find_files, read_json, read_text

END_OF_TEXT = "<|endoftext|>"
VOCABULARY_FILES = ("encoder.json or vocab.json", "vocab.bpe or merges.txt")

# Cuts text into pieces; no token reaches from one into the next. Written for the package `regex`:
# the standard library's `re` has no \p{L} (letters) and \p{N} (numbers).
PIECES = (
    r"'s|'t|'re|'ve|'m|'ll|'d"  # the ends of contractions, in lower case only
    r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"  # letters, numbers or others, and one blank before
    r"|\s+(?!\S)|\s+"  # white space, but its last blank goes with what follows
)


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


class Encoder:
    """GPT-2's tokenizer, exact for every string.

    Attributes:
        encoder: token to id; a token is written in the characters that stand for its bytes.
        decoder: id to token.
        n_vocab: number of tokens; ids run from 0 to n_vocab - 1.
        end_of_text: id of `<|endoftext|>`, or None where the vocabulary lacks it.

    >>> Encoder.gpt2().encode("Not all heroes wear capes.")
    [3673, 477, 10281, 5806, 1451, 274, 13]
    """

    def __init__(self, encoder: dict[str, int], merges: Iterable[str]) -> None:
        """Takes the vocabulary, and the pairs to join as "left right", the first learnt first.

        Raises:
            PicogptError: the two do not fit each other.
        """
        import regex

        if not all(type(i) is int for i in encoder.values()):
            raise PicogptError("an id is no integer; expected 0, 1, 2 and so on")
        self.encoder = encoder
        self.decoder = {i: token for token, i in encoder.items()}
        self.n_vocab = len(encoder)
        self.end_of_text = encoder.get(END_OF_TEXT)
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._check()
        self._pieces = regex.compile(PIECES).findall
        self._encode_piece = lru_cache(maxsize=1 << 16)(self._join)

    def _check(self) -> None:
        for i in range(self.n_vocab):
            if i not in self.decoder:
                found = f"no token has the id {i}"
                raise PicogptError(f"{found}; expected 0 to {self.n_vocab - 1}, once each")
        for byte, character in BYTE_TO_CHARACTER.items():
            if character not in self.encoder:
                raise PicogptError(f"no token for the byte {byte:#04x}; expected {character!r}")
        if strange := set("".join(self.encoder)) - CHARACTER_TO_BYTE.keys():
            raise PicogptError(f"a token holds {min(strange)!r}; expected what stands for bytes")
        for pair, rank in self._ranks.items():
            if pair.count(" ") != 1 or pair.replace(" ", "") not in self.encoder:
                found = f"merge {rank + 1} is {pair!r}"
                raise PicogptError(f"{found}; expected two tokens that join to a third")

    @classmethod
    def from_folder(cls, path: str | Path) -> "Encoder":
        """Reads `encoder.json` and `vocab.bpe` (OpenAI's names) or `vocab.json` and `merges.txt`.

        Raises:
            PicogptError: a file is missing or damaged, or the two do not fit each other.
        """
        vocabulary, merges = find_files(Path(path).absolute(), *VOCABULARY_FILES)
        encoder = read_json(vocabulary)
        lines = read_text(merges).splitlines()
        if lines and lines[0].startswith("#version"):
            del lines[0]
        try:
            return cls(encoder, lines)
        except PicogptError as error:
            files = f"{vocabulary} and {merges.name}"
            raise PicogptError(f"{files}: {error}; fetch both again") from None

    @classmethod
    def gpt2(cls) -> "Encoder":
        """The vocabulary of the official GPT-2 models, 50,257 tokens, which comes with picogpt."""
        from importlib import resources

        folder = resources.files("picogpt").joinpath("vocabulary")
        with resources.as_file(folder) as path:
            return cls.from_folder(path)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Returns the ids of text.

        Args:
            text: any string; the halves of surrogate pairs are joined, lone ones become U+FFFD.
            allow_special: read `<|endoftext|>` as the special token, not as ordinary text.

        >>> Encoder.gpt2().encode("a<|endoftext|>b", allow_special=True)
        [64, 50256, 65]
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        special = allow_special and self.end_of_text is not None
        for i, part in enumerate(text.split(END_OF_TEXT) if special else [text]):
            if i:
                ids.append(self.encoder[END_OF_TEXT])
            for piece in self._pieces(part):
                ids += self._encode_piece(piece)
        return ids

    def _join(self, piece: str) -> tuple[int, ...]:
        """Encodes one piece, in time n log n for n bytes.

        The heap holds the pairs that can be joined, by rank, then from left to right. An entry is
        out of date, and passed over, when the pair at its place has another rank by now.
        """
        tokens = [BYTE_TO_CHARACTER[byte] for byte in piece.encode("utf-8")]
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

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes that ids stand for; a token may end inside a character.

        Raises:
            PicogptError: an id is no integer or out of range.
        """
        tokens = (self.decoder[token] for token in check_ids(ids, self.n_vocab))
        return bytes(CHARACTER_TO_BYTE[character] for token in tokens for character in token)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
            PicogptError: an id is no integer or out of range.

        >>> Encoder.gpt2().decode([88, 318, 5633])
        'y is ?'
        """
        return self.decode_bytes(ids).decode("utf-8", "replace")
