"""How well a model foresees a text: log-probabilities of its tokens, and what is made of them.

A text longer than the model's window is read in windows that overlap; each token is scored once, in
the first window that holds it. Sources: transformers' guide "Perplexity of fixed-length models";
Radford et al., 2019, sections 3.1 (invertible de-tokenizers aside) and 3.3 (LAMBADA).
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from .backend import array_module, new_cache, to_numpy
from .encoder import END_OF_TEXT, Encoder, check_ids, with_whole_characters
from .errors import PicogptError
from .generation import CHUNK, check_finite, check_head
from .model import gpt2

BATCH_TOKENS = 1024  # of windows side by side; more would not be faster, and their caches are large

Progress = Callable[[list[Any]], Iterable[Any]]


class Score(NamedTuple):
    """How well a model foresees a text, or several.

    Attributes:
        n_tokens: scored, so without the start token.
        nll: negative log-likelihood of all of them, in nats.
        n_words: between white space.
        n_bytes: of the text in UTF-8.
        start_token: whether the end of text stands in front, so that the first one is scored.
        window: tokens that the model sees at once.
        stride: tokens between the starts of windows.
        n_texts: how many texts it is the score of.
        n_right: texts whose last word is foreseen, if nothing else is scored; else None.

    >>> from picogpt import load, score
    >>> encoder, hparams, params = load("tales")
    >>> scores = [score(text, encoder, params, hparams["n_head"]) for text in ("a king", "a cat")]
    >>> both = scores[0] + scores[1]
    >>> both.n_texts, both.n_tokens, both.n_bytes
    (2, 4, 11)
    """

    n_tokens: int
    nll: float
    n_words: int
    n_bytes: int
    start_token: bool
    window: int
    stride: int
    n_texts: int = 1
    n_right: int | None = None

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-likelihood of a token."""
        return _perplexity(self.nll, self.n_tokens)

    @property
    def word_perplexity(self) -> float:
        """The same for a word; nan where there is none."""
        return _perplexity(self.nll, self.n_words)

    @property
    def byte_perplexity(self) -> float:
        """The same for a byte."""
        return _perplexity(self.nll, self.n_bytes)

    @property
    def bits_per_byte(self) -> float:
        """The negative log-likelihood in bits, for each byte of the text."""
        return self.nll / math.log(2) / self.n_bytes

    @property
    def accuracy(self) -> float | None:
        """The share of texts whose last word is foreseen."""
        return None if self.n_right is None else self.n_right / self.n_texts

    def __add__(self, other: "Score") -> "Score":  # type: ignore[override]
        """The score of both texts together."""
        return self._replace(
            n_tokens=self.n_tokens + other.n_tokens,
            nll=self.nll + other.nll,
            n_words=self.n_words + other.n_words,
            n_bytes=self.n_bytes + other.n_bytes,
            n_texts=self.n_texts + other.n_texts,
            n_right=None if self.n_right is None else self.n_right + (other.n_right or 0),
        )


def _perplexity(nll: float, n: int) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(nll / n)) if n else math.nan


class Scored(NamedTuple):
    """What the model says of each token of a text."""

    logprobs: np.ndarray  # [n_seq], float64, in nats; nan for the first, which nothing predicts
    is_best: np.ndarray  # [n_seq], whether the token is the likeliest at its place


def token_logprobs(
    ids: Iterable[int], params: dict[str, Any], n_head: int, *, stride: int | None = None
) -> np.ndarray:
    """Returns the logarithm of the probability that the model gives to each id.

    Args:
        ids: of a text of any length.
        params: the parameter tree of `load`.
        n_head: number of attention heads, `hparams["n_head"]`.
        stride: tokens from the start of a window of n_ctx ids to the start of the next, 1 to
            n_ctx - 1. Ids beyond the first window have at least n_ctx - stride before them. None:
            n_ctx // 2.

    Returns:
        float64 [n_seq], in nats. The first one is nan, since nothing predicts it.

    Raises:
        PicogptError: an id or the stride is out of range.

    >>> from picogpt import load, token_logprobs
    >>> encoder, hparams, params = load("tales")
    >>> ids = encoder.encode("Once upon a time")
    >>> token_logprobs(ids, params, hparams["n_head"]).round(2)
    array([  nan, -1.18, -0.14, -0.03])
    """
    return next(score_ids([ids], params, n_head, stride=stride)).logprobs


def score(
    text: str,
    encoder: Encoder,
    params: dict[str, Any],
    n_head: int,
    *,
    start_token: bool = True,
    stride: int | None = None,
) -> Score:
    """Returns how well the model foresees a text: perplexity, bits per byte and so on.

    Args:
        text: of any length.
        encoder, params, n_head, stride: as for `token_logprobs`.
        start_token: put the end of text in front, so that the first token is scored too.

    Returns:
        A named tuple of n_tokens, nll (nats) and others, with perplexity, word_perplexity,
        byte_perplexity and bits_per_byte.

    Raises:
        PicogptError: there is no token to score, or the stride is out of range.

    >>> from picogpt import load, score
    >>> encoder, hparams, params = load("tales")
    >>> result = score("Once upon a time", encoder, params, hparams["n_head"])
    >>> result.n_tokens, round(result.bits_per_byte, 2)
    (4, 0.84)
    """
    scores = score_texts([text], encoder, params, n_head, start_token=start_token, stride=stride)
    return next(scores)[0]


def score_texts(
    texts: list[str],
    encoder: Encoder,
    params: dict[str, Any],
    n_head: int,
    *,
    start_token: bool = True,
    stride: int | None = None,
    only_last_word: bool = False,
    names: list[str] | None = None,
    progress: Progress = iter,
) -> Iterator[tuple[Score, np.ndarray, Scored]]:
    """Yields the score of each text, its ids, and what the model says of each of them.

    Args:
        texts, encoder, params, n_head, start_token, stride: as for `score`.
        only_last_word: score nothing else, and tell whether all its tokens are the likeliest ones,
            as in LAMBADA. The blank, or other white space, right before a word is part of it. Of
            what comes before that, no more counts than fits the window.
        names: of the texts, for messages.
        progress: is given the list of all batches of windows, and passes them on.

    Raises:
        PicogptError: at the first text, as `score` does.
    """
    n_ctx = len(params["wpe"])
    if start_token and encoder.end_of_text is None:
        raise PicogptError(f"the vocabulary has no {END_OF_TEXT}; score without a start token")
    start = [encoder.end_of_text] if start_token and encoder.end_of_text is not None else []
    all_ids, scored_texts, n_scored = [], [], []
    for i, text in enumerate(texts):
        text = with_whole_characters(text)
        before, word = "", text
        if only_last_word:
            text = text.rstrip()
            at = max((blank.start() for blank in re.finditer(r"\s", text)), default=0)
            before, word = text[:at], text[at:]
        context = np.array(start + encoder.encode(before), np.int32)
        ids = np.concatenate([context, np.array(encoder.encode(word), np.int32)])
        n = len(ids) - (len(context) if only_last_word else 1)
        most = n_ctx - 1 if only_last_word else len(ids) - 1
        if not 1 <= n <= most:
            n_found, least = len(ids) - len(context), 2 - len(start)
            expected = f"{least} to {most}" if n > most > 0 else f"{least} or more"
            what = "last word" if only_last_word else "text"
            name = f"{names[i]}: " if names else ""
            raise PicogptError(
                f"{name}{what} {word!r:.40}: is {n_found} tokens; expected {expected}"
            )
        all_ids.append(ids[-n_ctx:] if only_last_word else ids)
        scored_texts.append(word)
        n_scored.append(n)
    found = score_ids(all_ids, params, n_head, stride=stride, progress=progress)
    for text, array, n, scored in zip(scored_texts, all_ids, n_scored, found, strict=True):
        result = Score(
            n_tokens=n,
            nll=-float(scored.logprobs[-n:].sum()),
            n_words=sum(1 for _ in re.finditer(r"\S+", text)),
            n_bytes=len(text.encode("utf-8")),
            start_token=start_token,
            window=n_ctx,
            stride=n_ctx // 2 if stride is None else stride,
            n_right=int(scored.is_best[-n:].all()) if only_last_word else None,
        )
        yield result, array, scored


def score_ids(
    texts: Iterable[Iterable[int]],
    params: dict[str, Any],
    n_head: int,
    *,
    stride: int | None = None,
    progress: Progress = iter,
) -> Iterator[Scored]:
    """Yields what the model says of the tokens of each text, of which several run side by side.

    Args:
        texts: ids of each.
        params, n_head, stride: as for `token_logprobs`.
        progress: is given the list of all batches of windows, and passes them on.

    Raises:
        PicogptError: at the first text, if an id or the stride is out of range.
    """
    n_vocab, n_ctx, n_head = len(params["wte"]), len(params["wpe"]), check_head(params, n_head)
    step = n_ctx // 2 if stride is None else stride
    if not isinstance(step, Integral) or isinstance(step, bool) or not 1 <= step < n_ctx:
        raise PicogptError(f"stride: is {step!r:.40}; expected 1 to {n_ctx - 1}")
    arrays = [_checked(ids, n_vocab) for ids in texts]
    found = [Scored(np.full(len(ids), np.nan), np.zeros(len(ids), bool)) for ids in arrays]
    n_left = [0] * len(arrays)
    batches: list[list[_Window]] = [[]]
    for text, ids in enumerate(arrays):
        for start, first, end in _windows(len(ids), n_ctx, step):
            longest = max(w.end - w.start for w in [*batches[-1], _Window(text, start, first, end)])
            if longest * (len(batches[-1]) + 1) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(_Window(text, start, first, end))
            n_left[text] += 1
    done = 0
    for batch in progress([batch for batch in batches if batch]):
        _score_batch(batch, arrays, found, params, n_head)
        for window in batch:
            n_left[window.text] -= 1
        while done < len(found) and not n_left[done]:
            yield found[done]
            done += 1
    yield from found[done:]


class _Window(NamedTuple):
    text: int  # which one
    start: int  # where in the text the window begins
    first: int  # and the tokens that it scores
    end: int  # and both end


def _windows(n_seq: int, n_ctx: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yields start, first scored and end of each window over a text of n_seq tokens."""
    start, first = 0, 1
    while first < n_seq:
        end = min(start + n_ctx, n_seq)
        yield start, first, end
        start, first = start + stride, end


def _score_batch(
    batch: list[_Window],
    texts: list[np.ndarray],
    found: list[Scored],
    params: dict[str, Any],
    n_head: int,
) -> None:
    """Scores windows side by side, padded on the left, and notes the results in `found`.

    The last token of a window is predicted only, never fed. Some tokens are computed at a time,
    and their logits forgotten: those of a whole window can have 200 MB.
    """
    n_seq = max(window.end - window.start for window in batch) - 1
    n_pad = np.array([n_seq + 1 - (window.end - window.start) for window in batch])
    padded = np.zeros((len(batch), n_seq + 1), np.int32)
    for row, window in enumerate(batch):
        padded[row, n_pad[row] :] = texts[window.text][window.start : window.end]
    firsts = n_pad + [window.first - window.start - 1 for window in batch]  # whose logits count
    logprobs, is_best = np.empty((len(batch), n_seq)), np.empty((len(batch), n_seq), bool)
    cache = new_cache(params, n_head, n_rows=len(batch), n_ctx=n_seq)
    step = max(1, CHUNK // len(batch))
    for at in range(0, n_seq, step):
        ids, targets = padded[:, at : at + step], padded[:, at + 1 : at + step + 1]
        ids = ids[:, : targets.shape[1]]
        is_needed = firsts.min() < at + step
        logits = gpt2(ids, **params, n_head=n_head, n_pad=n_pad, cache=cache, last=not is_needed)
        if is_needed:
            places = slice(at, at + targets.shape[1])
            xp = array_module(logits)
            targets = xp.asarray(targets)
            logprobs[:, places] = to_numpy(_log_softmax_at(logits, targets))
            is_best[:, places] = to_numpy(logits.argmax(axis=-1) == targets)
            check_finite(logprobs[:, places])
    for row, window in enumerate(batch):
        place = slice(window.first, window.end)
        found[window.text].logprobs[place] = logprobs[row, firsts[row] :]
        found[window.text].is_best[place] = is_best[row, firsts[row] :]


def lm_loss(params: dict[str, Any], ids: Any, n_head: int) -> Any:
    """Returns the mean cross-entropy of each next token, in nats: what training makes less.

    Args:
        params: a parameter tree, of any library; gradients by it are taken in the usual ways.
        ids: [n_seq] or [batch, n_seq], at most n_ctx + 1 in a row; the first is not predicted.
        n_head: number of attention heads, `hparams["n_head"]`; a constant for compilers.

    Returns:
        A scalar of the library and type of params.

    >>> from picogpt import lm_loss, load
    >>> encoder, hparams, params = load("tales")
    >>> round(float(lm_loss(params, encoder.encode("Once upon a time"), hparams["n_head"])), 2)
    0.45
    """
    xp = array_module(params["wte"])
    ids = xp.asarray(ids)
    logits = gpt2(ids[..., :-1], **params, n_head=n_head)
    return -_log_softmax_at(logits, ids[..., 1:]).mean()


def _log_softmax_at(logits: Any, targets: Any) -> Any:
    """The log-probabilities of targets [...], by logits [..., n_vocab]."""
    xp = array_module(logits)
    logits = logits - logits.max(axis=-1, keepdims=True)
    chosen = xp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return chosen - xp.log(xp.exp(logits).sum(axis=-1))


def _checked(ids: Iterable[int], n_vocab: int) -> np.ndarray:
    """Ids as an array, each from 0 to n_vocab - 1."""
    if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu" and len(ids):
        is_right = ids.min() >= 0 and ids.max() < n_vocab  # all at once, since texts can be long
        if is_right:
            return ids
    return np.array(check_ids(ids, n_vocab), np.int32)
