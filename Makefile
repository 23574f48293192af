# latentmill: encode once, train lean. `make help` lists what can be typed.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
NPROC ?= 1
ARGS ?=

comma := ,
# FAMILY=sana reads configs/sana/; without it the configs are Stable Diffusion 2's
FAMILIES := $(notdir $(patsubst %/,%,$(dir $(wildcard configs/*/precompute.yaml))))
CONFIGS := configs$(FAMILY:%=/%)
PHASE_CONFIG = $(or $(CONFIG),$(if $(PHASE),$(CONFIGS)/phase$(PHASE).yaml))
NEAREST := import difflib, sys; near = difflib.get_close_matches(sys.argv[1], sys.argv[2:], 1, 0.4)
nearest = $(shell $(PYTHON) -c '$(NEAREST); print(f"; did you mean {near[0]}?" if near else "")' $(1) $(FAMILIES))
$(if $(filter-out $(FAMILIES),$(FAMILY)),$(error there is no family $(FAMILY) (it would be a folder configs/$(FAMILY))$(call nearest,$(FAMILY)); there are $(FAMILIES)))

# What a target cannot do without is asked for before anything is installed or run.
# $(call needs,TARGET,VARIABLE,what to type)
needs = $(if $(filter $(1),$(MAKECMDGOALS)),$(if $($(2)),,$(error $(3))))
$(call needs,select,METADATA,say which metadata: make select METADATA=FILE_OR_FOLDER [OUT=runs/data/selected] [ARGS="--a.b value"])
$(call needs,precompute,SHARD,say which shards: make precompute SHARD=00000-00099 (or SHARD=all) [CONFIG=path.yaml] [ARGS="--a.b value"])
$(call needs,train,PHASE_CONFIG,say which phase: make train PHASE=1 (or PHASE=2$(comma) or CONFIG=path.yaml) [NPROC=8] [ARGS="--a.b value"])
$(call needs,sample,RUN,say of which model: make sample RUN=runs/phase2 PROMPTS=prompts.txt [CONFIG=path.yaml] [ARGS="--a.b value"])
$(call needs,evaluate,RUN,say which model: make evaluate RUN=runs/phase2 [PROMPTS=prompts.txt] [CONFIG=path.yaml] [ARGS="--a.b value"])
$(call needs,watch,RUN,say which run: make watch RUN=runs/phase2 PROMPTS=prompts.txt [CONFIG=path.yaml] [ARGS="--a.b value"])
$(call needs,watch,PROMPTS,say which prompts: make watch RUN=$(RUN) PROMPTS=prompts.txt [CONFIG=path.yaml] [ARGS="--a.b value"])
$(call needs,report,RUN,say which runs: make report RUN="runs/phase1 runs/phase2" [OUT=runs/report.html] [ARGS="--price_per_hour 2"])
$(call needs,sample,PROMPTS,say which prompts: make sample RUN=$(RUN) PROMPTS=prompts.txt [CONFIG=path.yaml] [ARGS="--a.b value"])
$(call needs,study,A,say which sample sets: make study A=runs/a/evaluations/… B=runs/b/evaluations/… [C=… D=…] [OUT=runs/study] [CONFIG=path.yaml] [ARGS="--a.b value"])
$(call needs,study,B,say which sample sets: make study A=$(A) B=runs/b/evaluations/… [C=… D=…] [OUT=runs/study] [CONFIG=path.yaml] [ARGS="--a.b value"])
$(if $(filter train,$(MAKECMDGOALS)),$(if $(filter-out 1,$(NODES)),$(if $(SLURM_JOB_ID)$(HOSTS),,$(error NODES=$(NODES) needs an allocation of Slurm (salloc -N $(NODES), or in an sbatch script), or HOSTS=hosts.txt, a host to a line, which ssh reaches. docs/how-to/cluster.md has both, and what to type where there is neither))))
$(if $(filter train,$(MAKECMDGOALS)),$(if $(HOSTS),$(if $(wildcard $(HOSTS)),,$(error there is no $(HOSTS): HOSTS is a file with a host to a line))))
$(if $(filter train,$(MAKECMDGOALS)),$(if $(wildcard $(PHASE_CONFIG)),,$(error there is no $(PHASE_CONFIG): say PHASE=1 or PHASE=2, or CONFIG=path.yaml)))

.PHONY: help setup demo test test-slow-cpu test-browser test-faults test-alerts test-slurm test-container test-families test-quantised test-install test-oldest test-gpu-check bench gpu-check check-lock lint docs select download precompute train sample evaluation watch report study plan lock clean

help:
	@echo "make demo                                     everything, on a picture world of its own (no GPU; 13 to 28 minutes on 2 cores)"
	@echo "make test                                     every test"
	@echo "make test-slow-cpu [WHAT=demo]                the tests, or the demo, as on a CPU with AVX2 alone"
	@echo "make test-browser                             the study's page in Chromium (apt-get install chromium)"
	@echo "make test-faults                              the long suites: kills, full disks, flipped bits, hostile pictures"
	@echo "make test-alerts                              the alert rules, and a live job under Prometheus (apt-get install prometheus)"
	@echo "make test-slurm                               both stages under Debian's Slurm, in namespaces, and OpenSSH (root; installs them)"
	@echo "make test-container                           the image, built and both stages run in it (root; installs buildah)"
	@echo "make test-families                            each model family: as its pipeline, as online, on 1, 2 and 4 processes"
	@echo "make test-quantised                           text towers in int8 and float8 (installs torchao into .torchao)"
	@echo "make test-install [PYTHONS=\"3.11 3.12 3.13\"]  the wheel with every extra, in fresh environments"
	@echo "make test-oldest                              the oldest versions allowed, in .venv-oldest"
	@echo "make test-gpu-check [ARGS=\"--python 3.12\"]   the GPU check on the CPU, from a clean export, beside torch alone"
	@echo "make bench                                    the benchmarks of both stages, into runs/benchmarks.md (idle machine)"
	@echo "make gpu-check [OUT=runs/gpu-check]           ten minutes on a new GPU: is it right, how fast, where does time go"
	@echo "make select METADATA=laion/ [OUT=runs/data/selected]"
	@echo "                                              LAION metadata -> filtered rows"
	@echo "make download [IN=runs/data/selected] [OUT=runs/data/tars]"
	@echo "                                              rows -> verified tars of pictures and captions"
	@echo "make precompute SHARD=00000-00099             tars -> latents (a Ray job; RAY_ADDRESS joins a cluster)"
	@echo "make train PHASE=1 [CONFIG=...] [NPROC=8] [NODES=2] [HOSTS=hosts.txt]"
	@echo "                                              latents -> U-Net; the same command again resumes"
	@echo "make sample RUN=runs/phase2 PROMPTS=prompts.txt"
	@echo "                                              a checkpoint, an export or a hub pipeline -> pictures (a Ray job)"
	@echo "make evaluate RUN=runs/phase2 [PROMPTS=...]   the same, and metrics with 95 % intervals against a reference"
	@echo "make study A=runs/a/evaluations/... B=... [C=...] [OUT=runs/study]"
	@echo "                                              a page on which raters compare the models' pictures, blind"
	@echo "make watch RUN=runs/phase2 PROMPTS=...        the same for each checkpoint as it appears, while training goes on"
	@echo "make report RUN=\"runs/phase1 runs/phase2\"    what is known of runs, on one page"
	@echo "make plan [GPUS=128]                          days, cost and storage, before a GPU is rented"
	@echo "make docs                                     writes docs/reference/config.md and docs/diagram.svg anew"
	@echo "make setup | lint | lock | clean"
	@echo "FAMILY=sana for precompute, train and plan reads configs/sana/; there are $(FAMILIES)"
	@echo 'ARGS="--a.b value" overrides any field of the config that a target reads.'

setup: $(STAMP)

# .venv is made from the lock alone; nothing happens while neither it nor pyproject.toml changes.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"error: Python 3.11, 3.12 or 3.13 is needed, and $(PYTHON) is {v[0]}.{v[1]}. Try: make PYTHON=python3.13 $(MAKECMDGOALS)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip sync --quiet --compile-bytecode --python $(BIN)/python requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-emit-package torchao --no-emit-index-url pyproject.toml
lock:
	$(LOCK) -o requirements.lock
	$(LOCK) --resolution lowest-direct -o requirements.oldest.lock
	$(MAKE) check-lock

# Every package of the lock has a wheel on each platform: nothing needs a compiler. uv checks foreign platforms as well.
PLATFORMS = x86_64-manylinux_2_28 aarch64-manylinux_2_28
check-lock: setup
	@for platform in $(PLATFORMS); do for version in 3.11 3.12 3.13; do \
	  $(BIN)/uv pip install --quiet --dry-run --no-deps --only-binary :all: --python-platform $$platform \
	    --python-version $$version --target build/check-lock -r requirements.lock || exit 1; \
	  echo "$$platform, Python $$version: wheels only"; done; done

demo: setup
	$(BIN)/python -m examples.shapes.demo $(ARGS)

# One thread per process; three of them keep two cores busy, as most tests start commands and wait for them.
# A test that hangs prints where all its threads stand, is ended after ten minutes, and the others go on.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
	  -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true --max-worker-restart 1 $(ARGS)

# the figures that it prints go into docs/evidence/reliability.md
test-faults: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m "(slow or faults) and not (browser or container or prometheus or quantised or slurm)" $(ARGS)

test-alerts: setup
	@command -v promtool prometheus >/dev/null || \
	  { echo "error: make test-alerts needs Prometheus and its promtool: apt-get install prometheus" >&2; exit 1; }
	promtool test rules deploy/prometheus/alerts_test.yml
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m prometheus $(ARGS)

# What runs without AVX-512 and AMX, on any x86 machine: oneDNN and ATen are held to AVX2, so that bfloat16 is emulated.
# WHAT=demo runs the demo so.
SLOW = ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2
WHAT ?= test
test-slow-cpu: setup
	$(SLOW) $(BIN)/python -m bench.precision
	$(SLOW) $(MAKE) $(WHAT) ARGS="$(ARGS)"

test-browser: setup
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	  echo "error: make test-browser needs Chromium: apt-get install chromium" >&2; exit 1
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser $(ARGS)

# a controller and two nodes on this machine; their network and processes are their own
SLURM = slurmctld slurmd slurm-client munge iproute2 openssh-client openssh-server
test-slurm: setup
	@PATH=$$PATH:/usr/sbin:/sbin; for name in slurmctld slurmd sbatch munged ip sshd; do command -v $$name >/dev/null || missing=1; done; \
	  test -z "$$missing" || { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $(SLURM); }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m slurm $(ARGS)

test-container: setup
	@command -v buildah mmdebstrap >/dev/null || { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends buildah mmdebstrap; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m container $(ARGS)

# every family, small, on 1, 2 and 4 processes
test-families: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m "slow or not slow" tests/families $(ARGS)

# beside .venv: where torchao is, diffusers loads it in every process
TORCHAO = torchao==0.18.0
test-quantised: setup
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target .torchao $(TORCHAO)
	PYTHONPATH=.torchao OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m quantised tests/precompute/encode $(ARGS)

PYTHONS ?= 3.11 3.12 3.13
test-install: setup
	$(BIN)/python -m tests.install --pythons $(PYTHONS) $(ARGS)

OLDEST = tests/precompute/encode/test_encoders.py tests/shards/base/test_config.py tests/shards/format/test_models.py \
  tests/test_end_to_end.py tests/train/test_cached_equals_online.py
test-oldest: .venv-oldest/.installed
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest $(OLDEST) $(ARGS)

.venv-oldest/.installed: requirements.oldest.lock pyproject.toml | setup
	test -x .venv-oldest/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-oldest
	$(BIN)/uv pip sync --quiet --python .venv-oldest/bin/python requirements.oldest.lock
	$(BIN)/uv pip install --quiet --python .venv-oldest/bin/python --no-deps --editable .
	@touch $@

test-gpu-check: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rehearsal $(ARGS)

bench: setup
	$(BIN)/python -m bench --output runs/benchmarks.md $(ARGS)

gpu-check: setup
	$(BIN)/python -m bench.gpu_check --output $(or $(OUT),runs/gpu-check) $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/diagram.py
	$(BIN)/python docs/families.py

select: setup
	$(BIN)/python -m precompute.select --config $(or $(CONFIG),configs/select.yaml) --metadata $(METADATA) $(if $(OUT),--output $(OUT)) $(ARGS)

download: setup
	$(BIN)/python -m precompute.download --config $(or $(CONFIG),configs/download.yaml) $(if $(IN),--input $(IN)) $(if $(OUT),--output $(OUT)) $(ARGS)

precompute: setup
	$(BIN)/python -m precompute --config $(or $(CONFIG),$(CONFIGS)/precompute.yaml) --shards $(SHARD) $(ARGS)

# The request is checked first, in one process: a launcher would bury the answer in its own traceback. One process needs
# no launcher, and gets its signals directly. accelerate silently starts one process where two are asked for on CPUs,
# unless it is told --multi_gpu.
# The launcher starts a job again whose process was lost, hands SIGTERM and SIGUSR1 on, and then leaves its processes LEAVE
# seconds to save.
RESTARTS ?= 3
LEAVE ?= 120
LAUNCH ?= $(if $(filter-out 1,$(NPROC)),--num_machines 1 --num_processes $(NPROC) --multi_gpu)
# Of several machines Slurm starts a task for each process: NODES of them with NPROC each, in its allocation.
# Without Slurm a launcher is started on each machine of HOSTS by ssh, or on the first NODES of them.
NODES ?= $(if $(HOSTS),$(shell grep -cEv '^[[:space:]]*(#|$$)' $(HOSTS)),1)
# A task that is lost ends the step; --kill-on-bad-exit would cut off a main process that is told to leave, and saves.
SRUN = srun --nodes $(NODES) --ntasks-per-node $(NPROC) --wait $(LEAVE)
STARTER = $(if $(HOSTS),--hosts $(HOSTS) $(NODES) $(NPROC),$(LAUNCH))
LAUNCHER = $(if $(BY_SRUN),-m train.launch --slurm,$(if $(STARTER),-m train.launch $(STARTER) --max_restarts $(RESTARTS) --mixed_precision no --dynamo_backend no --quiet))
BY_SRUN = $(if $(HOSTS),,$(filter-out 1,$(NODES)))
# A variable, so that `make -n train PHASE=1 | tail -1` prints the whole command on one line.
TRAIN_COMMAND = PET_SHUTDOWN_TIMEOUT=$(LEAVE) exec $(if $(BY_SRUN),$(SRUN)) $(BIN)/python $(LAUNCHER) \
  -m train --config $(PHASE_CONFIG) --num_processes $$(($(NODES) * $(NPROC))) $(ARGS)

train: setup
	$(BIN)/python -m train check --config $(PHASE_CONFIG) $(ARGS)
	$(TRAIN_COMMAND)

EVALUATE = --config $(or $(CONFIG),configs/evaluate.yaml) --model $(RUN) $(if $(PROMPTS),--prompts.file $(PROMPTS)) $(if $(OUT),--output $(OUT))
sample: setup
	$(BIN)/python -m evaluation sample $(EVALUATE) $(ARGS)

evaluate: setup
	$(BIN)/python -m evaluation score $(EVALUATE) $(ARGS)

empty :=
STUDY = --config $(or $(CONFIG),configs/study.yaml) $(if $(OUT),--output $(OUT)) $(ARGS)
study: setup
	$(BIN)/python -m evaluation.study prepare --sets $(subst $(empty) ,$(comma),$(strip $(A) $(B) $(C) $(D))) $(STUDY)
	$(BIN)/python -m evaluation.study serve $(STUDY)

watch: setup
	$(BIN)/python -m evaluation watch $(RUN) --config $(or $(CONFIG),configs/evaluate.yaml) --prompts.file $(PROMPTS) $(if $(OUT),--output $(OUT)) $(ARGS)

report: setup
	$(BIN)/python -m evaluation report $(RUN) --output $(or $(OUT),runs/report.html) $(ARGS)

plan: setup
	$(BIN)/python -m plan --config $(or $(CONFIG),$(CONFIGS)/plan.yaml) $(if $(GPUS),--gpus $(GPUS)) $(ARGS)

clean:
	rm -rf runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
