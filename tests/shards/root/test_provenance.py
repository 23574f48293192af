"""The hash of the source code."""

from pathlib import Path

import pytest

from shards.root import provenance


def test_it_depends_on_names_and_contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(provenance, "PACKAGES", ("toy",))
    hashes = set()
    for name, text in (("a", "1"), ("a", "2"), ("b", "2")):
        path = tmp_path / "toy" / f"{name}.py"
        path.write_text(text)
        hashes.add(provenance.source_sha256.__wrapped__())
        path.unlink()
    assert len(hashes) == 3
