"""From logits to new tokens: how one is picked, and the loop that feeds it back.

There is one loop, for any number of rows at once; `generate` and `stream` run it on one row. It
owns the cache, so each step computes nothing but the new tokens.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np

from .backend import compiled, is_compiled, keep_rows, new_cache, to_numpy
from .encoder import check_ids
from .errors import PicogptError
from .lookahead import Lookahead
from .model import gpt2

MAX_FLOAT = sys.float_info.max
CHUNK = 128  # tokens of prompts computed at once, so that intermediate results stay in fast memory


class Step(NamedTuple):
    """A new token."""

    row: int
    token: int
    logits: np.ndarray  # [n_vocab], as the model gave them, before all options


class Generated(list[int]):
    """New ids; with log-probabilities, if they are asked for.

    Attributes:
        logprobs: of each id, in nats, as the model gives it, before temperature and other options.
        top_logprobs: at each id's place, the likeliest ids and theirs, the likeliest first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []

    def add(self, step: Step, n_top: int | None) -> None:
        """Appends a new id, with its log-probability and those of the n_top likeliest, or none."""
        self.append(step.token)
        if n_top is None:
            return
        logits = step.logits.astype(np.float64)
        logprobs = logits - logits.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        best = np.argsort(-logprobs, kind="stable")[:n_top]
        self.logprobs.append(float(logprobs[step.token]))
        self.top_logprobs.append([(int(token), float(logprobs[token])) for token in best])


def generate(
    inputs: Iterable[int],
    params: dict[str, Any],
    n_head: int,
    n_tokens_to_generate: int,
    *,
    temperature: float | None = None,
    top_k: int | None = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop_ids: Iterable[int] = (),
    overflow: str = "error",
    lookahead: int = 0,
    logprobs: int | None = None,
) -> Generated:
    """Returns new ids, each picked from the logits that the model gives for all ids before it.

    Args:
        inputs: ids of the prompt, at least one.
        params: the parameter tree of `load`.
        n_head: number of attention heads, `hparams["n_head"]`.
        n_tokens_to_generate: how many ids, at most. The last one is never fed to the model, so the
            prompt and all but one of these must fit its window of n_ctx.
        temperature: divides the logits; 0 is greedy: the likeliest id, the lowest among equals.
            None is 0, but 1 where top_k, top_p or seed is given.
        top_k: picks among that many likeliest ids, lower ids first among equals; 0 or None: all.
        top_p: picks among the fewest likeliest ids whose probabilities sum up to it, at least one.
            Probabilities are those that temperature and top_k leave.
        repetition_penalty: divides positive logits of ids that the text has already, multiplies
            negative ones. Comes before the temperature.
        seed: the same seed gives the same ids; None gives other ones each time.
        stop_ids: ids that end the text; the one met is not returned.
        overflow: what to do beyond the window: "error", or "slide": keep the newest n_ctx // 2
            ids, count their positions from 0, and go on.
        lookahead: guess up to so many ids by what followed the same ids before, as long as that
            proves worth it, and check them in one pass. Greedy only, one prompt only. The ids are
            the same, unless the two best logits are as good as equal; text that repeats itself
            takes less time.
        logprobs: give the result, a list, two more attributes: `logprobs`, and `top_logprobs` with
            so many of the likeliest ids at each place; 0 for the chosen ones only.

    Raises:
        PicogptError: an argument is out of range, the window is too short, or the logits are not
            finite.

    >>> from picogpt import generate, load
    >>> encoder, hparams, params = load("tales")
    >>> ids = encoder.encode("Once upon a")
    >>> encoder.decode(generate(ids, params, hparams["n_head"], 1))
    ' time'
    """
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "seed": seed,
        "stop_ids": stop_ids,
        "overflow": overflow,
        "lookahead": lookahead,
        "logprobs": logprobs,
    }
    return generate_batch([inputs], params, n_head, n_tokens_to_generate, **options)[0]


def stream(
    inputs: Iterable[int],
    params: dict[str, Any],
    n_head: int,
    n_tokens_to_generate: int,
    **options: Any,
) -> Iterator[int]:
    """Yields the ids that `generate` returns, each as soon as it is known.

    Args:
        inputs, params, n_head, n_tokens_to_generate, options: as for `generate`; all but logprobs.

    Raises:
        PicogptError: as `generate` does; at once, not at the first id, for the arguments.

    >>> from picogpt import load, stream
    >>> encoder, hparams, params = load("tales")
    >>> ids = encoder.encode("There was once a poor")
    >>> for token in stream(ids, params, hparams["n_head"], 3):
    ...     print(repr(encoder.decode([token])))
    ' old'
    ' woman'
    ','
    """
    steps = stream_batch([inputs], params, n_head, n_tokens_to_generate, **options)
    return (step.token for step in steps)


def generate_batch(
    prompts: Iterable[Iterable[int]],
    params: dict[str, Any],
    n_head: int,
    n_tokens_to_generate: int,
    *,
    logprobs: int | None = None,
    **options: Any,
) -> list[Generated]:
    """Returns for each prompt the ids that `generate` returns, computed side by side.

    Prompts may differ in length. With a seed, row i has its own random numbers, whatever the
    other rows are; row 0 has those of `generate`.

    Args:
        prompts: a list of ids each.
        params, n_head, n_tokens_to_generate, logprobs, options: as for `generate`.

    Raises:
        PicogptError: as `generate` does.

    >>> from picogpt import generate_batch, load
    >>> encoder, hparams, params = load("tales")
    >>> prompts = [encoder.encode(text) for text in ("Once upon a", "There was once a poor")]
    >>> [encoder.decode(row) for row in generate_batch(prompts, params, hparams["n_head"], 2)]
    [' time there', ' old woman']
    """
    n_top = logprobs if logprobs is None else _whole("logprobs", logprobs)
    prompts = list(prompts)
    rows = [Generated() for _ in prompts]
    for step in stream_batch(prompts, params, n_head, n_tokens_to_generate, **options):
        rows[step.row].add(step, n_top)
    return rows


def generate_many(
    prompts: Sequence[list[int]],
    params: dict[str, Any],
    n_head: int,
    n_tokens_to_generate: int,
    *,
    batch_size: int = 32,
    first: int = 0,
    ends: Callable[[int, int], bool] = lambda index, token: False,
    logprobs: int | None = None,
    **options: Any,
) -> Iterator[Generated]:
    """Yields for each of many prompts, in order, the ids that `generate` returns.

    They run in batches of prompts of about the same length, chosen among the next few hundred.

    Args:
        prompts: a list of ids each.
        params, n_head, n_tokens_to_generate, logprobs, options: as for `generate`.
        batch_size: prompts side by side.
        first: number of the first prompt; with a seed, each number has its own random numbers.
        ends: given a prompt's place and its new id, whether that is its last.

    Raises:
        PicogptError: as `generate` does.
    """
    span = 8 * batch_size
    for start in range(0, len(prompts), span):
        places = range(start, min(start + span, len(prompts)))
        by_length = sorted(places, key=lambda place: len(prompts[place]))
        found: dict[int, Generated] = {}
        following = start
        for at in range(0, len(by_length), batch_size):
            batch = by_length[at : at + batch_size]
            done: set[int] = set()
            found |= {place: Generated() for place in batch}
            for step in stream_batch(
                [prompts[place] for place in batch],
                params,
                n_head,
                n_tokens_to_generate,
                done=done,
                numbers=[first + place for place in batch],
                **options,
            ):
                place = batch[step.row]
                found[place].add(step, logprobs)
                if ends(place, step.token):
                    done.add(step.row)
            while following in found:
                yield found.pop(following)
                following += 1


def next_tokens(
    inputs: Iterable[int], params: dict[str, Any], n_head: int, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids that may come next and their probabilities, the likeliest first.

    Args:
        inputs, params, n_head: as for `generate`.
        options: temperature, top_k, top_p and repetition_penalty, as for `generate`; but without
            them the temperature is 1.

    Returns:
        ids [n], probabilities [n], which sum to 1; n is n_vocab, unless an option leaves less.

    Raises:
        PicogptError: as `generate` does.

    >>> from picogpt import load, next_tokens
    >>> encoder, hparams, params = load("tales")
    >>> ids, probabilities = next_tokens(encoder.encode("Once upon a"), params, hparams["n_head"])
    >>> encoder.decode(ids[:2]), probabilities[:2].round(2)
    (' time day', array([0.97, 0.01]))
    """
    picking = _Options(**options).checked()
    ids = window_ids(inputs, params)
    logits, _, _ = _prefill([ids], params, check_head(params, n_head), 1)
    return _distribution(check_finite(to_numpy(logits)[0, -1]), picking, set(ids))


def check_head(params: dict[str, Any], n_head: Any) -> int:
    """Returns the number of heads, a divisor of n_embd, as Python's own.

    Raises:
        PicogptError: it is none.
    """
    n_embd, n = params["wpe"].shape[1], _whole("n_head", n_head)
    if not n or n_embd % n:
        raise PicogptError(f"n_head: is {n}; expected a divisor of n_embd={n_embd}")
    return n


def check_finite(logits: np.ndarray) -> np.ndarray:
    """Returns logits, or what was made of them.

    Raises:
        PicogptError: they are not finite, as with damaged weights.
    """
    if not np.isfinite(logits).all():
        raise PicogptError("logits: nan or infinite; the weights are damaged")
    return logits


def window_ids(inputs: Iterable[int], params: dict[str, Any]) -> list[int]:
    """Returns ids that the model can take at once, as a list.

    Raises:
        PicogptError: there are none or too many, or one is out of range.
    """
    ids, n_ctx = check_ids(inputs, len(params["wte"])), len(params["wpe"])
    if not 1 <= len(ids) <= n_ctx:
        raise PicogptError(f"text is {len(ids)} tokens; the model's window takes 1 to {n_ctx}")
    return ids


def stream_batch(
    prompts: Iterable[Iterable[int]],
    params: dict[str, Any],
    n_head: int,
    n_tokens_to_generate: int,
    *,
    done: set[int] | None = None,
    numbers: list[int] | None = None,
    **options: Any,
) -> Iterator[Step]:
    """Yields a step for each id that `generate_batch` returns, as soon as it is known.

    Args:
        done: rows to end. The caller may add one at any time; the loop adds those it ends.
        numbers: of the rows, for their random numbers; None: 0, 1, 2 and so on.
    """
    n_vocab, n_ctx = len(params["wte"]), len(params["wpe"])
    picking = _Options(**options).checked()
    stops = set(check_ids(picking.stop_ids, n_vocab))
    n_tokens = _whole("n_tokens_to_generate", n_tokens_to_generate)
    n_head = check_head(params, n_head)
    windows = [check_ids(prompt, n_vocab) for prompt in prompts]
    if picking.lookahead and (len(windows) > 1 or not picking.is_greedy()):
        raise PicogptError("lookahead: works for one prompt, without sampling; leave it at 0")
    for ids in windows:
        if not ids:
            raise PicogptError("prompt is 0 tokens; expected one at least, such as end of text")
        if n_tokens and len(ids) + n_tokens - 1 > n_ctx and picking.overflow == "error":
            raise PicogptError(
                f"prompt is {len(ids)} tokens and {n_tokens} more are asked for; "
                f"the model's window of {n_ctx} leaves room for {max(0, n_ctx + 1 - len(ids))}"
            )
    done = set() if done is None else done
    numbers = list(range(len(windows))) if numbers is None else numbers
    rngs = [None if picking.is_greedy() else picking.random_numbers(n) for n in numbers]
    return _decode(windows, params, n_head, n_tokens, picking, rngs, stops, done)


def _decode(
    windows: list[list[int]],
    params: dict[str, Any],
    n_head: int,
    n_tokens: int,
    options: "_Options",
    rngs: list["np.random.Generator | None"],
    stops: set[int],
    done: set[int],
) -> Iterator[Step]:
    wte, n_ctx = params["wte"], len(params["wpe"])
    forward = compiled(_forward, wte)
    rows = list(range(len(windows)))  # those of the batch, ended ones dropped unless that compiles
    seen = [set(ids) for ids in windows]
    windows = [_slide(ids, n_ctx) for ids in windows]
    ahead = Lookahead(options.lookahead, windows[0]) if options.lookahead and windows else None
    cache, n_pad = None, np.zeros(len(rows), int)
    while n_tokens:
        going = [i for i, row in enumerate(rows) if row not in done]
        if not going:
            return
        if len(going) < len(rows) and not is_compiled(wte):
            rows, n_pad = [rows[i] for i in going], n_pad[going]
            if cache is not None:
                keep_rows(cache, going)
        if cache is not None and int(cache["n_past"]) == cache["blocks"][0]["k"].shape[-2]:
            cache = None  # a longer row has ended, and its neighbours' padding takes up the room
        guess: list[int] = []
        if cache is None:
            logits, cache, n_pad = _prefill(
                [windows[row] for row in rows], params, n_head, n_tokens
            )
        else:
            if ahead:
                guess = ahead.guess(min(n_tokens - 1, n_ctx - len(windows[0])))
            new = np.array([windows[row][-1:] + guess for row in rows])
            logits, cache = forward(params, new, n_head, n_pad, cache, last=not guess)
        n_new = 1
        for row, row_logits in zip(rows, to_numpy(logits), strict=True):
            for n_new, token_logits in enumerate(row_logits, 1):
                if row in done:
                    break
                token = _pick(token_logits, options, seen[row], rngs[row])
                if token in stops:
                    done.add(row)
                    break
                yield Step(row, token, token_logits)
                seen[row].add(token)
                windows[row].append(token)
                if ahead:
                    ahead.add(token)
                if guess[n_new - 1 : n_new] != [token]:
                    break
            if len(windows[row]) > n_ctx:
                windows[row] = _slide(windows[row], n_ctx)
                cache = None  # positions have changed, so all rows start again
                if ahead:
                    ahead.restart(windows[row])
        n_tokens -= n_new
        if ahead:
            ahead.learn(len(guess), n_new - 1)
        if cache is not None and guess:
            cache["n_past"] -= len(guess) + 1 - n_new  # what follows overwrites wrong guesses


def _slide(ids: list[int], n_ctx: int) -> list[int]:
    """The ids that the window keeps: all, or where they are too many, the newest n_ctx // 2."""
    return ids if len(ids) <= n_ctx else ids[-max(1, n_ctx // 2) :]


def _prefill(
    windows: list[list[int]], params: dict[str, Any], n_head: int, n_left: int
) -> tuple[Any, dict[str, Any], np.ndarray]:
    """Computes rows from their beginnings, padded on the left, some tokens at a time.

    The cache has room for n_left new tokens, the last of which is never fed, but not for more: its
    pages would be cleared and kept for nothing. Where functions are compiled, all shapes are as
    few as can be: all at once, padded to a power of two, with room for the padding.

    Returns the logits after the last tokens [n_rows, 1, n_vocab], the cache, and the number of
    padding tokens of each row.
    """
    n_ctx, n_seq = len(params["wpe"]), max(map(len, windows))
    room, step = min(n_ctx, n_seq + n_left - 1), max(1, CHUNK // len(windows))
    if is_compiled(params["wte"]):
        n_seq = step = 1 << (n_seq - 1).bit_length()
        room = 2 * n_ctx
    n_pad = np.array([n_seq - len(ids) for ids in windows])
    padded = np.array([[0] * (n_seq - len(ids)) + ids for ids in windows])
    forward = compiled(_forward, params["wte"])
    cache = new_cache(params, n_head, n_rows=len(windows), n_ctx=room)
    for start in range(0, n_seq, step):
        ids = padded[:, start : start + step]
        logits, cache = forward(params, ids, n_head, n_pad, cache)
    return logits, cache, n_pad


def _forward(
    params: dict[str, Any],
    ids: Any,
    n_head: int,
    n_pad: Any,
    cache: dict[str, Any],
    last: bool = True,
) -> tuple[Any, dict[str, Any]]:
    """Logits after the last or all ids, and the cache: in and out, as what is compiled needs it."""
    logits = gpt2(ids, **params, n_head=n_head, n_pad=n_pad, cache=cache, last=last)
    return logits, cache


def _whole(name: str, value: Any) -> int:
    """A whole number as Python's own, since NumPy's small ones overflow in silence."""
    if not isinstance(value, Integral) or value < 0:
        raise PicogptError(f"{name}: is {value!r:.40}; expected a whole number, 0 or more")
    return int(value)


def _real(name: str, value: Any, low: float, high: float, expected: str) -> float:
    is_real = isinstance(value, Real)
    if not is_real or not low <= value <= high:
        raise PicogptError(f"{name}: is {value!r:.40}; expected a number{expected}")
    return float(value)


class _Options(NamedTuple):
    """The options of `generate`."""

    temperature: float | None = None
    top_k: int | None = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_ids: Iterable[int] = ()
    overflow: str = "error"
    lookahead: int = 0

    def checked(self) -> "_Options":
        t, s = self.temperature, self.seed
        if self.overflow not in ("error", "slide"):
            raise PicogptError(f"overflow: is {self.overflow!r:.40}; expected error or slide")
        return self._replace(
            temperature=t if t is None else _real("temperature", t, 0, MAX_FLOAT, ", 0 or more"),
            top_k=_whole("top_k", self.top_k or 0),
            top_p=_real("top_p", self.top_p, 0, 1, " from 0 to 1"),
            repetition_penalty=_real(
                "repetition_penalty", self.repetition_penalty, 0.01, 100, " from 0.01 to 100"
            ),
            seed=s if s is None else _whole("seed", s),
            lookahead=_whole("lookahead", self.lookahead),
        )

    def is_greedy(self) -> bool:
        if self.temperature is None:
            return not self.top_k and self.top_p == 1 and self.seed is None
        return self.temperature == 0

    def random_numbers(self, row: int) -> "np.random.Generator":
        return np.random.default_rng(None if self.seed is None else [self.seed, row])


def _distribution(
    logits: np.ndarray, options: "_Options", seen: set[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The ids that may be picked by their logits [n_vocab], and their probabilities, sorted."""
    logits = _penalize(logits, options.repetition_penalty, seen)
    temperature = 1.0 if options.temperature is None else options.temperature
    if temperature == 0:
        return np.array([logits.argmax()]), np.ones(1)
    ids, probabilities = _candidates(logits, temperature, options.top_k, options.top_p)
    order = np.argsort(-probabilities, kind="stable")
    return ids[order], probabilities[order] / probabilities.sum()


def _pick(
    logits: np.ndarray, options: _Options, seen: set[int], rng: "np.random.Generator | None"
) -> int:
    """Picks an id by its logit [n_vocab]: with one random number, or the best if there are none."""
    check_finite(logits.max())
    logits = _penalize(logits, options.repetition_penalty, seen)
    if rng is None:
        return int(logits.argmax())
    temperature = 1.0 if options.temperature is None else options.temperature
    ids, probabilities = _candidates(logits, temperature, options.top_k, options.top_p)
    cumulative = probabilities.cumsum()
    at = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
    return int(ids[min(at, len(ids) - 1)])


def _penalize(logits: np.ndarray, penalty: float, seen: set[int]) -> np.ndarray:
    if penalty == 1:
        return logits
    said, logits = list(seen), logits.copy()
    logits[said] = np.where(logits[said] < 0, logits[said] * penalty, logits[said] / penalty)
    return logits


def _candidates(
    logits: np.ndarray, temperature: float, top_k: int | None, top_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """The ids that may be picked, and what is left of their probabilities, in proportion."""
    ids = np.arange(len(logits))
    if top_k and top_k < len(ids):
        least = np.partition(logits, -top_k)[-top_k]
        better, equal = (logits > least).nonzero()[0], (logits == least).nonzero()[0]
        ids = np.concatenate([better, equal])[:top_k]
    scores = logits[ids].astype(np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature leaves the best ids alone, at exp(0)
        probabilities = np.exp((scores - scores.max()) / temperature)
    probabilities /= probabilities.sum()
    if top_p < 1:
        # All ids below this make up less than 1 - top_p together; only the others need sorting.
        likely = (probabilities >= (1 - top_p) / len(ids)).nonzero()[0]
        likely = likely[np.argsort(-probabilities[likely], kind="stable")]
        n_kept = 1 + np.searchsorted(probabilities[likely].cumsum(), top_p)
        ids, probabilities = ids[likely[:n_kept]], probabilities[likely[:n_kept]]
    return ids, probabilities
