"""Guessing what comes next by what came before, so that several tokens are checked in one pass.

Text repeats itself: names, phrases, whole loops. What followed the last three tokens the last time
is a guess at what follows now, and one pass of the model tells how far it is right. A pass over 16
tokens takes about as long as three or four over one, since each reads all the weights once.

Source: Saxena, "Prompt Lookup Decoding" (2023).
"""

N_GRAM = 3  # tokens that must have come before
LENGTHS = (7, 15, 31, 63)  # of guesses; with the token before them, products of a good size
EARNED = 0.03  # of a step, by each plain step: what guesses that fail may cost, on the whole
FIRST = 2.0  # steps that the first guesses may cost


def cost(n: int) -> float:
    """What a pass over n tokens takes, in steps of one token (for 124M, measured)."""
    return 1.0 if n == 1 else 2.0 + 0.09 * n


class Lookahead:
    """Guesses for one text, as long as they have been worth it so far."""

    def __init__(self, most: int, ids: list[int]) -> None:
        """Takes the most tokens of a guess, and the text so far."""
        self.lengths = [n for n in LENGTHS if n <= most] or [most]
        self.credit = FIRST  # steps that may be lost
        self.right, self.wrong = 3.0, 0.3  # guessed tokens, and ends of guesses, lately
        self.restart(ids)

    def restart(self, ids: list[int]) -> None:
        """Forgets the text, and takes another."""
        self.ids: list[int] = []
        self.ends: dict[tuple[int, ...], int] = {}  # where each n-gram ended last, and before that
        self.before: int | None = None
        for token in ids:
            self.add(token)

    def add(self, token: int) -> None:
        """Takes the next token of the text."""
        self.ids.append(token)
        n_gram = tuple(self.ids[-N_GRAM:])
        self.before = self.ends.get(n_gram) if len(n_gram) == N_GRAM else None
        self.ends[n_gram] = len(self.ids)

    def guess(self, room: int) -> list[int]:
        """Returns as many of the tokens that may come next as are worth a pass, at most `room`.

        Where what followed the last time is not enough, it goes on as a loop.
        """
        if self.before is None:
            return []
        p = self.right / (self.right + self.wrong)
        affordable = [n for n in self.lengths if cost(n + 1) - 1 <= self.credit]
        worth = {n: (1 + sum(p**i for i in range(1, n + 1))) / cost(n + 1) for n in affordable}
        n = max(worth, key=worth.__getitem__, default=0)
        if not worth or worth[n] < 1:
            return []
        followed = self.ids[self.before :]
        return [followed[i % len(followed)] for i in range(min(n, room))]

    def learn(self, n_guessed: int, n_right: int) -> None:
        """Takes the outcome of a pass: the first n_right of n_guessed tokens were right."""
        self.credit = min(self.credit + EARNED + n_right + 1 - cost(n_guessed + 1), 4 * FIRST)
        if n_guessed:
            self.right = 0.8 * self.right + n_right
            self.wrong = 0.8 * self.wrong + (n_right < n_guessed)
