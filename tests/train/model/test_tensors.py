"""Files written tensor by tensor equal those of safetensors, byte for byte."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from train.model import tensors as module
from train.model.tensors import (
    HostCopies,
    assign_owners,
    bytes_of,
    free_memory,
    load_tensors,
    share_name,
    write_index,
    write_tensors,
)


def test_bytes_are_those_of_save_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "step/b.weight": torch.tensor(3.0),
        "exp_avg/b.weight": torch.randn(3, 4, 5, 6, generator=generator),
        "exp_avg/a": torch.randn(7, generator=generator),
        "empty": torch.zeros(0, 4),
        "half é": torch.randn(3, 3, generator=generator).half(),
        "bf": torch.randn(5, generator=generator).bfloat16(),
        "count": torch.arange(5),
        "flags": torch.tensor([True, False]),
        "codes": torch.arange(7, dtype=torch.uint8),
        "double": torch.randn(2, generator=generator).double(),
    }
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    # as in a run: with other strides, or views of larger tensors
    laid = {
        **tensors,
        "exp_avg/b.weight": tensors["exp_avg/b.weight"].to(memory_format=torch.channels_last),
        "exp_avg/a": torch.stack([tensors["exp_avg/a"]] * 2, dim=1)[:, 1],
    }
    sha256 = write_tensors(tmp_path / "ours", laid)
    data = (tmp_path / "ours").read_bytes()
    assert data == (tmp_path / "theirs").read_bytes()
    assert sha256 == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_parts_of_a_file_are_about_equal_and_make_it_up(count: int, tmp_path: Path) -> None:
    """Each process writes its tensors to a file, here one after the other, and all can be loaded together."""
    sizes = [5, 1, 700, 3, 0, 300, 250, 41, 8, 90, 0]
    tensors = {f"w{number:02d}": torch.arange(float(size)) for number, size in enumerate(sizes)}
    found = assign_owners(tensors, count)
    assert found.keys() == tensors.keys() and set(found.values()) <= set(range(count))
    shares = [sum(tensors[name].numel() for name in found if found[name] == rank) for rank in range(count)]
    assert max(shares) <= sum(sizes) / count + max(sizes)
    path = tmp_path / "x.safetensors"
    for rank in range(count):
        mine = [name for name in found if found[name] == rank]
        copies = HostCopies()
        taken = copies.take(path.name, tensors, mine)
        assert sorted(taken) == mine and copies.bytes == bytes_of(taken)
        hashes = {
            write_tensors(share_name(path, rank, count), source, names)
            for source, names in ((tensors, mine), (taken, mine), (taken, None))
        }
        assert len(hashes) == 1
    write_index(path, {name: share_name(path, rank, count).name for name, rank in found.items()})
    loaded = load_tensors(path)
    assert loaded.keys() == tensors.keys() and all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_copies_are_made_into_the_same_memory_again() -> None:
    copies, source = HostCopies(), {"a": torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)}
    first = copies.take("x", source, ["a"])["a"]
    source["a"] += 1
    second = copies.take("x", source, ["a"])["a"]
    assert second.data_ptr() == first.data_ptr() and second.is_contiguous() and bool((second == 1).all())
    assert copies.take("x", {"a": torch.zeros(5)}, ["a"])["a"].shape == (5,)


def test_copies_share_pieces_of_memory_so_that_rounding_each_to_a_power_of_two_costs_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PIECE_BYTES", 2**22)
    kinds = [(3, 640), (1_000, 10), (), (0,), (900, 160, 2), (64, 5, 3, 3)]
    dtypes = [torch.float32, torch.bfloat16, torch.uint8]
    source = {
        f"w{number:02d}": torch.randint(0, 99, shape).to(dtypes[number % 3]) for number, shape in enumerate(kinds * 20)
    }
    taken = HostCopies().take("x", source, source)
    assert all(torch.equal(taken[name], tensor) for name, tensor in source.items())
    pieces = {copy.untyped_storage().data_ptr(): copy.untyped_storage().nbytes() for copy in taken.values()}
    rounded = sum(2 ** max(size - 1, 0).bit_length() for size in pieces.values())
    alone = sum(2 ** (tensor.nbytes - 1).bit_length() for tensor in source.values() if tensor.nbytes)
    assert len(pieces) > 2 and rounded < 1.1 * bytes_of(source) < 1.3 * bytes_of(source) < alone


def test_memory_that_is_free_is_the_least_of_the_machines_and_the_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(module, "CGROUP", tmp_path)
    assert free_memory() == 2**63
    (tmp_path / "meminfo").write_text("MemTotal:  900 kB\nMemAvailable:    500 kB\n")
    assert free_memory() == 500 * 1024
    for name, text in {"max": "max", "current": "90000", "stat": "anon 5\ninactive_file 10000\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory() == 500 * 1024
    (tmp_path / "memory.max").write_text("100000\n")
    assert free_memory() == 20000
