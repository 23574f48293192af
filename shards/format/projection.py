"""Projection of text latents onto their principal directions, which takes a fraction of the space of the full width.

A network that is trained from scratch reads its text through a linear layer, y = W s. If W is trained on projected
states Pᵀ s instead, then W Pᵀ computes the same output from full-width states, so the exported network is a standard
one (`train/export/fold.py`).

P holds the leading right singular vectors of the states of the *calibration captions*: the eigenvectors of Σ s sᵀ with
the largest eigenvalues. The mean is not subtracted, because a layer without a bias could not add it back. A root's
projection is computed once, by one process, so it does not depend on the number of workers.

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
from shards.format.text import TextLatents
from shards.format.towers import Projection, TextTower, encode_matrix

if TYPE_CHECKING:
    from torch import Tensor

TowerGroup = tuple[tuple[str, ...], ...]
"""Text towers that are projected with one matrix, in the form of `Projection.joint`. A tower with a projection of its
own is the group `((NAME,),)`."""
CALIBRATION_CAPTIONS = 4096
"""Number of captions after which no more are added to the calibration captions. Smaller inputs have fewer."""
MIN_UNITS = 8
"""Minimum number of units, or of parts of a root, that calibration captions are taken from, if there are that many."""
EMPTY_FRACTION = 0.1
"""Number of copies of the empty caption that are added, as a fraction of the calibration captions. Caption dropout in
training is about as frequent, and guidance relies on the empty caption."""
CAPTIONS_PER_PRODUCT = 64
"""Number of captions per matrix product. Fixed, because it affects rounding."""


def project(states: Tensor, matrix: Tensor) -> Tensor:
    """Project (…, input width) states by a float64 matrix (input width, width) on the same device.

    The states and the result are rounded to float16, and the sum is in float64, so projecting while encoding gives the
    same numbers as projecting stored float16 states later.
    """
    return (states.half().double() @ matrix).half().float()


@lru_cache(maxsize=16)
def matrix_of(projection: Projection) -> Tensor:
    """Return the matrix for `project`, on the CPU."""
    import torch

    return torch.from_numpy(projection.array.astype(np.float64))


def hash_order(names: Iterable[str]) -> list[str]:
    """Sort names by their hash: a pseudo-random order that depends only on the names."""
    return sorted(names, key=lambda name: hashlib.sha256(f"sample {name}".encode()).digest())


def captions_per_unit(num_units: int) -> int:
    """Return the maximum number of calibration captions from each of `num_units` units or parts."""
    return CALIBRATION_CAPTIONS // max(1, min(num_units, MIN_UNITS))


def towers_in(group: TowerGroup) -> list[str]:
    """Return the names of a group's towers."""
    return [name for towers in group for name in towers]


class SecondMoments:
    """Sums of s sᵀ over the states s of all tokens of the calibration captions, for one group of towers."""

    def __init__(self, group: TowerGroup, texts: Mapping[str, TextTower], device: str):
        """
        Args:
            texts: the towers' records, unprojected.
            device: the device on which the sums are accumulated.
        """
        import torch

        self.group, self.texts, self.device = group, texts, device
        sides = [sum(texts[name].width for name in towers) for towers in group]
        self.sums = [torch.zeros(side, side, dtype=torch.float64, device=device) for side in sides]

    def add(self, captions: Sequence[Mapping[str, Tensor]], weight: float = 1.0) -> None:
        """Add captions, given each tower's (tokens, width) states. `weight`: number of times that each caption is
        counted."""
        import torch

        for sums, towers in zip(self.sums, self.group, strict=True):
            for first in range(0, len(captions), CAPTIONS_PER_PRODUCT):
                some = captions[first : first + CAPTIONS_PER_PRODUCT]
                states = torch.cat([torch.cat([caption[name] for name in towers], dim=1) for caption in some])
                states = states.to(self.device).half().double()
                sums += weight * (states.T @ states)

    def projections(self, width: int, captions: int, sha256: str) -> dict[str, Projection]:
        """Return the projection onto `width` dimensions for each tower.

        The lists of a group have the same weight, regardless of the scale of their states.

        Args:
            width: number of dimensions, smaller than that of the states.
            captions: number of captions that were added.
            sha256: SHA-256 of the calibration captions' keys.

        Raises:
            RequestError: the states span fewer than `width` dimensions.
        """
        import torch

        side = max(len(sums) for sums in self.sums)
        total = torch.zeros(side, side, dtype=torch.float64)
        for sums in (sums.cpu() for sums in self.sums):
            total[: len(sums), : len(sums)] += sums / sums.trace()
        values, vectors = torch.linalg.eigh(total / len(self.sums))
        rank = int((values > values[-1] * side * np.finfo(np.float64).eps).sum())
        if rank < width:
            raise RequestError(
                f"The states of {' and '.join(towers_in(self.group))} cannot be projected onto {width} dimensions, "
                f"because those of the {captions} calibration captions span only {rank}. Set `text.width` to at most "
                f"{rank}, or provide more captions."
            )
        vectors = vectors.flip(1)[:, :width]
        largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
        matrix = (vectors * largest.sign()).numpy()  # an eigenvector's sign is arbitrary
        shares = tuple(round(max(value, 0.0), 9) for value in values.flip(0)[:width].tolist())
        found = {}
        for towers in self.group:
            begin = 0
            for name in towers:
                end = begin + self.texts[name].width
                found[name] = Projection(
                    matrix=encode_matrix(matrix[begin:end]),
                    input_width=end - begin,
                    energy_shares=shares,
                    joint=joint_of(self.group),
                    calibration_captions=captions,
                    calibration_sha256=sha256,
                )
                begin = end
        return found


def joint_of(group: TowerGroup) -> TowerGroup:
    """Return `Projection.joint` for a group: empty if it is a single tower."""
    return group if len(towers_in(group)) > 1 else ()


class ProjectionBuilder:
    """Computes projections from the states of calibration captions, which are added one after another."""

    def __init__(self, texts: Mapping[str, TextTower], groups: Mapping[TowerGroup, int], device: str = "cpu"):
        """
        Args:
            texts: the towers' records, unprojected.
            groups: group of towers → number of dimensions.
            device: the device on which sums are accumulated.
        """
        self.texts, self.groups = texts, groups
        self.moments = {group: SecondMoments(group, texts, device) for group in groups}
        self.names = sorted({name for group in groups for name in towers_in(group)})
        self.captions, self.digest = 0, hashlib.sha256()

    @property
    def is_full(self) -> bool:
        """Whether there are enough calibration captions."""
        return self.captions >= CALIBRATION_CAPTIONS

    def add(self, keys: Sequence[str], captions: Sequence[Mapping[str, TextLatents]]) -> None:
        """Add captions, given the keys that identify them and their latents by tower. Captions whose states are not
        finite are left out, because stage 1 rejects them."""
        finite = []
        for key, caption in zip(keys, captions, strict=True):
            states = self._states(caption)
            if all(bool(tensor.isfinite().all()) for tensor in states.values()):
                finite.append(states)
                self.digest.update(f"{key}\n".encode())
        self.captions += len(finite)
        for moments in self.moments.values():
            moments.add(finite)

    def _states(self, caption: Mapping[str, TextLatents]) -> dict[str, Tensor]:
        """Return the states that a network reads: without padding if it is masked."""
        found = {}
        for name in self.names:
            latents, is_masked = caption[name], self.texts[name].hides_padding
            assert latents.states is not None
            found[name] = latents.states[: latents.num_tokens if is_masked else None]
        return found

    def finish(self, empty: Mapping[str, TextLatents]) -> dict[str, Projection]:
        """Return each tower's projection. `empty`: latents of the empty caption, by tower.

        Raises:
            RequestError: no caption was added, or the states span too few dimensions.
        """
        if not self.captions:
            raise RequestError(
                "`text.width` needs captions to compute the projection, but none were found. In stage 1, check "
                "`captions` and the input; otherwise remove `text.width`."
            )
        copies = math.ceil(EMPTY_FRACTION * self.captions)
        for moments in self.moments.values():
            moments.add([self._states(empty)], copies)
        projections: dict[str, Projection] = {}
        for group, width in self.groups.items():
            counted = self.captions + copies, self.digest.hexdigest()
            projections |= self.moments[group].projections(width, *counted)
        return projections


def groups_of(
    texts: Mapping[str, TextTower], widths: Mapping[str, int], joint: TowerGroup = ()
) -> dict[TowerGroup, int]:
    """Return each group of towers to project → its number of dimensions.

    Args:
        widths: tower → number of dimensions to store. Single towers that are no wider are left out.
        joint: towers that are projected with one matrix, if they are projected.

    Raises:
        RequestError: a tower does not exist or stores no states, a width is not positive, no tower is wider than its
            width, or the towers of `joint` cannot be projected with one matrix.
    """
    groups: dict[TowerGroup, int] = {}
    if any(name in widths for name in towers_in(joint)):
        _check_towers(texts, {*widths, *towers_in(joint)})
        _check_joint(texts, widths, joint)
        groups[joint] = widths[towers_in(joint)[0]]
    _check_towers(texts, set(widths))
    groups |= {((name,),): width for name, width in widths.items() if name not in towers_in(joint)}
    sides = {group: max(sum(texts[name].input_width for name in towers) for towers in group) for group in groups}
    if wrong := [width for width in groups.values() if width < 1]:
        raise RequestError(f"`text.width` must be at least 1, but is {wrong[0]}.")
    narrower = {group: width for group, width in groups.items() if width < sides[group]}
    if groups and not narrower:
        listed = ", ".join(f"{' and '.join(towers_in(group))} {side}" for group, side in sides.items())
        raise RequestError(
            f"`text.width` {max(groups.values())} saves nothing, because no text tower's states have more dimensions "
            f"({listed}). Set a smaller `text.width`, or remove it."
        )
    return narrower


def _check_towers(texts: Mapping[str, TextTower], names: set[str]) -> None:
    having_states = [name for name, tower in texts.items() if tower.states]
    if unknown := sorted(names - set(having_states)):
        raise RequestError(
            f"Only hidden states of text towers can be projected, which are stored for "
            f"{', '.join(having_states) or 'no tower'}, but not for {' and '.join(unknown)}. Correct `text.width` or "
            f"`text.joint`."
        )


def _check_joint(texts: Mapping[str, TextTower], widths: Mapping[str, int], joint: TowerGroup) -> None:
    names = towers_in(joint)
    if len({widths.get(name) for name in names}) > 1 or len(set(names)) < len(names):
        raise RequestError(
            f"`text.joint` lists {' and '.join(names)}, which are projected with one matrix. List each tower once, and "
            f"set the same `width` for all of them."
        )
    for towers in joint:
        if len({(texts[name].length, texts[name].hides_padding) for name in towers}) > 1:
            raise RequestError(
                f"`text.joint` concatenates {' and '.join(towers)} along the width, but they differ in their number of "
                f"tokens or in masked or trimmed padding. Put towers in the same inner list only if the network "
                f"concatenates them in this way."
            )


def inherited_widths(
    texts: Mapping[str, TextTower], stored: Mapping[str, TextTower], where: str
) -> tuple[dict[str, int], TowerGroup]:
    """Return the widths, and the towers that are projected jointly, to inherit from a root.

    Args:
        texts: the towers' records.
        stored: the root's towers.
        where: the root's path or URL, for messages.

    Raises:
        RequestError: the root projects none of the towers.
    """
    projected = {name: stored[name] for name in texts if name in stored and stored[name].projection}
    if not projected:
        raise RequestError(
            f"text.projection: {where} does not project any of {', '.join(texts)}. Use a root with `text.width`."
        )
    joint = {_restricted(tower.projection.joint, texts) for tower in projected.values() if tower.projection}
    return {name: tower.width for name, tower in projected.items()}, max(joint, default=())


def _restricted(joint: TowerGroup, names: Iterable[str]) -> TowerGroup:
    """Return `joint` without the towers that are not in `names`."""
    kept = (tuple(name for name in towers if name in set(names)) for towers in joint)
    return tuple(towers for towers in kept if towers)


Root = tuple[str, Mapping[str, TextTower]]
"""Path or URL of a latents root, and its towers."""


def project_texts(
    texts: Mapping[str, TextTower],
    groups: Mapping[TowerGroup, int],
    existing: Root | None,
    like: Root | None,
    source: Root | None,
    compute: Callable[[dict[str, TextTower], dict[TowerGroup, int]], Mapping[str, Projection]],
) -> dict[str, TextTower]:
    """Return the towers' records with the requested projections: loaded from a root if one has them, otherwise
    computed.

    Args:
        groups: group of towers → number of dimensions.
        existing: the root to extend; None: it does not exist yet.
        like: the root whose projections are reused; None: none.
        source: the root to derive from; None: none.
        compute: computes projections that no root has, given the unprojected towers.

    Raises:
        RequestError: a root stores a projection that does not fit the request; the root to extend or `like` has no
            projection, or they have different ones.
    """
    to_project = {name for group in groups for name in towers_in(group)}
    changed = {name: tower.unprojected() if name in to_project else tower for name, tower in texts.items()}
    missing: dict[TowerGroup, int] = {}
    for group, width in groups.items():
        names = " and ".join(towers_in(group))
        own, reused, stored = (
            stored_projections(group, width, texts, root, is_extended=root is existing) if root else {}
            for root in (existing, like, source)
        )
        if existing and not own:
            raise RequestError(
                f"{existing[0]} already stores full-width states of {names}, and the encoding of a root cannot change. "
                f"Remove `text.width`, or derive a projected root: `python -m shards derive {existing[0]} NEW "
                f"--text.width {width}`."
            )
        if like and not reused:
            raise RequestError(
                f"text.projection: {like[0]} does not project {names}. Use a root that does, or remove its `width`."
            )
        if existing and like and own != reused:
            raise RequestError(
                f"text.projection: {like[0]} has a different projection of {names} than {existing[0]}, and the "
                f"encoding of a root cannot change. Remove `text.projection`, or write to a new root."
            )
        if found := own or reused or stored:
            changed |= {name: changed[name].with_projection(projection) for name, projection in found.items()}
        else:
            missing[group] = width
    if missing:
        changed |= {name: changed[name].with_projection(made) for name, made in compute(changed, missing).items()}
    return changed


def stored_projections(
    group: TowerGroup, width: int, texts: Mapping[str, TextTower], root: Root, is_extended: bool
) -> dict[str, Projection]:
    """Return the projections that a root stores for the towers of a group, reduced to `width` dimensions, or an empty
    dict if it stores full-width states.

    Args:
        texts: the towers' records.
        is_extended: whether this is the root to extend, whose widths cannot change.

    Raises:
        RequestError: the root projects only some of the towers, or a different encoder's states, or onto fewer
            dimensions, or with different towers.
    """
    where, stored = root
    names = towers_in(group)
    found = {name: stored[name].projection for name in names if name in stored and stored[name].projection}
    if not found:
        return {}
    if len(found) < len(names):
        raise RequestError(
            f"{where} projects {' and '.join(found)}, but {' and '.join(names)} need a joint projection. Use a root "
            f"that projects all of them."
        )
    projections = {}
    for name, projection in found.items():
        assert projection is not None
        tower, joint = stored[name], _restricted(projection.joint, texts)
        if joint_of(joint) != joint_of(group):
            old, new = ([list(towers) for towers in joint_of(which)] for which in (joint, group))
            raise RequestError(
                f"{where} projects {name} with `text.joint: {old}`, but {new} is requested. Set `text.joint` to {old}, "
                f"or use a different root."
            )
        if _states_identity(tower) != _states_identity(texts[name]):
            raise RequestError(
                f"{where} has a projection of {name} that was computed for a different encoder or layer. Use a root "
                f"with the same encoder and layer."
            )
        if is_extended and width != tower.width:
            raise RequestError(
                f"{where} stores {name} in {tower.width} dimensions, but {width} are requested, and the encoding of a "
                f"root cannot change. Set `text.width` to {tower.width}, or write to a new root."
            )
        if width > tower.width:
            raise RequestError(
                f"{where} keeps only {tower.width} dimensions of {name}, so {width} are not available. Set "
                f"`text.width` to at most {tower.width}, or do not use this root's projection."
            )
        projections[name] = projection.first(width)
    return projections


def _states_identity(tower: TextTower) -> tuple[object, ...]:
    return tower.class_name, tower.weights.sha256, tower.layer, tower.input_width
