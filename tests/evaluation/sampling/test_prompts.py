"""Prompt files in all supported formats, and invalid ones."""

import hashlib
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evaluation.sampling.prompts import PromptsConfig, prompts_sha256, read_prompts
from shards.base.errors import RequestError

COCO = {
    "annotations": [{"image_id": 9, "id": 48, "caption": "A cat.\n"}, {"image_id": 9, "id": 67, "caption": "A cat."}]
}
MJHQ = {"8a3c": {"category": "animals", "prompt": "a fox"}, "77b1": {"category": "food", "prompt": "a pie"}}
FOX_AND_PIE = [hashlib.sha256(text).hexdigest()[:16] for text in (b"a fox", b"a pie")]

DRAWBENCH = 'Prompts,Category\n"A red, big car.",Colors\nA pie,Food\n'
PARTI = (
    'Prompt\tCategory\tChallenge\tNote\nbond\tAbstract\tBasic\tx\n5" nail\tArt\tBasic\t\n'  # an unpaired quotation mark
)
PANDAS = ",prompt\n0,a fox\n1,a pie\n"  # the first column is the index, and has no name
MLPERF = (  # pandas quotes captions that contain quotation marks
    'image_id\tid\tcaption\n391895\t770337\tA man on a bike\n1\t2\t"A ""stop"" sign"\n3\t4\t5" nail\n'
    '5\t6\t"A sign"\n7\t8\t"Go" and "stop"\n'
)
MLPERF_TEXTS = ["A man on a bike", 'A "stop" sign', '5" nail', "A sign", '"Go" and "stop"']


@pytest.mark.parametrize(
    ("name", "content", "texts", "ids", "categories"),
    [
        ("a.txt", "a fox\na pie\n", ["a fox", "a pie"], None, [None, None]),
        ("a.csv", DRAWBENCH, ["A red, big car.", "A pie"], None, ["Colors", "Food"]),
        ("b.csv", PANDAS, ["a fox", "a pie"], FOX_AND_PIE, [None, None]),
        ("a.tsv", PARTI, ["bond", '5" nail'], None, ["Abstract", "Art"]),
        ("b.tsv", MLPERF, MLPERF_TEXTS, ["770337", "2", "4", "6", "8"], [None] * 5),
        ("a.json", json.dumps(COCO), ["A cat.", "A cat."], ["48", "67"], [None, None]),
        ("b.json", json.dumps(MJHQ), ["a fox", "a pie"], ["8a3c", "77b1"], ["animals", "food"]),
    ],
)
def test_formats(
    tmp_path: Path, name: str, content: str, texts: list[str], ids: list[str] | None, categories: list[str | None]
) -> None:
    (tmp_path / name).write_text(content)
    prompts = read_prompts(PromptsConfig(file=tmp_path / name))
    assert [prompt.text for prompt in prompts] == texts
    assert [prompt.category for prompt in prompts] == categories
    assert ids is None or [prompt.id for prompt in prompts] == ids


def test_parquet_with_a_named_column(tmp_path: Path) -> None:
    table = {"n": [1, 2], "Frage": ["ein Fuchs", "ein Haus"], "category": [0, None]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    prompts = read_prompts(PromptsConfig(file=tmp_path / "a.parquet", column="Frage"))
    assert [(prompt.text, prompt.category) for prompt in prompts] == [("ein Fuchs", "0"), ("ein Haus", None)]
    first = read_prompts(PromptsConfig(file=tmp_path / "a.parquet", column="Frage", limit=1))
    assert first == prompts[:1]


def test_ids_do_not_depend_on_the_position(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a fox\na pie\n")
    (tmp_path / "b.txt").write_text("a house\na pie\n")
    first, second = (read_prompts(PromptsConfig(file=tmp_path / name)) for name in ("a.txt", "b.txt"))
    assert first[1].id == second[1].id and len({prompt.id for prompt in [*first, *second]}) == 3
    assert prompts_sha256(first) != prompts_sha256(second)


def test_kept_duplicates_have_different_ids(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a fox\na pie\na fox\n")
    prompts = read_prompts(PromptsConfig(file=tmp_path / "a.txt", duplicates="keep"))
    assert [prompt.text for prompt in prompts] == ["a fox", "a pie", "a fox"]
    assert len({prompt.id for prompt in prompts}) == 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "a fox\n\na pie\n  \n", r"contains empty prompts \(line 2, line 4\)"),
        ("a.txt", "", "contains no prompts"),
        ("a.txt", "a fox\na pie\na fox \n", "contains duplicate prompts: line 1 = line 3"),
        (
            "a.csv",
            "Name,Category\nx,y\n",
            "no column prompt or prompts or caption or text; its columns are Name, Category",
        ),
        ("a.json", "{", "cannot be parsed: JSONDecodeError"),
        ("a.json", "[1]", "cannot be parsed: "),
        ("a.json", json.dumps({"annotations": [COCO["annotations"][0]] * 2}), "annotation 1 = annotation 2"),
        ("a.parquet", "no parquet", "cannot be parsed: ArrowInvalid"),
        ("a.csv", "prompt\na cat, black\n", "line 2 has more cells than the header. In a CSV file"),
        ("a.json", json.dumps({"a": {"prompt": ["x", "y"]}}), r"contains prompts that are not valid text \(entry a\)"),
        ("a.json", '{"a": {"prompt": "\\ud800"}}', r"contains prompts that are not valid text \(entry a\)"),
        ("a.json", '{"a": {"prompt": "x"}, "a": {"prompt": "y"}}', "the key a appears twice"),
        ("a.json", '{"annotations":' + "[" * 100_000, "cannot be parsed: RecursionError"),
        ("a.docx", "", "is not a supported prompt file: its name must end with one of .txt, .csv"),
    ],
)
def test_invalid_files_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(RequestError, match=message.replace("[", r"\[")):
        read_prompts(PromptsConfig(file=tmp_path / name))


def test_bytes_and_nan_are_refused(tmp_path: Path) -> None:
    for column in ([b"a"], [float("nan")]):
        pq.write_table(pa.table({"prompt": column}), tmp_path / "a.parquet")
        with pytest.raises(RequestError, match=r"contains prompts that are not valid text \(row 1\)"):
            read_prompts(PromptsConfig(file=tmp_path / "a.parquet"))


def test_lines_end_only_at_newlines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffa\u2028fox\x0c, red\r\na pie".encode())
    assert [prompt.text for prompt in read_prompts(PromptsConfig(file=tmp_path / "a.txt"))] == [
        "a\u2028fox\x0c, red",
        "a pie",
    ]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"The prompt file .* does not exist"):
        read_prompts(PromptsConfig(file=tmp_path / "absent.txt"))
    with pytest.raises(RequestError, match=r"--prompts\.file"):
        read_prompts(PromptsConfig())
