"""Receipts that benchmarks and tests make up."""

from bench.kit.receipts import synthetic_receipt


def test_all_hashes_differ() -> None:
    receipts = [
        synthetic_receipt(f"{tar:05d}", bucket, generation)
        for tar in range(100)
        for bucket in ("256x256", "512x512")
        for generation in range(2)
    ]
    hashes = {file.sha256 for receipt in receipts for file in receipt.files.values()}
    num_tables = 200  # of 100 tars and 2 generations; both tables of a part have the same hash
    assert len(hashes) == sum(len(receipt.mds) for receipt in receipts) + num_tables
