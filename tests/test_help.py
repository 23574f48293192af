"""`--help` of every command lists its subcommands, and shows what to type."""

from collections.abc import Callable

import pytest

import evaluate.__main__
import evaluate.study.__main__
import precompute.__main__
import precompute.download.__main__
import precompute.preview
import precompute.select.__main__
import shards.__main__
import train.__main__
import train.launch

STAGE_1, STAGE_2 = precompute.__main__.run, train.__main__.run


@pytest.mark.parametrize(
    ("run", "words", "said"),
    [
        (STAGE_1, [], ["precompute.select", "precompute.download", "precompute.preview", "--workers.num_gpus"]),
        (precompute.select.__main__.run, [], ["--metadata"]),
        (precompute.download.__main__.run, [], ["--recheck"]),
        (precompute.preview.run, [], ["--samples"]),
        (STAGE_2, [], ["train check", "train plot", "train export", "train.launch", "--optimizer.lr"]),
        (STAGE_2, ["check"], ["train check", "--optimizer.lr"]),
        (STAGE_2, ["plot"], ["loss.png"]),
        (STAGE_2, ["export"], ["train export RUN", "--weights"]),
        (STAGE_2, ["ema"], ["train ema RUN", "--std"]),
        (evaluate.__main__.run, [], ["evaluate sample", "evaluate score", "evaluate watch", "evaluate report"]),
        (evaluate.__main__.run, ["watch"], ["evaluate watch RUN", "--every", "--once"]),
        (evaluate.__main__.run, ["report"], ["evaluate report RUN", "--price_per_hour"]),
        (evaluate.__main__.run, ["compare"], ["evaluate compare"]),
        (evaluate.__main__.run, ["sample"], ["evaluate sample", "--sampling.guidance"]),
        (evaluate.__main__.run, ["study"], ["evaluate.study prepare", "evaluate.study analyse"]),
        (evaluate.study.__main__.run, ["serve"], ["evaluate.study invite", "--serve.port"]),
        (train.launch.launch, [], ["--num_processes"]),
        (shards.__main__.run, [], ["verify", "stats", "index", "card", "where"]),
        *((shards.__main__.run, [name], ["root"]) for name in ("verify", "stats", "index", "card", "where")),
    ],
)
def test_help(
    run: Callable[[list[str]], object], words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run([*words, "--help"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    for word in (*said, "example", "python -m "):
        assert word in printed
