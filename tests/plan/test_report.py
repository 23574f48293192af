"""Whole plans: assumption marks, effects of changed inputs, and refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from matplotlib.figure import Figure
from pydantic import ValidationError

from plan.arithmetic.work import Work
from plan.config import ASSUMED, GPU_KINDS, Plan
from plan.figure import draw
from plan.measured import BenchFile
from plan.report import make_report
from plan.text import render, render_comparison, scaling_verdict
from shards.base.errors import RequestError
from tests.plan.conftest import MakePlan, MakeReport
from train.model.flops import PEAK_TFLOPS

MEASURED = "configs/plan/mosaicml-a100.json"
BACKBONE = "configs/phase1.yaml"


def bench(path: Path, **changes: object) -> str:
    values = json.loads(Path(MEASURED).read_text()) | changes
    path.write_text(json.dumps(values))
    return str(path)


def test_the_file_spells_out_the_defaults(plan: MakePlan) -> None:
    assert plan() == Plan(measured=[MEASURED])


def test_every_assumed_number_is_marked(plan: MakePlan, report: MakeReport) -> None:
    shown = render(report())
    assumed = [fact.field for fact in report().facts if fact.assumed]
    assert "storage.price_per_tb_month" in assumed and "gpu.price_per_hour" not in assumed
    for fact in report().facts:
        line = next(line for line in shown.splitlines() if line.split()[:1] == [fact.field])
        assert ("* ASSUMED" in line) == fact.assumed
        assert fact.assumed or fact.source in line


def test_speeds_from_an_assumed_utilisation_are_marked(report: MakeReport) -> None:
    assumed = report("--gpu.kind", "H200")
    assert {phase.basis for row in assumed.rows for phase in row.phases} == {"assumed"}
    assert all(rate.assumed for rate in assumed.rates.values())
    assert "Skipped configs/plan/mosaicml-a100.json (measured on NVIDIA A100); the plan is for H200." in assumed.notes
    line = next(line for line in render(assumed).splitlines() if line.startswith("   8"))
    assert line.count("*") == 5  # both phases' speed and days, and the training's days


@pytest.mark.parametrize("images", [8, 64, 2048, 65536])
def test_a_step_at_an_assumed_utilisation_has_overheads_at_every_batch_size(report: MakeReport, images: int) -> None:
    """The utilisation is that of the forward and backward pass, so the optimizer makes small batches slower."""
    batches = [word for phase in ("phase1", "phase2") for word in (f"--{phase}.global_batch_size", str(images))]
    assumed = report("--measured", "[]", "--gpus", "8", "--gpu_counts", "[8]", *batches)
    for phase in assumed.rows[0].phases:
        rate, optimizer = assumed.rates[f"train {phase.bucket}"], 865_910_724 * 28 / 2039e9
        seconds = images / 8 / rate.images_per_second_per_gpu + optimizer
        assert phase.step.compute == pytest.approx(seconds)
        assert phase.images_per_second <= images / seconds * (1 + 1e-9)


@pytest.mark.parametrize("setting, factor", [(False, 1), (0.5, 1), (True, 4 / 3)])
def test_recomputed_activations_slow_down_an_assumed_rate(
    report: MakeReport, tmp_path: Path, setting: bool | float, factor: float
) -> None:
    path = training_config(tmp_path / "training.yaml", gradient_checkpointing=setting)
    plain, recomputed = (report("--networks.backbone", each, "--measured", "[]") for each in (BACKBONE, path))
    for stage, rate in plain.rates.items():
        slower = rate.images_per_second_per_gpu / recomputed.rates[stage].images_per_second_per_gpu
        assert slower == pytest.approx(factor if stage.startswith("train") else 1)
    assert report("--networks.backbone", path).rates == report().rates  # training rates are measured


def test_planner_and_trainer_know_the_same_peaks() -> None:
    assert {kind: numbers["peak_tflops"][0] for kind, numbers in GPU_KINDS.items()}.items() <= PEAK_TFLOPS.items()


@pytest.mark.parametrize("given, assumed", [("2", False), ("1.5", True)])
def test_a_changed_number_loses_its_source(report: MakeReport, given: str, assumed: bool) -> None:
    price = next(fact for fact in report("--gpu.price_per_hour", given).facts if fact.field == "gpu.price_per_hour")
    assert price.assumed is assumed


def test_a_source_for_a_different_value_does_not_hide_the_default_source(plan: MakePlan, sd2: Work) -> None:
    sources = {"gpu.price_per_hour": {"value": 1.5, "source": "quote of 3 May"}}
    facts = make_report(Plan.model_validate(plan().model_dump() | {"sources": sources}), sd2).facts
    price = next(fact for fact in facts if fact.field == "gpu.price_per_hour")
    assert price.source == GPU_KINDS["A100"]["price_per_hour"][1]


def test_a_plan_can_vouch_for_its_numbers(plan: MakePlan, sd2: Work) -> None:
    quoted = {"gpu.price_per_hour": {"value": 1.5, "source": "quote of 3 May"}}
    vouched = plan("--gpu.price_per_hour", "1.5").model_dump() | {"sources": quoted}
    facts = {fact.field: fact for fact in make_report(Plan.model_validate(vouched), sd2).facts}
    price = facts["gpu.price_per_hour"]
    assert (price.source, price.assumed) == ("quote of 3 May", False)
    vouched["sources"] = {"gpu.prise": {"value": 1, "source": "x"}}
    with pytest.raises(
        RequestError, match=r"`sources` contains fields that are not numeric inputs of the plan: gpu\.prise\."
    ):
        make_report(Plan.model_validate(vouched), sd2)


def test_numbers_that_do_not_matter_are_not_listed(report: MakeReport) -> None:
    fields = {fact.field for fact in report().facts}
    assert fields.isdisjoint({"text.tokens", "gpu.train_utilisation", "regions.egress_per_gb"})
    trimmed = report("--text.trim", "true", "--regions.gpus", "elsewhere")
    assert {"text.tokens", "regions.egress_per_gb"} <= {fact.field for fact in trimmed.facts}


def test_between_measurements_the_nearest_below_predicts(report: MakeReport) -> None:
    start = "128 GPUs, 256x256: the measured rate is 27% below the prediction"
    assert any(note.startswith(start) for note in report().notes)
    rows = {row.gpus: row.phases[0] for row in report("--gpu_counts", "[4, 8, 256]").rows}
    assert [rows[gpus].basis for gpus in (4, 8, 256)] == ["predicted", "measured", "predicted"]
    assert rows[4].images_per_second == pytest.approx(550, rel=0.01)
    assert 90.6 * 256 * 0.8 < rows[256].images_per_second < 90.7 * 256


@pytest.mark.parametrize(
    "overrides, bottleneck",
    [
        ((), "compute"),
        (("--links.data_gbit_per_node", "0.05"), "data rate"),
        (("--gpu.network_gbit_per_s", "20", "--measured", "[]"), "traffic between GPUs"),
    ],
)
def test_bottleneck_is_the_busiest_resource(report: MakeReport, overrides: tuple[str, ...], bottleneck: str) -> None:
    row = next(row for row in report(*overrides, "--phase2", "null").rows if row.gpus == 64)
    assert row.bottleneck == bottleneck


def test_a_benchmark_without_the_store_does_not_hide_that_the_store_is_slow(report: MakeReport) -> None:
    phase = report("--links.data_gbit_per_node", "0.5").rows[0].phases[0]
    assert (phase.basis, phase.bottleneck) == ("predicted", "data rate")
    assert phase.images_per_second == pytest.approx(0.5e9 / 8 / phase.read_per_node * phase.images_per_second)


def test_float8_and_trim_shrink_what_is_stored(report: MakeReport) -> None:
    exact, small = report("--text.storage", "float16"), report("--text.storage", "float8", "--text.trim", "true")
    assert small.stored_tb < exact.stored_tb / 2.5
    assert small.traffic.read_tb < exact.traffic.read_tb / 2.5
    break_even = [(less.pays_from, more.pays_from) for less, more in zip(small.buckets, exact.buckets, strict=True)]
    assert all(less and more and less < more for less, more in break_even)


def test_online_precomputes_nothing(report: MakeReport) -> None:
    beforehand, online = (report("--encoding", value).rows[0] for value in ("beforehand", "online"))
    assert online.precompute_hours == 0
    assert online.training_days == pytest.approx(beforehand.online_days)
    assert online.online_ratio == pytest.approx(beforehand.online_ratio)


def test_reading_across_regions_costs(report: MakeReport) -> None:
    traffic = report("--regions.data", '{"here": 0.25, "there": 0.75}').traffic
    assert traffic.foreign_tb == pytest.approx(0.75 * traffic.read_tb)
    assert traffic.cost == pytest.approx(traffic.foreign_tb * 1000 * 0.02)
    assert traffic.copy_cost < traffic.cost
    far = report("--regions.data", '{"us": 0.5, "eu": 0.5}').traffic
    assert far.foreign_tb == pytest.approx(far.read_tb)


def test_free_storage_pays_from_the_first_pass(report: MakeReport) -> None:
    free, paid = (report("--storage.price_per_tb_month", price).buckets for price in ("0", "23"))
    assert [bucket.pays_from for bucket in free] == pytest.approx([1, 1])
    assert all(bucket.pays_from and bucket.pays_from > 1 for bucket in paid)


def test_the_speedup_is_per_doubling(report: MakeReport) -> None:
    by_two, by_four = (report("--gpu_counts", f"[{counts}]").rows[-1] for counts in ("8, 16, 32", "8, 32"))
    first = report("--gpu_counts", "[8, 16]").rows[-1]
    assert by_two.speedup and by_four.speedup and first.speedup
    assert by_four.speedup**2 == pytest.approx(by_two.speedup * first.speedup)


def test_planned_checkpoints_lose_more_than_the_best(report: MakeReport) -> None:
    best, seldom, often = (
        report(*every).rows[4] for every in ((), *(("--checkpoints.every_steps", n) for n in ("100000", "20")))
    )
    assert best.lost < seldom.lost and best.lost < often.lost
    assert best.expected_days > best.training_days + best.precompute_days
    # the last step of a phase is always saved
    assert [phase.num_checkpoints for phase in seldom.phases] == [6, 9]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (("--gpus", "48"), r"phase1\.global_batch_size is 2048, which cannot be split evenly across 48 GPUs"),
        (("--gpu_counts", "[3]"), r"phase1\.global_batch_size is 2048, which cannot be split evenly across 3 GPUs"),
        (("--phase2.bucket", "768x768"), r"phase2\.bucket is 768x768, which is not in data\.samples"),
        (
            ("--gpu.kind", "B200"),
            r"only the GPU kinds A100, H100, H200 have default values; "
            r"for B200, you must also set price_per_hour, peak_t",
        ),
        (("--regions.data", '{"here": 0.5}'), r"shares must not be negative and must sum to 1"),
        (("--data.samples", '{"256": 5}'), r"is not a bucket"),
        (
            ("--data.pictures", "10000000"),
            r"data\.samples\.256x256 is 790,000,000, but data\.pictures is only 10,000,000\. .* raise data\.pictures",
        ),
        (("--measured", f'["{MEASURED}", "{MEASURED}"]'), r"repeats a measurement .*: train 256x256 on 8 × A100\."),
        (("--measured", "nowhere.json"), r"The benchmark file nowhere\.json does not exist"),
        (("--measured", ""), r"The benchmark file `` cannot be read: Is a dir.*leave it out \(`--measured \[\]`"),
        (("--measured", "configs/vae/sd2.json"), r"sd2\.json is not a valid benchmark file: `device`: Field required"),
        (("--gpu.network_gbit_per_s", "1"), r"256x256: a step of 2048 images on .* must be wrong\. Check both"),
        (
            ("--checkpoints.gpu_hours_per_failure", "0.001", "--checkpoints.every_steps", "9999"),
            r"On 8 GPUs, a failure occurs every 0\.45 s .* the training would never finish",
        ),
        (("--checkpoints.restart_seconds", "1e9"), r"a restart takes 1e\+09 s, .* checkpoints\.restart_seconds"),
    ],
)  # fmt: skip
def test_wrong_plans_are_refused(report: MakeReport, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        report(*overrides)


def test_rows_that_cannot_share_a_batch_are_left_out(report: MakeReport) -> None:
    small = report("--phase2.global_batch_size", "256")
    assert small.rows[-1].gpus == 256
    assert "Omitted GPU counts that do not divide the global batch sizes evenly: 512, 1024." in small.notes


def test_measured_encoders_replace_the_assumed_utilisation(report: MakeReport, tmp_path: Path) -> None:
    stages = (("encode", "256x256", 500), ("encode", "512x512", 100), ("text", None, 5000))
    rates = [{"stage": stage, "bucket": name, "images_per_second_per_gpu": rate} for stage, name, rate in stages]
    about = {"published": False, "date": "2026-01-02", "command": "bench/encode.py"}
    path = bench(tmp_path / "encode.json", measurements=rates, **about)
    measured = report("--measured", json.dumps([MEASURED, path]))
    assert measured.rows[0].precompute_hours == pytest.approx((790e6 / 500 + 300e6 / 100 + 790e6 / 5000) / 3600)
    assert measured.rates["encode 256x256"].source == "measured 2026-01-02: bench/encode.py"
    assert "gpu.encode_utilisation" not in {fact.field for fact in measured.facts}


@pytest.mark.parametrize("stage, bucket", [("train", None), ("encode", None), ("text", "256x256")])
def test_measurements_need_the_right_bucket(stage: str, bucket: str | None) -> None:
    item = {"stage": stage, "bucket": bucket, "images_per_second_per_gpu": 1}
    with pytest.raises(ValidationError, match="bucket"):
        BenchFile.model_validate({"device": "x", "gpus": 1, "date": "", "command": "", "measurements": [item]})


def test_what_keeps_a_gpus_encoders_fed(report: MakeReport, tmp_path: Path) -> None:
    """If decoding was measured, the plan lists CPU cores per GPU, and the cost of decoding on the GPU."""
    encoding = [("encode", "256x256", 1000.0), ("encode", "512x512", 250.0), ("text", None, 4000.0)]
    on_core, on_gpu = ("decode", None, 100.0), ("decode_on_gpu", None, 2000.0)

    def notes(measured: list[tuple[str, str | None, float]], *overrides: str) -> list[str]:
        rows = [{"stage": a, "bucket": b, "images_per_second_per_gpu": rate} for a, b, rate in measured]
        path = bench(tmp_path / "bench.json", device="NVIDIA H200", measurements=rows, published=False, command="a run")
        data = ("--data.samples", '{"256x256": 4000, "512x512": 1000}', "--data.pictures", "4000")
        made = report("--measured", path, "--gpu.kind", "H200", *data, *overrides)
        return [note for note in made.notes if "cores" in note]

    # 4,000 captions, 4,000 and 1,000 pictures: 1 + 4 + 4 s of a GPU
    (fed,) = notes([*encoding, on_core])
    assert fed.startswith("One GPU encodes 444 images/s. Decoding them takes 4.4 CPU cores (measured 20")
    share = " Decoding on the GPU would take 22% of its time and produce different pixels."
    assert notes([*encoding, on_core, on_gpu]) == [fed + share]
    assert notes([*encoding, on_gpu]) == [] and notes([*encoding, on_core], "--encoding", "online") == []


def training_config(path: Path, **fields: object) -> str:
    """Write the training config of SD2 with other fields, and return its path."""
    path.write_text(yaml.safe_dump(yaml.safe_load(Path(BACKBONE).read_text()) | fields))
    return str(path)


def test_traffic_between_gpus_is_that_of_the_training_config(report: MakeReport, tmp_path: Path) -> None:
    changes: dict[str, dict[str, object]] = {
        "bfloat16": {"ddp": {"gradients": "bfloat16"}},
        "small buckets": {"ddp": {"bucket_mb": 25}},
        "in groups": {"sharding": "full", "sharding_group": 8},
        "across all": {"sharding": "full"},
    }
    two_microbatches = ("--phase1.microbatch_size", "8")
    plans = {"as shipped": report(*two_microbatches)}
    for name, fields in changes.items():
        path = training_config(tmp_path / "training.yaml", **fields)
        plans[name] = report("--networks.backbone", path, *two_microbatches)
    times = {name: next(row for row in plan.rows if row.gpus == 128).phases[0].step for name, plan in plans.items()}
    shipped = times["as shipped"]
    assert times["bfloat16"].traffic == shipped.traffic / 2
    assert times["bfloat16"].exposed < shipped.exposed / 2  # as many buckets as with float32
    assert times["small buckets"].exposed < shipped.exposed
    # two gathers of bfloat16 weights and a reduction of float32 gradients, instead of an all-reduce
    assert times["across all"].traffic == pytest.approx(2 * shipped.traffic)
    headings = {
        name: render(plan).splitlines()[0].partition(", encoding beforehand")[2] for name, plan in plans.items()
    }
    assert headings["in groups"] == ", sharding full within groups of 8 GPUs"
    assert headings["across all"] == ", sharding full across all GPUs"
    assert headings["as shipped"] == headings["bfloat16"] == ""
    assert any("Sharding weights within each node" in note for note in plans["as shipped"].notes)
    assert not any("Sharding weights within each node" in note for note in plans["in groups"].notes)
    with pytest.raises(RequestError, match=r"networks\.backbone: .*training\.yaml .*: `sharding` = 'half': input"):
        report("--networks.backbone", training_config(tmp_path / "training.yaml", sharding="half"))


def test_groups_are_recommended_only_for_whole_nodes(report: MakeReport) -> None:
    """Groups of 8 would speed up 36 GPUs, but do not divide them."""
    words = ("--phase1.global_batch_size", "2304", "--phase1.microbatch_size", "8", "--phase2", "null")
    slow = ("--gpu_counts", "[36, 64]", "--measured", "[]", "--gpu.network_gbit_per_s", "50")
    (note,) = (note for note in report(*words, *slow).notes if "Sharding weights within each node" in note)
    assert "on 64 GPUs" in note and "on 36 GPUs" not in note


def test_a_training_config_inherits_from_its_base(report: MakeReport, tmp_path: Path) -> None:
    training_config(tmp_path / "phase1.yaml", sharding="full", sharding_group=8)
    (tmp_path / "phase2.yaml").write_text("base: phase1.yaml\nmicrobatch_size: 32\n")
    heading = render(report("--networks.backbone", str(tmp_path / "phase2.yaml"))).splitlines()[0]
    assert heading.endswith(", sharding full within groups of 8 GPUs")
    assert render(report("--networks.backbone", "configs/sd2/phase1.yaml")) == render(report())


def test_gpu_counts_that_the_trainer_refuses_are_left_out(report: MakeReport, tmp_path: Path) -> None:
    """Groups of equal size must hold the weights. If there are fewer GPUs than a group has, all GPUs form one group."""
    path = training_config(tmp_path / "training.yaml", sharding="full", sharding_group=6)
    batches = [word for phase in ("phase1", "phase2") for word in (f"--{phase}.global_batch_size", "3072")]
    options = ("--networks.backbone", path, *batches, "--measured", "[]")
    grouped = report(*options, "--gpu_counts", "[4, 8, 12, 16, 48, 80]")
    assert [row.gpus for row in grouped.rows] == [4, 12, 48]
    assert "Omitted GPU counts that do not divide the global batch sizes evenly: 80." in grouped.notes
    assert "Omitted GPU counts that are not a multiple of sharding_group, 6: 8, 16." in grouped.notes
    unsharded = training_config(tmp_path / "unsharded.yaml", sharding_group=6)
    whole = report(*options, "--networks.backbone", unsharded, "--gpu_counts", "[4, 8]")
    assert [row.gpus for row in whole.rows] == [4, 8]
    message = r"training\.yaml sets sharding_group to 6, so the trainer cannot run on {} GPUs"
    with pytest.raises(RequestError, match=message.format(16)):
        report(*options, "--gpus", "16")
    with pytest.raises(RequestError, match=message.format("8 or 16")):
        report(*options, "--gpu_counts", "[8, 16]")


def test_a_plan_with_free_gpus_compares_gpu_hours(report: MakeReport) -> None:
    """If GPUs are free, storing latents is never cheaper than encoding online, unless storage is free, too."""
    free = report("--gpu.price_per_hour", "0")
    paid = report()
    assert {row.cost for row in free.rows} == {row.online_cost for row in free.rows} == {0}
    assert [row.training_hours for row in free.rows] == [row.training_hours for row in paid.rows]
    assert [bucket.pays_from for bucket in free.buckets] == [None, None]
    assert scaling_verdict(free) == scaling_verdict(paid)
    assert render(free).count(" never\n") == 2
    everything = report("--gpu.price_per_hour", "0", "--storage.price_per_tb_month", "0")
    assert [bucket.pays_from for bucket in everything.buckets] == [1, 1]
    (row,) = [line for line in render_comparison([free, paid]).splitlines() if line.startswith("   8")]
    assert row.split()[-1] == "-"


def test_plans_without_a_common_gpu_count_say_so(report: MakeReport) -> None:
    text = render_comparison([report("--gpu_counts", f"[{count}]") for count in (8, 16)])
    assert text.endswith("No GPU count is in all plans, so days and costs cannot be compared. Set gpu_counts or gpus.")


@pytest.mark.heavy
def test_the_figure_shows_all_points_of_all_plans(report: MakeReport, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plans differ in cost and in GPU counts, and share their axes."""
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    reports = [report("--gpu_counts", "[1, 2]", "--gpu.price_per_hour", "0.1"), report()]
    draw(reports)
    throughput, costs = figures[0].axes[:2], figures[0].axes[2:]
    assert list(throughput[1].get_xticks()) == sorted({row.gpus for report in reports for row in report.rows})
    for axes, plan in zip(costs, reports, strict=True):
        low, high = axes.get_ylim()
        assert low == 0 and all(row.cost / 1000 < high for row in plan.rows)


def test_scaling_stops_paying(report: MakeReport) -> None:
    verdict = "Scaling stops paying off at 512 GPUs: on 1024, the speedup per doubling is 1.32x (below 1.5x),"
    assert scaling_verdict(report()).startswith(verdict)
    few = report("--gpu_counts", "[8, 16]")
    assert scaling_verdict(few) == "Scaling pays off up to 16 GPUs: the speedup per doubling is at least 1.5x."


def test_a_single_gpu_count_shows_no_scaling(report: MakeReport) -> None:
    verdict = "The plan is for 8 GPUs only, so it does not show how training scales."
    assert scaling_verdict(report("--gpu_counts", "[8]")) == verdict


def test_small_numbers_are_not_rounded_to_zero(report: MakeReport) -> None:
    """The latents of 100,000 images take 8.7 + 11.2 GB, and cost less than a dollar per month."""
    samples = '{"256x256": 100000, "512x512": 100000}'
    short = [f"--phase{number}.steps" for number in (1, 2)]
    small = report("--data.pictures", "100000", "--data.samples", samples, *(w for s in short for w in (s, "100")))
    text = render(small)
    assert "Latents: 0.02 TB*, $0.46* per month" in text
    assert "Training reads 0.041 TB*" in text
    days = next(line for line in text.splitlines() if line.startswith("   8")).split()
    assert float(days[2]) == pytest.approx(small.rows[0].phases[0].days, rel=0.05)
    assert "0.00 " not in text.partition("Reading")[0]


@pytest.mark.parametrize("images", [7, 256])
def test_a_published_rate_keeps_its_batch_size(report: MakeReport, images: int) -> None:
    """MosaicML's rates are those of 2,048 images per step, so a plan for smaller batches is a prediction."""
    batches = [word for phase in ("phase1", "phase2") for word in (f"--{phase}.global_batch_size", str(images))]
    (row,) = report("--gpu_counts", "[1]" if images == 7 else "[8]", *batches).rows
    assert {phase.basis for phase in row.phases} == {"predicted"}
    assert row.phases[0].images_per_second < 137.5 * row.gpus


def test_a_text_without_notes_ends_with_its_numbers(report: MakeReport) -> None:
    assert "Notes" not in render(replace(report(), notes=[]))
    assert ASSUMED.upper() in render(report())
