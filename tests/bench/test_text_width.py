"""The benchmark of projected text: which results a second run reuses."""

import json
from pathlib import Path

import pytest

from bench import text_width


def test_only_results_of_the_same_settings_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train with a stand-in, which leaves a finished run unchanged, like `train`."""
    started, config = [], tmp_path / "phase1.yaml"

    def python(module: str, *words: str) -> None:
        if module != "train":
            return
        options = dict(zip(words[::2], words[1::2], strict=True))
        metrics = Path(options["--run_dir"]) / "metrics.jsonl"
        started.append(metrics)
        if not metrics.exists():
            metrics.parent.mkdir(parents=True)
            metrics.write_text(json.dumps({"val_loss": float(options["--max_steps"])}) + "\n")

    monkeypatch.setattr(text_width, "python", python)
    monkeypatch.setattr(text_width, "sample_run", float)
    monkeypatch.setattr(text_width, "in_new_process", lambda *_: 0.5)
    monkeypatch.setattr(text_width, "comparison_energy", lambda *_: 1.0)

    def losses(*more: str) -> list[float]:
        """Run the command with one seed, and return the losses of the trials that it adds."""
        results = tmp_path / "out" / "trials.jsonl"
        before = len(results.read_text().splitlines()) if results.exists() else 0
        words = ["text_width", str(tmp_path / "latents"), str(tmp_path / "validation"), "--config", str(config)]
        words += ["--folder", str(tmp_path / "out"), "--seeds", "0", *more]
        monkeypatch.setattr("sys.argv", words)
        text_width.main()
        return [json.loads(line)["loss"] for line in results.read_text().splitlines()[before:]]

    config.write_text(f"base: {Path('configs/phase1.yaml').resolve()}\n")
    assert losses("--widths", "64", "--steps", "20") == [20.0] * 3
    assert losses("--widths", "64", "--steps", "20") == []
    assert losses("--widths", "64", "128", "--steps", "20") == [20.0]
    assert losses("--widths", "64", "--steps", "10") == [10.0] * 3
    assert losses("--widths", "64", "--steps", "20", "--samples", "2") == [20.0] * 3
    config.write_text(f"base: {Path('configs/phase1.yaml').resolve()}\nseed: 7\n")
    assert losses("--widths", "64", "--steps", "20") == [20.0] * 3
    assert len(set(started)) == len(started)
