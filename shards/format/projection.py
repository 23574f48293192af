"""Projection of text latents onto their principal directions, which takes a fraction of the space of whole states.

A network that is trained from scratch reads its text through a linear layer, y = W s. If W is trained on projected
states Pᵀ s instead, then (W Pᵀ) s is the same layer for whole states, so the exported network is an ordinary one
(`train/export/fold.py`).

P holds the leading right singular vectors of the states of a sample of captions: the eigenvectors of Σ s sᵀ with the
largest eigenvalues. The mean is not subtracted, because a layer without a bias could not add it back.

torch is imported inside the functions that need it, so that reading a config or a root does not require this slow
import.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from shards.base.errors import RequestError
from shards.format.text import TextLatents, kept_states
from shards.format.towers import Projection, TextTower, encode_matrix

if TYPE_CHECKING:
    from torch import Tensor

Rows = tuple[tuple[str, ...], ...]
"""Text towers that share a projection; see `Projection.together`."""
SAMPLE_SIZE = 4096
"""Number of captions from which a projection is computed, if there are so many."""
CAPTIONS_PER_UNIT = SAMPLE_SIZE // 8
"""Maximum number of captions that one unit, or one part, contributes to the sample."""
EMPTY_SHARE = 0.1
"""Number of copies of the empty caption in the sample, as a share of the other captions. Training drops about as many
captions, and guidance relies on the empty caption."""
AT_ONCE = 64
"""Number of captions whose states are multiplied together. It is fixed, because it affects rounding."""


def project(states: Tensor, matrix: Tensor) -> Tensor:
    """Project (…, input width) states by a float64 matrix (input width, width) on the same device.

    The states and the result are rounded to float16, and the sum is in float64, so that states that are projected when
    they are encoded equal stored float16 states that are projected later.
    """
    return (states.half().double() @ matrix).half().float()


@lru_cache(maxsize=16)
def matrix_of(projection: Projection) -> Tensor:
    """Return the matrix for `project`, on the CPU."""
    import torch

    return torch.from_numpy(projection.array.astype(np.float64))


def sample_order(names: Iterable[str]) -> list[str]:
    """Return names in a random order that depends on nothing but the names."""
    return sorted(names, key=lambda name: hashlib.sha256(f"sample {name}".encode()).digest())


class Energy:
    """Sums of s sᵀ over the states s of all tokens in a sample of captions, for towers that share a projection."""

    def __init__(self, rows: Rows, texts: dict[str, TextTower], device: str = "cpu"):
        """
        Args:
            rows: the towers; see `Projection.together`. A tower with its own projection is a single row.
            texts: the towers' records, unprojected.
            device: the device that adds.
        """
        import torch

        self.rows, self.texts, self.device = rows, texts, device
        sides = [sum(texts[name].width for name in row) for row in rows]
        self.sums = [torch.zeros(side, side, dtype=torch.float64, device=device) for side in sides]

    def add(self, captions: Sequence[dict[str, Tensor]], weight: float = 1.0) -> None:
        """Add captions, given each tower's (tokens, width) states. `weight`: number of times that each caption is
        counted."""
        import torch

        for place, row in enumerate(self.rows):
            for first in range(0, len(captions), AT_ONCE):
                group = captions[first : first + AT_ONCE]
                states = torch.cat([torch.cat([caption[name] for name in row], dim=1) for caption in group])
                states = states.to(self.device).half().double()
                self.sums[place] += weight * (states.T @ states)

    def projections(self, width: int, captions: int, sample_sha256: str) -> dict[str, Projection]:
        """Return the projection onto `width` dimensions for each tower.

        Rows that share the projection count equally, however large their states are.

        Args:
            width: number of dimensions, smaller than that of the states.
            captions: number of captions that were added.
            sample_sha256: SHA-256 of the keys of these captions.

        Raises:
            RequestError: the states of the sample span fewer than `width` dimensions.
        """
        import torch

        side = max(len(sums) for sums in self.sums)
        total = torch.zeros(side, side, dtype=torch.float64)
        for sums in (sums.cpu() for sums in self.sums):
            total[: len(sums), : len(sums)] += sums / sums.trace()
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the number of threads affects rounding
        try:
            values, vectors = torch.linalg.eigh(total / len(self.sums))
        finally:
            torch.set_num_threads(threads)
        rank = int((values > values[-1] * side * np.finfo(np.float64).eps).sum())
        if rank < width:
            names = " and ".join(name for row in self.rows for name in row)
            raise RequestError(
                f"The states of {names} cannot be projected onto {width} dimensions, because the {captions} captions "
                f"of the sample span only {rank}. Set `text.width` to at most {rank}, or start from a larger input."
            )
        vectors = vectors.flip(1)[:, :width]
        largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
        matrix = (vectors * largest.sign()).numpy()  # an eigenvector's sign is arbitrary
        energies = tuple(round(max(value, 0.0), 9) for value in values.flip(0)[:width].tolist())
        together = self.rows if sum(map(len, self.rows)) > 1 else ()
        found = {}
        for row in self.rows:
            begin = 0
            for name in row:
                end = begin + self.texts[name].width
                found[name] = Projection(
                    matrix=encode_matrix(matrix[begin:end]),
                    input_width=end - begin,
                    energies=energies,
                    together=together,
                    captions=captions,
                    sample_sha256=sample_sha256,
                )
                begin = end
        return found


class Learner:
    """Computes projections from the states of a sample of captions, which are added one after another."""

    def __init__(self, texts: dict[str, TextTower], groups: Mapping[Rows, int], device: str = "cpu"):
        """
        Args:
            texts: the towers' records, unprojected.
            groups: towers that share a projection → number of dimensions.
            device: the device that adds.
        """
        self.texts, self.groups = texts, groups
        self.energies = {rows: Energy(rows, texts, device) for rows in groups}
        self.names = sorted({name for rows in groups for row in rows for name in row})
        self.captions, self.digest = 0, hashlib.sha256()

    @property
    def is_full(self) -> bool:
        """Whether the sample is large enough."""
        return self.captions >= SAMPLE_SIZE

    def add(self, keys: Sequence[str], captions: Sequence[Mapping[str, TextLatents]]) -> None:
        """Add captions to the sample, given their samples' keys and their latents by tower."""
        self.captions += len(captions)
        for key in keys:
            self.digest.update(f"{key}\n".encode())
        self._add(captions)

    def _add(self, captions: Sequence[Mapping[str, TextLatents]], weight: float = 1.0) -> None:
        states = [{name: kept_states(caption[name], self.texts[name]) for name in self.names} for caption in captions]
        for energy in self.energies.values():
            energy.add(states, weight)

    def finish(self, empty: Mapping[str, TextLatents]) -> dict[str, Projection]:
        """Return each tower's projection. `empty`: latents of the empty caption, by tower.

        Raises:
            RequestError: no caption was added, or the sample spans too few dimensions.
        """
        if not self.captions:
            raise RequestError(
                "No captions were found from which to compute the projection that `text.width` requests. Check "
                "`captions`, or remove `text.width`."
            )
        copies = math.ceil(EMPTY_SHARE * self.captions)
        self._add([empty], copies)
        projections: dict[str, Projection] = {}
        for rows, width in self.groups.items():
            sample = self.captions + copies, self.digest.hexdigest()
            projections |= self.energies[rows].projections(width, *sample)
        return projections


def groups_of(texts: Mapping[str, TextTower], widths: Mapping[str, int], together: Rows = ()) -> dict[Rows, int]:
    """Group the towers to project by the projection that they share.

    Args:
        widths: tower → number of dimensions to store.
        together: towers that share one projection; see `Projection.together`.

    Raises:
        RequestError: a tower does not exist or stores no states, or towers that share a projection have different
            widths.
    """
    shared = [name for row in together for name in row]
    if unknown := sorted({*widths, *shared} - {name for name, tower in texts.items() if tower.states}):
        raise RequestError(
            f"Only the hidden states of text towers can be projected, and there are none of {' or '.join(unknown)}. "
            f"Correct `width` or `together`."
        )
    groups: dict[Rows, int] = {}
    if any(name in widths for name in shared):
        wanted = {widths.get(name) for name in shared}
        if len(wanted) > 1 or len(set(shared)) < len(shared):
            raise RequestError(
                f"`text.together` lists {' and '.join(shared)}, which share one projection, so each must be listed "
                f"once and have the same `width`."
            )
        groups[together] = widths[shared[0]]
    groups |= {((name,),): width for name, width in widths.items() if name not in shared}
    for rows, width in groups.items():
        side = max(sum(texts[name].input_width for name in row) for row in rows)
        if not 1 <= width < side:
            raise RequestError(
                f"The hidden states of {names_in(rows)} have {side} dimensions, so they cannot be projected onto "
                f"{width}. Set `text.width` to a smaller number, or only the `width` of some towers."
            )
    return groups


def names_in(rows: Rows) -> str:
    """Name the towers that share a projection, for messages."""
    return " and ".join(name for row in rows for name in row)


def widths_like(texts: Mapping[str, TextTower], stored: Mapping[str, TextTower]) -> tuple[dict[str, int], Rows]:
    """Return the widths, and the towers that share a projection, of a root whose projections are to be used.

    Args:
        texts: the towers' records.
        stored: the root's towers.
    """
    projected = {name: stored[name] for name in texts if name in stored and stored[name].projection}
    together = {tower.projection.together for tower in projected.values() if tower.projection}
    return {name: tower.width for name, tower in projected.items()}, max(together, default=())


def project_texts(
    texts: Mapping[str, TextTower],
    groups: Mapping[Rows, int],
    own: tuple[str, Mapping[str, TextTower]] | None,
    roots: Mapping[str, Mapping[str, TextTower]],
    learn: Callable[[dict[str, TextTower], dict[Rows, int]], Mapping[str, Projection]],
) -> dict[str, TextTower]:
    """Return the towers' records with the requested projections: those that a root stores, or else new ones.

    Args:
        groups: towers that share a projection → number of dimensions.
        own: path or URL of the root to extend, and its towers; None: the root does not exist yet.
        roots: path or URL of any other root whose projections may be used → its towers. The first that has one is used.
        learn: computes projections that no root has, given the unprojected towers.

    Raises:
        RequestError: a root stores a projection that does not fit the request, or the root to extend has none.
    """
    whole = {name for rows in groups for row in rows for name in row}
    changed = {name: tower.unprojected() if name in whole else tower for name, tower in texts.items()}
    missing = dict(groups)
    for where, stored in [*([own] if own else []), *roots.items()]:
        for rows, width in [*missing.items()]:
            if found := stored_projections(rows, width, texts, stored, where):
                changed |= {name: changed[name].projected(projection) for name, projection in found.items()}
                del missing[rows]
        if own and missing:
            raise RequestError(
                f"{own[0]} stores the whole states of {' and '.join(map(names_in, missing))}, so they cannot be "
                f"projected now. Leave out the width, or derive a new root with `python -m shards derive --text.width`."
            )
    if missing:
        changed |= {name: changed[name].projected(made) for name, made in learn(changed, missing).items()}
    return changed


def stored_projections(
    rows: Rows, width: int, texts: Mapping[str, TextTower], stored: Mapping[str, TextTower], where: str
) -> dict[str, Projection]:
    """Return the projections that a root stores for the towers in `rows`, reduced to `width` dimensions, or nothing if
    it stores them whole.

    Args:
        texts: the towers' records.
        stored: the root's towers.
        where: the root's path or URL, for messages.

    Raises:
        RequestError: the root projects a different encoder's states, or onto fewer dimensions, or with different
            towers.
    """
    together = rows if sum(map(len, rows)) > 1 else ()
    found = {}
    for name in (name for row in rows for name in row):
        if name not in stored or (projection := stored[name].projection) is None:
            continue
        if projection.together != together:
            shown = [[list(row) for row in shared] or "unset" for shared in (projection.together, together)]
            raise RequestError(
                f"{where} stores states of {name} that were projected with `text.together` {shown[0]}, but it is "
                f"{shown[1]} now. Use the same setting."
            )
        if _projected_states(stored[name]) != _projected_states(texts[name]):
            raise RequestError(
                f"The projection of {name} in {where} is for the states of a different encoder or layer. Use a root "
                f"with the same text encoder."
            )
        if width > stored[name].width:
            raise RequestError(
                f"{where} stores the states of {name} in {stored[name].width} dimensions, so they are not available "
                f"in {width}. Set `text.width` to at most {stored[name].width}."
            )
        found[name] = projection.first(width)
    return found


def _projected_states(tower: TextTower) -> tuple[object, ...]:
    return tower.class_name, tower.weights.sha256, tower.layer, tower.input_width
