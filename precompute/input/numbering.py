"""Divide an input into numbered units, so that files added later only create new units.

    ROOT/inputs/00000.json      units 0 to 11, from the files that the first job found
    ROOT/inputs/00001.json      units 12 to 14, from files that were added before a later job

Each file is created at most once, so concurrent jobs agree on the units. Tars need no numbering, because each of them
is a unit with its own name.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import NamedTuple
from urllib.parse import quote, unquote

import pyarrow as pa

from precompute.input.listing import Listing
from precompute.input.unit import Policy, RawSample, Unit, escaped, unreadable
from shards.base.durable import check_version, parse_sealed_json, sealed_json
from shards.base.errors import DamagedInput, RequestError
from shards.base.store import Store
from shards.base.table import counted

FOLDER, VERSION = "inputs", 1
UNITS_INSPECTED = 10
UNIT_SAMPLES = 1000
"""Number of samples at which a unit is complete."""


class Member(NamedTuple):
    """A piece of an input that is never divided: a tar, an image file, a row group, or an MDS file."""

    name: str
    bytes: int
    samples: int = 1
    """Number of samples, or 0 if it is unknown."""


READ_ERRORS = (pa.ArrowException, ValueError, LookupError, OverflowError, OSError)
"""Exceptions that damaged bytes cause. An OSError with a number comes from the storage instead."""


@dataclass(frozen=True)
class NumberedUnit(Unit):
    """A group of members."""

    store: Store
    members: tuple[Member, ...]

    @abstractmethod
    def read(self, member: Member, max_bytes: int) -> Iterator[RawSample]:
        """Yield the samples of one member. May raise any of READ_ERRORS if it is damaged or missing."""

    def _samples(self, max_bytes: int, policy: Policy) -> Iterator[RawSample]:
        seen: set[str] = set()
        for member in self.members:
            done, name = 0, escaped(member.name)
            try:
                for sample in self.read(member, max_bytes):
                    done += 1
                    if sample.key not in seen:
                        seen.add(sample.key)
                        yield sample
                        continue
                    if policy == "reject":
                        raise DamagedInput(
                            f"{self.store.where(name)} has the key {sample.key!r}, which occurs twice in unit "
                            f"{self.name}. Make keys unique (the column `key` or `__key__` contains them), or set "
                            f"tars.policy to salvage, which keeps the first sample with each key."
                        )
                    yield RawSample(f"{name}/{done - 1}", lost=f"the key {sample.key!r} occurs twice")
                if done != member.samples:
                    raise ValueError(f"there are {done} samples instead of {member.samples}")
            except READ_ERRORS as error:
                if isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileNotFoundError):
                    raise
                reason = f"{self.store.where(name)} is damaged or missing: {' '.join(str(error).split())}"
                if policy == "reject":
                    raise DamagedInput(
                        f"{reason}. Restore this file, or set tars.policy to salvage, which records lost samples."
                    ) from error
                yield from (RawSample(f"{name}/{row}", lost=reason) for row in range(done, member.samples))


@dataclass(frozen=True)
class Found:
    """Contents of an input, all of one kind."""

    kind: str
    """Description of the kind, such as `webdataset tars`."""
    listing: Listing
    members: list[Member]
    make: Callable[[str, tuple[Member, ...]], Unit]
    """Function that makes a unit from its name and members."""
    is_numbered: bool = True
    """Whether units are numbered by the root; otherwise, each member is a unit with the member's name."""
    boundary: Callable[[Member], str] = lambda member: ""
    """All members of a unit have the same value, for example the same file, in which keys are unique."""
    notes: tuple[str, ...] = ()
    """Notes for the user about the input, such as files that are ignored."""
    again: Callable[[], "Found"] | None = None
    """Function that lists the input again."""

    def describe(self, num_units: int, captions: Sequence[str]) -> str:
        """Describe the input for the start of a job, with a line for each note."""
        samples = sum(member.samples for member in self.members)
        size = ", ".join([counted(num_units, "unit")] + ([counted(samples, "sample")] if samples else []))
        lines = [f"Input: {self.listing.given}, {self.kind} ({size}). Captions: {', '.join(captions)}."]
        lines += [f"note: {note}" for note in self.notes]
        if linked := self.listing.linked_folders:
            lines.append(
                f"note: symbolic links to folders are not followed ({len(linked):,}, such as {escaped(linked[0])})."
            )
        return "\n".join(lines)

    def heads(self, max_bytes: int) -> Iterator[RawSample]:
        """Yield the first intact samples, of several units if necessary, to inspect their fields. Raises RequestError
        if a unit is missing, or this user may not read it."""
        for unit in islice(self.units(), UNITS_INSPECTED):
            try:
                yield from unit.head(max_bytes)
            except (FileNotFoundError, PermissionError) as error:
                raise unreadable(error.filename or unit.address, error) from error

    def units(self, store: Store | None = None, is_final: bool = True) -> list[Unit]:
        """Return all units, in order. Unless the request is still being checked (`is_final` is false), the root at
        `store` records them.

        Raises RequestError if the root was created from a different input, or a member has a different size than when
        it was numbered, because it would never be encoded again.
        """
        found, files = self, (store.files(FOLDER) if store else [])
        if store is not None:
            self._check_root(store, files)
        if not self.is_numbered:
            return [self.make(member.name, (member,)) for member in self.members]
        while True:
            units = read_units(store, files, self._origin) if store else []
            known = {member.name: member for unit in units for member in unit}
            if found.again is not None and known.keys() - {member.name for member in found.members}:
                found = found.again()  # another job has listed newer files
            found._refuse_changed(known)
            fresh = list(found._grouped([member for member in found.members if member.name not in known]))
            if not fresh or store is None or not is_final or _record(store, len(files), self._origin, fresh):
                return [found.make(f"{i:05d}", tuple(members)) for i, members in enumerate([*units, *fresh])]
            # another job was faster, or the reply to an earlier request of this job was lost
            files = store.files(FOLDER)

    @property
    def _origin(self) -> dict[str, str]:
        return {"kind": self.kind, "address": self.listing.address}

    def _check_root(self, store: Store, files: Sequence[str]) -> None:
        if self.is_numbered != bool(files) and store.files("tars"):
            raise RequestError(
                f"{store.where()} was created from {'numbered units' if files else 'tars'}, and its units would have "
                f"the same names as those of {self.kind} in {self.listing.address}. Choose a new `output`."
            )

    def _refuse_changed(self, known: dict[str, Member]) -> None:
        changed = [m.name for m in self.members if m.name in known and m[1:] != known[m.name][1:]]
        if changed:
            raise RequestError(
                f"{counted(len(changed), 'file')} in {self.listing.address} had a different size when the root was "
                f"created, such as {changed[0]!r}, so the latents would not match. Restore these files, give them new "
                f"names, or choose a new `output`."
            )

    def _grouped(self, members: Sequence[Member]) -> Iterator[list[Member]]:
        for _, group in groupby(members, self.boundary):
            unit: list[Member] = []
            samples = 0
            for member in group:
                unit.append(member)
                samples += member.samples
                if samples >= UNIT_SAMPLES:
                    yield unit
                    unit, samples = [], 0
            if unit:
                yield unit


def read_units(store: Store, files: Sequence[str], origin: dict[str, str]) -> list[list[Member]]:
    """Return the members of the units in a root's files, in order. Raises RequestError if they are not from the input
    that `origin` describes, and DamagedFile if a file was changed."""
    units: list[list[Member]] = []
    for name in files:
        where = store.where(f"{FOLDER}/{name}")
        fields = parse_sealed_json(store.read(f"{FOLDER}/{name}"), where)
        check_version(fields.get("version"), VERSION, where)
        if (theirs := fields["origin"]) != origin:
            raise RequestError(
                f"{store.where()} was created from {theirs['kind']} in {theirs['address']}, not from {origin['kind']} "
                f"in {origin['address']}. Choose a new `output`, or make the input available at its old address."
            )
        units += [
            [Member(unquote(name, errors="surrogateescape"), *rest) for name, *rest in unit] for unit in fields["units"]
        ]
    return units


def _record(store: Store, number: int, origin: dict[str, str], units: list[list[Member]]) -> bool:
    """Record new units in the file with this number, and return whether this call created it."""
    quoted = [[[quote(name, "/ ", errors="surrogateescape"), *rest] for name, *rest in unit] for unit in units]
    data = sealed_json({"version": VERSION, "origin": origin, "units": quoted})
    return store.create(f"{FOLDER}/{number:05d}.json", data)
