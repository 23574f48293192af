"""The GPU check, rehearsed on the CPU, and the isolation of parts that fail or hang."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import bench.gpu_check.__main__ as gpu_check
from bench.gpu_check import speed
from bench.gpu_check.correctness import apart
from bench.gpu_check.families import FamilyPhase
from bench.gpu_check.findings import Findings, Parts
from bench.gpu_check.kernels import kind_of
from bench.gpu_check.page import gpu_kind, page
from bench.gpu_check.parts import HALVES, PARTS, PartRun
from bench.gpu_check.setup import Setup, use_no_compiler
from bench.train_step import Result, StepSetting
from plan.measured import matches_gpu_kind, read_rates
from shards.base.errors import RequestError, WorkError
from tests.ranks import SERVER

SETUP = Setup(torch.device("cpu"), small=True)
LONG = (
    "batches",
    "compiling",
    "training-large",
    "training-small",
    "choices",
    "t5",
    "sd2",
    "sd3",
    "sdxl",
    "pixart-sigma",
    "prx",
    "flux1",
)
QUICK = tuple(name for name in PARTS if name not in LONG)
"""Parts that take seconds. `make gpu-check ARGS="--device cpu --small"` runs all parts."""
ASLEEP = 100_000 + os.getpid()
"""A duration that no other process sleeps for, in seconds."""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """Run the quick parts in this process, and return their findings. Sana only trains compiled, because eager training
    takes the same path without `compile_network`."""
    folder, found = tmp_path_factory.mktemp("parts"), {}
    runs = {name: PARTS[name].run for name in QUICK} | {"sana": FamilyPhase("sana", 1, ("blocks",)).run}
    compile_with = torch.compile
    use_no_compiler()
    try:
        for name, run in runs.items():
            path = folder / f"{name}.json"
            run(SETUP, Findings(path))
            found[name] = {**json.loads(path.read_text()), "outcome": "done", "seconds": 1.0}
    finally:
        torch.compile = compile_with
    return found


def test_all_checks_hold_on_the_cpu(rehearsed: Parts) -> None:
    for name, part in rehearsed.items():
        assert gpu_check.right(part), (name, part["checks"])
        assert part["checks"] or part["tables"] or part["figures"], name
    assert {line["kernel"] for line in rehearsed["attention"]["tables"]["attention"]} >= {"flash", "cudnn", "math"}


@pytest.mark.slow
@pytest.mark.float8
def test_float8_layers_are_emulated_on_the_cpu(tmp_path: Path) -> None:
    found = Findings(tmp_path / "float8.json")
    PARTS["float8"].run(SETUP, found)
    assert [line["right"] for line in found.checks] == [True] * 3 and not found.failed
    assert found.tables["float8"][0]["chosen"] is False


def test_the_planner_reads_the_file_and_the_report_breaks_down_the_time(rehearsed: Parts, tmp_path: Path) -> None:
    file = gpu_check.planner_file("CPU", rehearsed)
    (tmp_path / "gpu-check.json").write_text(file.model_dump_json(exclude_none=True))
    read = read_rates([str(tmp_path / "gpu-check.json")], "CPU")
    assert read.of("encode", "128x128")[0].images_per_second_per_gpu > 0 and read.of("text", None)
    assert all(read.of(stage, None)[0].images_per_second_per_gpu > 0 for stage in ("decode", "decode_on_gpu"))
    earlier = file.model_copy(update={"command": "an earlier check", "details": {}})
    (tmp_path / "earlier.json").write_text(earlier.model_dump_json(exclude_none=True))
    text = page(file, [str(tmp_path / "earlier.json")], 60.0)
    assert f"checks hold; {len(QUICK)} of {len(QUICK)} parts finished." in text
    assert "100%" in text and "an earlier check" in text
    for said in ("of the limit**", "| convolution |", "| gaps |", "Peak memory was"):
        assert said in text
    for row in file.details["profile"]["tables"]["kernels"]:
        has_arithmetic = row["what"] in ("convolution", "product", "attention")
        assert (row["at_the_matrix_rate_ms"] > 0) == has_arithmetic
        assert row["launches"] or not has_arithmetic


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
    ],
)
def test_rates_are_compared_with_those_of_the_same_kind_of_gpu(device: str, kind: str | None) -> None:
    """Kinds that the planner does not know are compared by name."""
    assert gpu_kind(device) == (kind or device) and matches_gpu_kind(device, gpu_kind(device))


def test_the_planner_gets_encoder_rates_of_one_mode() -> None:
    """One field compiles all encoders or none, so the best rate of each would be one that no worker reaches."""
    rates = {True: {"256x256": 1329.0, "mixed": 700.0, "text": 1530.0}, False: {"256x256": 464.0, "text": 2021.0}}
    rates[False]["mixed"] = 243.0
    table = [{"what": w, "compiled": c, "per_second": r} for c, mode in rates.items() for w, r in mode.items()]

    def chosen(rows: list[dict[str, Any]]) -> list[tuple[str, float]]:
        file = gpu_check.planner_file("CPU", {"encoders": {"tables": {"encoders": rows}, "figures": {}}})
        return [(each.stage, each.images_per_second_per_gpu) for each in file.measurements]

    assert chosen(table) == [("encode", 1329.0), ("text", 1530.0)]
    skipped = [row | {"per_second": None} if row["compiled"] else row for row in table[2:]]
    assert chosen(skipped) == [("encode", 464.0), ("text", 2021.0)]


def test_failed_checks_come_first_and_fail_the_command(tmp_path: Path) -> None:
    found = Findings(tmp_path / "part.json")
    found.check("a curve", float("nan"), 0.1)
    found.check("another", 0.05, 0.1)
    part = {**json.loads((tmp_path / "part.json").read_text()), "outcome": "done", "seconds": 1.0}
    assert not gpu_check.right(part)
    text = page(gpu_check.planner_file("CPU", {"curves": part}), [], 1.0)
    assert "**1 of 2 checks hold" in text and "## Failed checks\n\n" in text and "| curves | a curve | nan |" in text


@dataclass(frozen=True)
class StandIn:
    """Takes the place of `PartRun`: one part fails, one hangs, one ends its process, and one is done."""

    name: str
    device: str
    small: bool
    seconds: float
    output: Path
    lock: Path

    def __call__(self) -> None:
        Findings(self.output).check(f"of {self.name}", 0.0, 1.0)
        self.output.with_suffix(".log").write_text("said before\n")
        if self.name == "draws":
            raise ValueError("broken")
        if self.name == "machine":
            subprocess.run(["sleep", str(ASLEEP)])
        if self.name == "encoders":
            os._exit(3)


def own_group(*_: object) -> None:
    """Begin a lane that the tests' fork server started."""
    os.setsid()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the check fork the processes of its lanes, which takes less time than starting them."""
    monkeypatch.setattr(gpu_check, "get_context", lambda _: SERVER)
    monkeypatch.setattr(gpu_check, "begin_lane", own_group)


def test_parts_that_fail_hang_or_crash_keep_their_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None
) -> None:
    """The other parts of the lane run in a new process, and nothing that a part started stays behind."""
    monkeypatch.setattr(gpu_check, "PartRun", StandIn)
    monkeypatch.setattr(gpu_check, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(gpu_check, "LANES", [{"draws": 0, "encoders": 0, "machine": 0}, {"loader": 0}])
    monkeypatch.setitem(PARTS, "machine", replace(PARTS["machine"], seconds=10.0))
    words = ["--device", "cpu", "--small", "--output", str(tmp_path)]
    with pytest.raises(
        WorkError, match=r"The check failed in draws, encoders, machine\. .*gpu-check\.md lists the failed checks"
    ):
        gpu_check.check(["draws", "encoders", "machine", "loader", *words])
    parts = json.loads((tmp_path / "gpu-check.json").read_text())["details"]
    assert parts["draws"]["outcome"].startswith("failed:\nsaid before\n")
    assert parts["draws"]["outcome"].endswith("ValueError: broken")
    assert "BrokenProcessPool" in parts["encoders"]["outcome"]
    assert parts["machine"]["outcome"] == "ended after 10 s"
    assert parts["loader"]["outcome"] == "done"
    assert all(part["checks"][0]["what"] == f"of {name}" for name, part in parts.items())
    await_end_of_sleepers()
    late = gpu_check.CheckRun("cpu", True, tmp_path, 0.0, 9.0, time.monotonic())
    assert gpu_check.run_part(late, gpu_check.LaneProcess(late), "loader")["outcome"] == "not started: no time was left"


def sleepers() -> list[psutil.Process]:
    """Return the processes that a hanging part started."""
    return [each for each in psutil.process_iter(["cmdline"]) if str(ASLEEP) in (each.info["cmdline"] or [])]


def await_end_of_sleepers() -> None:
    deadline = time.monotonic() + 60
    while sleepers():
        assert time.monotonic() < deadline, "what a part started is still running"
        time.sleep(0.1)  # a killed process ends only when it is scheduled


def test_an_exception_kills_all_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked: None) -> None:
    """A part of one lane hangs when a part of the other one ends, and no part begins afterwards."""
    begun = []

    def run_part(run: gpu_check.CheckRun, process: gpu_check.LaneProcess, name: str) -> dict[str, Any]:
        begun.append(name)
        if name == "machine":
            process.executor = ProcessPoolExecutor(1, SERVER, initializer=own_group)
            process.pid = process.executor.submit(os.getpid).result()
            with suppress(BrokenExecutor):
                process.executor.submit(subprocess.run, ["sleep", str(ASLEEP)]).result()
        else:
            deadline = time.monotonic() + 60
            while not sleepers() and time.monotonic() < deadline:
                time.sleep(0.01)
        return {"checks": [], "tables": {}, "figures": {}, "outcome": "done", "seconds": 1.0}

    def write(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_check, "run_part", run_part)
    monkeypatch.setattr(gpu_check, "write", write)
    monkeypatch.setattr(gpu_check, "LANES", [{"machine": 0, "encoders": 0}, {"loader": 0}, {"draws": 0}])
    words = ["--device", "cpu", "--small", "--output", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        gpu_check.check(["machine", "encoders", "loader", *words])
    await_end_of_sleepers()
    assert sorted(begun) == ["loader", "machine"]


LANE = """
import sys, time
from shards.base.pool import die_with
if not die_with(int(sys.argv[1])):
    sys.exit(1)
print("ready", flush=True)
time.sleep(30)
print("alive")
"""
PARENT = """
import os, subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2] or str(os.getpid())])
"""


@pytest.mark.parametrize("parent", ["", "1"], ids=["killed", "already dead"])
def test_a_lane_ends_with_the_check(parent: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, LANE, parent], stdout=subprocess.PIPE) as check:
        assert check.stdout
        if not parent:
            assert check.stdout.readline() == b"ready\n"
            check.kill()
        assert check.stdout.read() == b""  # the lane holds the pipe until it ends


def test_parts_given_by_name_are_merged_into_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run_part(run: gpu_check.CheckRun, process: object, name: str) -> dict[str, Any]:
        path = tmp_path / "gpu-check.json"
        seen.append(list(json.loads(path.read_text())["details"]) if path.exists() else [])
        check = {"what": "curve", "value": 0.0, "at_most": 1.0, "right": name != "machine" or len(seen) > 2}
        return {"checks": [check], "tables": {}, "figures": {}, "outcome": "done", "seconds": 1.0}

    monkeypatch.setattr(gpu_check, "run_part", run_part)
    monkeypatch.setattr(gpu_check, "LANES", [{"machine": 0, "loader": 0}])
    words = ["--device", "cpu", "--small", "--output", str(tmp_path)]
    with pytest.raises(WorkError, match=r"The check failed in machine\."):
        gpu_check.check(["machine", "loader", *words])
    gpu_check.check(["machine", *words])
    assert (seen[0], seen[2]) == ([], ["machine", "loader"])
    assert "2 of 2 checks hold" in (tmp_path / "gpu-check.md").read_text()
    (tmp_path / "gpu-check.json").write_text("{")
    with pytest.raises(RequestError, match=r"gpu-check\.json is damaged or from .*, so no parts can be added to it"):
        gpu_check.check(["machine", *words])


def test_a_part_named_twice_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part is named by itself and as a member of its half. Its result is awaited only once."""
    ran = []

    def run_part(run: gpu_check.CheckRun, process: object, name: str) -> dict[str, Any]:
        ran.append(name)
        return {"checks": [], "tables": {}, "figures": {}, "outcome": "done", "seconds": 1.0}

    monkeypatch.setattr(gpu_check, "run_part", run_part)
    words = ["first", "machine", "--device", "cpu", "--small", "--output", str(tmp_path)]
    check = threading.Thread(target=gpu_check.check, args=[words], daemon=True)
    check.start()
    check.join(60)
    assert not check.is_alive(), "the check still waits"
    assert sorted(ran) == sorted(name for lane in HALVES["first"] for name in lane)


def test_a_failed_compilation_is_recorded_and_the_rest_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is listed in the table, the rest runs, and the part fails at its end."""

    def measure(setting: StepSetting, *_: object) -> Result:
        if setting.compile:
            raise RuntimeError("no working C compiler was found\nand more")
        return Result(setting, 10.0, 1.0, 0.5)

    monkeypatch.setattr(speed, "measure", measure)
    found = Findings(tmp_path / "part.json")
    speed.training(SETUP, found, 1, 0, (False, True))
    eager, compiled = found.tables["steps"]
    assert eager["per_second"] == 10.0 and "per_second" not in compiled
    assert compiled["note"] == "failed: RuntimeError: no working C compiler was found" == f"failed: {found.failed[0]}"
    text = page(gpu_check.planner_file("CPU", {"training-large": as_part(found)}), [], 1.0)
    assert text.count("no working C compiler") == 1

    steps = []

    def profile_step(setup: Setup, found: Findings, setting: StepSetting, batch: int) -> None:
        steps.append(setting)
        if len(steps) == 1:
            raise RuntimeError("no working C compiler was found")

    monkeypatch.setattr(speed, "profile_step", profile_step)
    speed.profiling(SETUP, found)
    assert len(steps) == 2 and not steps[1].compile and len(found.failed) == 2


def as_part(found: Findings) -> dict[str, Any]:
    return {**json.loads(found.path.read_text()), "outcome": "done", "seconds": 1.0}


def test_a_part_with_a_caught_error_fails_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(setup: Setup, found: Findings) -> None:
        with found.tried("rows", what="first"):
            raise ValueError("broken")
        found.row("rows", what="second")

    monkeypatch.setitem(PARTS, "loader", replace(PARTS["loader"], run=half))
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    with pytest.raises(RuntimeError, match="ValueError: broken"):
        PartRun("loader", "cpu", False, 60.0, tmp_path / "part.json")()
    assert [row["what"] for row in json.loads((tmp_path / "part.json").read_text())["tables"]["rows"]] == [
        "first",
        "second",
    ]


def test_unknown_parts_and_a_missing_gpu_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"Unknown part: drawing\. Choose from machine, profile"):
        gpu_check.check(["drawing", "--device", "cpu", "--output", str(tmp_path)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match=r"torch finds no GPU on this machine\. Rehearse the check"):
        gpu_check.check(["--output", str(tmp_path)])


@pytest.mark.parametrize("device", ["cuda:1", "gpu"])
def test_other_devices_are_rejected(device: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=rf"`--device {device}` is not supported\. .*CUDA_VISIBLE_DEVICES"):
        gpu_check.check(["machine", "--device", device, "--output", str(tmp_path)])


def test_unreadable_files_are_reported_before_parts_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words after a file are parts."""
    monkeypatch.setattr(gpu_check, "run_part", lambda *_: pytest.fail("a part ran"))
    good = "configs/plan/measured-h200.json"
    with pytest.raises(RequestError, match=r"The benchmark file missing\.json does not exist"):
        gpu_check.check(["--device", "cpu", "--compare", good, "--compare", "missing.json", "--output", str(tmp_path)])
    options = gpu_check.parse(["--compare", good, "machine"])
    assert (options.compare, options.parts) == ([good], ["machine"])


@pytest.mark.parametrize(
    ("words", "minutes", "limit"),
    [
        ([], 18, 60),
        (["first"], 9, 60),
        (["machine", "draws"], 9, 60),
        (["machine", "decoding"], 18, 60),
        (["--minutes", "36"], 36, 120),
        (["first", "--minutes", "6"], 6, 60),
    ],
)
def test_the_default_budget_is_nine_minutes_for_each_half(
    words: list[str], minutes: float, limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []

    def run_parts(run: gpu_check.CheckRun, names: list[str]) -> Generator[tuple[str, dict[str, Any]], None, None]:
        runs.append(run)
        yield from ()

    monkeypatch.setattr(gpu_check, "run_parts", run_parts)
    gpu_check.check([*words, "--device", "cpu", "--output", str(tmp_path)])
    assert runs[0].minutes == minutes and runs[0].seconds_for("machine") == limit


def test_a_family_that_runs_out_of_memory_is_listed_and_does_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(phase: FamilyPhase, setup: Setup, folder: Path, how: str) -> dict[str, Any]:
        if how == "eager":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return {"per_second": 10.0}

    monkeypatch.setattr(FamilyPhase, "measure", measure)
    found = Findings(tmp_path / "part.json")
    FamilyPhase("sd3", 1).run(SETUP, found)
    eager, blocks = found.tables["families"]
    assert eager == {"family": "sd3", "phase": 1, "compiled": "eager", "note": "out of memory"}
    assert blocks["per_second"] == 10.0 and not found.failed


def test_settings_are_skipped_for_lack_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first setting always runs."""
    timed = []

    def measure(setting: StepSetting, *_: object) -> Result:
        timed.append(setting)
        return Result(setting, 10.0, 1.0, 0.5)

    monkeypatch.setattr(speed, "measure", measure)
    found = Findings(tmp_path / "part.json", seconds=0.0)
    speed.training(SETUP, found, 1, 0, (True, False))
    assert len(timed) == 1 and [row["note"] for row in found.tables["steps"]][1:] == ["skipped for lack of time"]


def test_difference_of_curves() -> None:
    assert apart([1.0, 2.0], [1.0]) == float("inf")
    assert apart([2.0, 1.5], [2.0, 1.0]) == 0.25


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "convolution"),
        ("cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized>", "convolution"),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "product"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("triton_red_fused_native_group_norm_silu_12", "reduction"),
        ("triton_poi_fused__to_copy_add_7", "pointwise"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>", "optimizer"),
        ("Memcpy HtoD (Pinned -> Device)", "copy"),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<direct_copy_kernel_cuda>>", "copy"),
        ("a_kernel_of_tomorrow", "other"),
        # names of operators, from the profile of a CPU and from the counter of FLOPs
        ("aten::_to_copy", "copy"),
        ("aten::native_group_norm_backward", "reduction"),
        ("aten::_softmax", "reduction"),
        ("aten::_scaled_dot_product_flash_attention_backward", "attention"),
        ("aten.addmm", "product"),
        ("aten.convolution_backward", "convolution"),
    ],
)
def test_classes_of_kernels(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_flops_of_stable_diffusion_2_by_class() -> None:
    """Compare with TFLOP counted independently, operation by operation, for 32 images at 512 px."""
    counted = speed.step_flops(Setup(torch.device("cpu"), small=False), 32)
    found = {name: round(flops / 1e12, 1) for name, flops in counted.items()}
    assert sum(found.values()) == pytest.approx(32 * 3 * 0.8043, rel=0.01)
    assert found["convolution"] == pytest.approx(40.2, rel=0.03)
    assert found["attention"] < found["product"] < found["convolution"]


def test_one_part_at_a_time_is_quiet(tmp_path: Path) -> None:
    first, second = (Setup(torch.device("cpu"), True, tmp_path / "lock") for _ in range(2))
    order, held = [], threading.Event()

    def wait() -> None:
        held.wait()
        with second.quiet():
            order.append("second")

    other = threading.Thread(target=wait)
    other.start()
    with first.quiet():
        held.set()
        time.sleep(0.2)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
