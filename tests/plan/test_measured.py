"""A plan uses only benchmark files of its own kind of GPU."""

import json
from pathlib import Path

import pytest

from plan.measured import read_rates
from shards.base.errors import RequestError


@pytest.mark.parametrize(
    ("kind", "own", "others"),
    [
        ("A10", ["NVIDIA A10"], ["NVIDIA A10G", "NVIDIA A100-SXM4-80GB", "NVIDIA A100"]),
        ("A10G", ["NVIDIA A10G"], ["NVIDIA A10"]),
        (
            "A100",
            ["NVIDIA A100", "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "A100-SXM-80GB"],
            ["NVIDIA A10", "NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A100X", "GRID A100-4C"],
        ),
        ("A100-SXM4-40GB", ["NVIDIA A100-SXM4-40GB"], ["NVIDIA A100-SXM4-80GB", "NVIDIA A100"]),
        (
            "H100",
            ["NVIDIA H100", "NVIDIA H100 80GB HBM3"],
            ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GH100"],
        ),
        ("H100 PCIe", ["NVIDIA H100 PCIe"], ["NVIDIA H100 80GB HBM3"]),
        ("h20", ["NVIDIA H20"], ["NVIDIA H200"]),
        ("H200", ["NVIDIA H200"], ["NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA H200 NVL"]),
        ("GH200", ["NVIDIA GH200 480GB", "NVIDIA GH200 144G HBM3e"], ["NVIDIA H200"]),
        ("RTX 6000 Ada", ["NVIDIA RTX 6000 Ada Generation"], ["Quadro RTX 6000", "NVIDIA RTX A6000"]),
        (
            "RTX 6000",
            ["Quadro RTX 6000"],
            ["NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX PRO 6000 Blackwell Server Edition", "NVIDIA RTX A6000"],
        ),
        ("RTX 4090", ["NVIDIA GeForce RTX 4090"], ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D"]),
        ("V100", ["Tesla V100-SXM2-32GB"], ["Tesla V100-PCIE-16GB"]),
        ("MI300X", ["AMD Instinct MI300X"], ["AMD Instinct MI300A"]),
        ("", [], ["NVIDIA H100"]),
    ],
)
def test_a_plan_uses_the_rates_of_its_own_kind_of_gpu(
    kind: str, own: list[str], others: list[str], tmp_path: Path
) -> None:
    paths = {device: str(tmp_path / f"{i}.json") for i, device in enumerate([*own, *others])}
    for i, (device, path) in enumerate(paths.items()):
        rate = {"stage": "text", "images_per_second_per_gpu": 100.0, "gpus": i + 1}
        fields = {"device": device, "gpus": 1, "date": "2026", "command": "a run", "measurements": [rate]}
        Path(path).write_text(json.dumps(fields))
    rates = read_rates(paths.values(), kind)
    assert [rate.gpus - 1 for rate in rates.of("text", None)] == list(range(len(own)))
    assert rates.skipped_files == [f"{paths[device]} (measured on {device})" for device in others]


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    fields = json.loads(Path("configs/plan/measured-h200.json").read_text()) | {"modelled": True}
    (tmp_path / "bench.json").write_text(json.dumps(fields))
    with pytest.raises(RequestError, match=r"bench\.json is not a valid benchmark file: unknown key `modelled`\."):
        read_rates([str(tmp_path / "bench.json")], "H200")


def test_a_measurement_of_a_mistyped_bucket_is_refused(tmp_path: Path) -> None:
    rate = {"stage": "train", "bucket": "512", "images_per_second_per_gpu": 100.0}
    fields = {"device": "NVIDIA H200", "gpus": 8, "date": "2026", "command": "a run", "measurements": [rate]}
    (tmp_path / "bench.json").write_text(json.dumps(fields))
    with pytest.raises(RequestError, match=r"bench\.json .*`measurements\.0\.bucket`: '512' is not a bucket"):
        read_rates([str(tmp_path / "bench.json")], "H200")
