"""Assignment of items to raters, with the items' order and sides, as pure functions of the protocol and the secret.

Every random draw is keyed by the secret, the seed, its purpose, and the rater and item that it is for. A restart
therefore changes nothing, and nobody without the secret can tell which side a model is on.
"""

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from evaluation.study.protocol import Item, Protocol, Study

Kind = Literal["first", "repeat", "gold"]
T = TypeVar("T")


@dataclass(frozen=True)
class Showing:
    """A trial: one presentation of an item to one rater."""

    number: int
    """Position in the rater's order, counting from 1."""
    item: Item
    swapped: bool
    """Whether the item's second image is shown first."""
    kind: Kind

    @property
    def pictures(self) -> tuple[str, str]:
        """File names of the first and second image on the page."""
        one, other = self.item.pictures
        return (other, one) if self.swapped else (one, other)


class KeyedDraws:
    """Random numbers keyed by a study's secret."""

    def __init__(self, secret: bytes, seed: int):
        self._key = hmac.digest(secret, json.dumps(["draws", seed]).encode(), "sha256")

    def number(self, *key: object) -> int:
        """Return the random 64-bit number that belongs to this key."""
        return int.from_bytes(hmac.digest(self._key, json.dumps(key).encode(), hashlib.sha256)[:8])

    def shuffled(self, items: Sequence[T], *key: object) -> list[T]:
        """Return the items in the random order that belongs to this key."""
        return [items[i] for i in sorted(range(len(items)), key=lambda i: self.number(*key, i))]


def assign_raters(keys: np.ndarray, votes: int) -> np.ndarray:
    """Assign `votes` raters to each item, preferring those with the fewest items so far.

    Among raters with equally many items, those with the lowest keys are chosen. Any two raters' item counts differ by
    at most one.

    Args:
        keys: (items, raters) random numbers.

    Returns:
        (items, votes) indices of raters.
    """
    load = np.zeros(keys.shape[1], dtype=np.int64)
    assigned = np.empty((len(keys), votes), dtype=np.int64)
    for i, row in enumerate(keys):
        assigned[i] = np.lexsort((row, load))[:votes]
        load[assigned[i]] += 1
    return assigned


def make_schedule(study: Study) -> list[list[Showing]]:
    """Return each rater's trials, in the order in which they are shown."""
    protocol, draws = study.protocol, KeyedDraws(study.secret, study.protocol.config.seed)
    items = draws.shuffled(protocol.items, "deal")
    keys = [[draws.number("deal", item.id, rater) for rater in range(protocol.config.raters)] for item in items]
    assigned = assign_raters(np.array(keys, dtype=np.uint64), protocol.config.votes_per_item)
    own: list[list[Item]] = [[] for _ in range(protocol.config.raters)]
    for item, raters in zip(items, assigned, strict=True):
        for rater in raters:
            own[rater].append(item)
    return [_order(rater, items, protocol, draws) for rater, items in enumerate(own)]


def _order(rater: int, items: list[Item], protocol: Protocol, draws: KeyedDraws) -> list[Showing]:
    """Order a rater's items and gold items, and add the repeats.

    Repeats are items from the first half that are shown again in the second half, with their sides swapped.
    """
    golds = draws.shuffled(protocol.gold, "gold", rater)[: at_least_one(protocol.config.gold.share, len(items))]
    first = draws.shuffled([*items, *golds], "order", rater)
    half = (len(first) + 1) // 2
    early = [item for item in draws.shuffled(first[:half], "repeat", rater) if item not in golds]
    repeats = early[: at_least_one(protocol.config.repeats, len(items)) if protocol.config.repeats else 0]
    late: list[tuple[Item, bool]] = [(item, False) for item in first[half:]] + [(item, True) for item in repeats]
    sequence = [(item, False) for item in first[:half]] + draws.shuffled(late, "late", rater)
    showings = []
    for number, (item, is_repeat) in enumerate(sequence, start=1):
        swapped = bool(draws.number("side", rater, item.id) % 2) ^ is_repeat
        kind: Kind = "repeat" if is_repeat else "gold" if item in golds else "first"
        showings.append(Showing(number, item, swapped, kind))
    return showings


def at_least_one(share: float, count: int) -> int:
    """Return `share` of `count`, rounded to an integer, but at least 1."""
    return max(1, round(share * count))
