"""Who sees what, in which order, on which side: pure functions of the protocol and a study's secret.

Every draw is keyed by (secret, seed, what it is for, rater, item). So a restart changes nothing, and nobody who lacks
the secret can tell which side a model is on.
"""

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from evaluation.study.protocol import Item, Protocol

Kind = Literal["first", "repeat", "gold"]
T = TypeVar("T")


@dataclass(frozen=True)
class Showing:
    """Two pictures as one rater sees them once."""

    number: int
    """From 1, in the rater's order."""
    item: Item
    swapped: bool
    """Whether the item's second picture is shown first."""
    kind: Kind

    @property
    def pictures(self) -> tuple[str, str]:
        """Files of the first and the second picture on the page."""
        one, other = self.item.pictures
        return (other, one) if self.swapped else (one, other)


class Draws:
    """Numbers keyed by a study's secret."""

    def __init__(self, secret: bytes, seed: int):
        self._key = hmac.digest(secret, json.dumps(["draws", seed]).encode(), "sha256")

    def number(self, *words: object) -> int:
        """Of 64 bits, for what the words name."""
        return int.from_bytes(hmac.digest(self._key, json.dumps(words).encode(), hashlib.sha256)[:8])

    def shuffled(self, items: Sequence[T], *words: object) -> list[T]:
        """In the order that the words and each one's place in `items` give."""
        return [items[i] for i in sorted(range(len(items)), key=lambda i: self.number(*words, i))]


def deal(keys: np.ndarray, votes: int) -> np.ndarray:
    """(items, raters) of any numbers → (items, votes) raters: for each item those with the fewest so far.

    Of equally many those with the lowest number take it. No two raters' loads then differ by more than one.
    """
    load = np.zeros(keys.shape[1], dtype=np.int64)
    dealt = np.empty((len(keys), votes), dtype=np.int64)
    for i, row in enumerate(keys):
        dealt[i] = np.lexsort((row, load))[:votes]
        load[dealt[i]] += 1
    return dealt


def make_schedule(protocol: Protocol, draws: Draws) -> list[list[Showing]]:
    """Each rater's showings, in order: (raters, each some)."""
    items = draws.shuffled(protocol.items, "deal")
    keys = [[draws.number("deal", item.id, rater) for rater in range(protocol.raters)] for item in items]
    dealt = deal(np.array(keys, dtype=np.uint64), protocol.votes_per_item)
    own: list[list[Item]] = [[] for _ in range(protocol.raters)]
    for item, raters in zip(items, dealt, strict=True):
        for rater in raters:
            own[rater].append(item)
    return [_order(rater, its, protocol, draws) for rater, its in enumerate(own)]


def _order(rater: int, items: list[Item], protocol: Protocol, draws: Draws) -> list[Showing]:
    """Repeats are of the first half, and stand somewhere in the second, with their sides swapped."""
    golds = draws.shuffled(protocol.gold, "gold", rater)[: at_least_one(protocol.gold_share, len(items))]
    first = draws.shuffled([*items, *golds], "order", rater)
    half = (len(first) + 1) // 2
    early = [item for item in draws.shuffled(first[:half], "repeat", rater) if item not in golds]
    repeats = early[: at_least_one(protocol.repeats, len(items)) if protocol.repeats else 0]
    late: list[tuple[Item, bool]] = [(item, False) for item in first[half:]] + [(item, True) for item in repeats]
    sequence = [(item, False) for item in first[:half]] + draws.shuffled(late, "late", rater)
    showings = []
    for number, (item, again) in enumerate(sequence, start=1):
        swapped = bool(draws.number("side", rater, item.id) % 2) ^ again
        kind: Kind = "repeat" if again else "gold" if item in golds else "first"
        showings.append(Showing(number, item, swapped, kind))
    return showings


def at_least_one(share: float, count: int) -> int:
    """A share of some, rounded, and never none."""
    return max(1, round(share * count))
