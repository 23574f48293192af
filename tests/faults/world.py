"""Data of the fault tests: small models and tars, an undisturbed run, and comparison with disturbed runs."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from precompute.config import PrecomputeConfig
from precompute.input.find import choose_caption_fields, find_input
from precompute.pixels.decode import LimitsConfig
from shards.format.encoding import FILE_NAME
from shards.open import open_store
from shards.root.committed import load_receipts
from shards.root.reading import read_part
from shards.tools.verify import verify_root
from tests.fixtures import SIZES, encode_all, precompute_config
from tests.kinds import KINDS
from tests.roots import comparable
from tests.tiny import make_samples, make_tar


@dataclass(frozen=True)
class World:
    """Models, tars, and the root that an undisturbed run makes from them."""

    models: Path
    tars: Path
    """The input, which may also be of another kind."""
    reference: Path
    captions: tuple[str, ...] = ("txt",)

    def config(self, output: Path, **changes: object) -> PrecomputeConfig:
        """Return the config of a run into `output`."""
        workers = {"num_gpus": 0, "num_cpus": 1, "decode_threads": 1, "batch_size": 8}
        fields = {"workers": workers, "captions": list(self.captions)} | changes
        return precompute_config(self.models, self.tars, output, **fields)


def make_world(folder: Path, models: Path, num_shards: int, num_samples: int, kind: str = "tar") -> World:
    """Make a world below `folder`; in each tar, one sample has no valid picture and one has no caption.

    Args:
        kind: the kind of input, of `tests.kinds`. All except tars have a single unit.
    """
    for shard in range(num_shards):
        samples = make_samples(shard, num_samples, SIZES)
        samples.append((f"{shard:05d}9001", {"jpg": b"<html>", "txt": b"not a picture"}))
        samples.append((f"{shard:05d}9002", {"jpg": samples[0][1]["jpg"]}))
        if kind == "tar":
            make_tar(folder / "tars", f"{shard:05d}", samples)
        else:
            KINDS[kind](folder / "tars", samples)
    captions = choose_caption_fields(find_input(str(folder / "tars")), LimitsConfig().max_bytes)
    world = World(models, folder / "tars", folder / "reference", tuple(captions))
    encode_all(world.config(world.reference))
    return world


@dataclass
class Tally:
    """Comparison of completed disturbed runs with the undisturbed one."""

    files: int = 0
    identical: int = 0
    """Number of byte-identical files; receipts are compared without times and attempts."""
    samples: int = 0
    duplicates: int = 0
    losses: int = 0
    different: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """What `verify` says."""

    def add(self, root: Path, reference: Path) -> None:
        """Count `root`."""
        expected, found = comparable(reference), comparable(root)
        names = expected.keys() | found.keys()
        different = [name for name in names if expected.get(name) != found.get(name)]
        self.files += len(names)
        self.identical += len(names) - len(different)
        self.different += [f"{root.name}/{name}" for name in sorted(different)]
        self.wrong += list(verify_root(open_store(root)))
        wanted, got = stored_keys(reference), stored_keys(root)
        self.samples += wanted.total()
        self.duplicates += (got - wanted).total()
        self.losses += (wanted - got).total()

    def check(self) -> dict[str, object]:
        """Return the figures; fail unless everything matches."""
        assert not self.different and not self.wrong, (self.different[:10], self.wrong[:10])
        assert self.files and self.identical == self.files, self
        assert self.samples and not self.duplicates and not self.losses, self
        return {key: value for key, value in asdict(self).items() if key not in ("different", "wrong")}


def look(root: Path | str) -> None:
    """Check that everything the receipts of an interrupted run list is complete; the index may be an older one, and
    nothing else may be wrong."""
    store = open_store(root)
    if store.size(FILE_NAME) is not None:
        load_receipts(store)
        wrong = [line for line in verify_root(store) if "rebuild it with" not in line]
        assert not wrong, wrong


def stored_keys(root: Path) -> Counter[tuple[str, str]]:
    """Return (bucket, key) of every sample that a reader of the root sees."""
    keys: Counter[tuple[str, str]] = Counter()
    for receipt in load_receipts(open_store(root)):
        if receipt.samples:
            keys.update((receipt.bucket, sample["key"]) for sample in read_part(root / receipt.folder))
    return keys
