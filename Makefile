# `make help` lists the targets, from the lines that start with ##.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
NPROC ?= 1
ARGS ?=

comma := ,
open := (
# Expand a leading ~/ here, because shells other than bash pass OUT=~/x unchanged.
$(foreach name,CONFIG METADATA IN OUT RUN PROMPTS A B C D,$(eval override $(name) := $$(patsubst ~/%,$$(HOME)/%,$$($(name)))))
# FAMILY=sana selects configs/sana/. Without FAMILY, the configs in configs/ itself are used: Stable Diffusion 2.
FAMILIES := $(notdir $(patsubst %/,%,$(dir $(wildcard configs/*/precompute.yaml))))
CONFIGS := configs$(FAMILY:%=/%)
PHASE_CONFIG = $(or $(CONFIG),$(if $(PHASE),$(CONFIGS)/phase$(PHASE).yaml))

# These mistakes are reported before anything is installed. The commands themselves report all others.
$(if $(filter-out $(FAMILIES),$(FAMILY)),$(error FAMILY=$(FAMILY) is not a folder in configs/. The families are $(FAMILIES)))
REQUIRED_select = METADATA
REQUIRED_precompute = SHARD
REQUIRED_train = PHASE_CONFIG
REQUIRED_sample = RUN PROMPTS
REQUIRED_evaluate = RUN
REQUIRED_watch = RUN PROMPTS
REQUIRED_report = RUN
REQUIRED_study = A B
HASH := \#
usage = $(shell sed -n 's/^$(HASH)$(HASH) \(make $(1) [^|]*[^ |]\) *|.*/\1/p' Makefile)
$(foreach goal,$(MAKECMDGOALS),$(foreach name,$(REQUIRED_$(goal)),$(if $($(name)),,$(error make $(goal) needs $(name:PHASE_CONFIG=PHASE or CONFIG). Usage: $(call usage,$(goal))))))
ifneq ($(filter train,$(MAKECMDGOALS)),)
$(if $(HOSTS),$(if $(wildcard $(HOSTS)),,$(error HOSTS=$(HOSTS) does not exist. HOSTS must be a file with one host name per line)))
$(if $(filter-out 1,$(NODES)),$(if $(SLURM_JOB_ID)$(HOSTS),,$(error NODES=$(NODES) needs a Slurm allocation (salloc -N $(NODES)$(comma) or an sbatch script)$(comma) or HOSTS=hosts.txt for machines reachable by ssh. See docs/how-to/cluster.md)))
endif

TARGETS := $(shell sed -n 's/^\([a-z][a-z-]*\):.*/\1/p' Makefile)
.PHONY: $(TARGETS)

help:
	@awk -F ' *[|] *' '/^## / { usage = substr($$1, 4); if (length(usage) < 46) printf "%-46s%s\n", usage, $$2; else printf "%s\n%46s%s\n", usage, "", $$2 }' Makefile
	@echo
	@echo 'ARGS="--a.b value" overrides any field of the target'"'"'s config; CONFIG=path.yaml replaces the config.'
	@echo "With precompute, train and plan, FAMILY=sana selects configs/sana/. Families: $(FAMILIES)"

## make setup                     | install .venv from requirements.lock; other targets do this first
setup: $(STAMP)

# .venv is built from the lock alone, and only if the lock or pyproject.toml has changed.
$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) deploy/setup.py $(MAKECMDGOALS)
	@touch $@

## make demo                      | run everything on a generated dataset, without a GPU (9 to 15 minutes on 2 cores)
demo: setup
	$(BIN)/python -m examples.shapes.demo $(ARGS)

## make select METADATA=metadata/ [OUT=runs/data/selected] | select rows of a dataset of URLs to download
select: setup
	$(BIN)/python -m precompute.select --config "$(or $(CONFIG),configs/select.yaml)" --metadata "$(METADATA)" $(if $(OUT),--output "$(OUT)") $(ARGS)

## make download [IN=runs/data/selected] [OUT=runs/data/tars] | download the selected rows into verified tars
download: setup
	$(BIN)/python -m precompute.download --config "$(or $(CONFIG),configs/download.yaml)" $(if $(IN),--input "$(IN)") $(if $(OUT),--output "$(OUT)") $(ARGS)

## make precompute SHARD=00000-00099 | encode tars into latents with a Ray job; SHARD=all encodes every tar
precompute: setup
	$(BIN)/python -m precompute --config "$(or $(CONFIG),$(CONFIGS)/precompute.yaml)" --shards $(SHARD) $(ARGS)

# The request is checked first, in one process, because a launcher would bury an error in its own traceback. A single
# process needs no launcher and receives signals directly. Without --multi_gpu, Accelerate silently starts only one
# process on CPUs, even if two are requested.
# The launcher restarts the job if a process dies. It forwards SIGTERM and SIGUSR1, and then waits LEAVE seconds for its
# processes to save a checkpoint.
RESTARTS ?= 3
LEAVE ?= 120
LAUNCH ?= $(if $(filter-out 1,$(NPROC)),--num_machines 1 --num_processes $(NPROC) --multi_gpu)
# On several machines, Slurm starts one task per process on NODES nodes of its allocation, NPROC on each.
# Without Slurm, a launcher is started by ssh on each machine of HOSTS, or on the first NODES of them.
NODES ?= $(if $(HOSTS),$(shell grep -cEv '^[[:space:]]*($(HASH)|$$)' $(HOSTS)),1)
# No --kill-on-bad-exit, which would kill a main process that is saving a checkpoint.
# Since Slurm 22.05, srun does not inherit --cpus-per-task from the allocation. It is passed on only if the allocation has
# as many tasks on each node as this step: SLURM_TASKS_PER_NODE is 8 on one node, and 8(x2) on two.
CPUS_PER_TASK = $(if $(filter $(NPROC) $(NPROC)$(open)x%,$(SLURM_TASKS_PER_NODE)),$(SLURM_CPUS_PER_TASK:%= --cpus-per-task %))
SRUN = srun --nodes $(NODES) --ntasks-per-node $(NPROC)$(CPUS_PER_TASK) --wait $(LEAVE)
STARTER = $(if $(HOSTS),--hosts $(HOSTS) $(NODES) $(NPROC),$(LAUNCH))
LAUNCHER = $(if $(BY_SRUN),-m train.launch --slurm,$(if $(STARTER),-m train.launch $(STARTER) --max_restarts $(RESTARTS) --mixed_precision no --dynamo_backend no --quiet))
BY_SRUN = $(if $(HOSTS),,$(filter-out 1,$(NODES)))
# a variable, so that `make -n train PHASE=1 | tail -1` prints the whole command on one line
TRAIN_COMMAND = PET_SHUTDOWN_TIMEOUT=$(LEAVE) exec $(if $(BY_SRUN),$(SRUN)) $(BIN)/python $(LAUNCHER) \
  -m train --config "$(PHASE_CONFIG)" --num_processes $$(($(NODES) * $(NPROC))) $(ARGS)

## make train PHASE=1 [CONFIG=path.yaml] [NPROC=8] [NODES=2] [HOSTS=hosts.txt] | train a backbone; run it again to resume
train: setup
	$(BIN)/python -m train check --config "$(PHASE_CONFIG)" $(ARGS)
	$(TRAIN_COMMAND)

EVALUATE = --config "$(or $(CONFIG),configs/evaluate.yaml)" --model "$(RUN)" $(if $(PROMPTS),--prompts.file "$(PROMPTS)") $(if $(OUT),--output "$(OUT)")
## make sample RUN=runs/phase2 PROMPTS=prompts.txt | sample images from a run, an export or a hub pipeline with a Ray job
sample: setup
	$(BIN)/python -m evaluation sample $(EVALUATE) $(ARGS)

## make evaluate RUN=runs/phase2 [PROMPTS=prompts.txt] | sample images, and compute metrics with 95 % intervals
evaluate: setup
	$(BIN)/python -m evaluation score $(EVALUATE) $(ARGS)

STUDY = --config "$(or $(CONFIG),configs/study.yaml)" $(if $(OUT),--output "$(OUT)") $(ARGS)
## make study A=runs/a/evaluations/… B=runs/b/evaluations/… [C=…] [D=…] [OUT=runs/study] | serve a blind comparison to raters
study: setup
	$(BIN)/python -m evaluation.study prepare --sets "$(A),$(B)$(if $(C),$(comma)$(C))$(if $(D),$(comma)$(D))" $(STUDY)
	$(BIN)/python -m evaluation.study serve $(STUDY)

## make watch RUN=runs/phase2 PROMPTS=prompts.txt | evaluate every new checkpoint during training
watch: setup
	$(BIN)/python -m evaluation watch "$(RUN)" --config "$(or $(CONFIG),configs/evaluate.yaml)" --prompts.file "$(PROMPTS)" $(if $(OUT),--output "$(OUT)") $(ARGS)

## make report RUN="runs/phase1 runs/phase2" [OUT=runs/report.html] | show losses, metrics and samples of runs on one page
report: setup
	$(BIN)/python -m evaluation report $(RUN) --output "$(or $(OUT),runs/report.html)" $(ARGS)

## make plan [GPUS=128]           | estimate days, cost and storage of a training run
plan: setup
	$(BIN)/python -m plan --config "$(or $(CONFIG),$(CONFIGS)/plan.yaml)" $(if $(GPUS),--gpus $(GPUS)) $(ARGS)

## make clean                     | delete runs/, builds, and the caches of pytest, mypy, ruff and hypothesis
clean:
	rm -rf runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

## make lint                      | run ruff and mypy
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Each process takes whole files, in the order of tests/conftest.py. If a process dies, the run ends: xdist gives a process
# that it starts later no work and waits for it forever.
BY_FILE = --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# only packages whose tests need no other process, and of those only tests that take a few seconds at most
QUICK = tests/shards tests/plan tests/precompute/select tests/precompute/input tests/precompute/pixels tests/cluster \
  tests/train/data tests/train/model tests/train/objective tests/train/run/lease tests/train/test_config.py \
  tests/evaluation/metrics tests/test_rooms.py
## make quick                     | run ruff, mypy and the quick tests (about 90 s on two cores)
quick: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 $(BY_FILE) -m "not (slow or faults or heavy)" $(QUICK) $(ARGS)

# One thread per process. Four processes keep two cores busy, because many tests start commands and wait for them.
# A test that hangs ends the run after ten minutes, with a stack trace of all its threads.
## make test                      | run the tests
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 $(BY_FILE) -o faulthandler_timeout=600 \
	  -o faulthandler_exit_on_timeout=true $(ARGS)

# docs/evidence/reliability.md publishes the figures
## make test-faults               | run the long suites: kills, full disks, flipped bits, hostile images
test-faults: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 $(BY_FILE) \
	  -m "(slow or faults) and not (browser or container or float8 or prometheus or slurm)" $(ARGS)

## make test-alerts               | test the alert rules, and a live job under Prometheus (needs prometheus)
test-alerts: setup
	@command -v promtool prometheus >/dev/null || \
	  { echo "error: make test-alerts needs Prometheus and its promtool: apt-get install prometheus" >&2; exit 1; }
	promtool test rules deploy/prometheus/alerts_test.yml
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m prometheus $(ARGS)

# Limit oneDNN and ATen to AVX2, so that bfloat16 is emulated as on an x86 CPU without AVX-512 or AMX. Inductor's cache
# does not distinguish the two, and code for wider registers compiled for AVX2 computes wrong numbers.
SLOW = ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/runs/inductor-avx2
WHAT ?= test
## make test-slow-cpu [WHAT=demo]  | run the tests, or the demo, as on a CPU with only AVX2
test-slow-cpu: setup
	$(SLOW) $(BIN)/python -m bench.precision
	$(SLOW) $(MAKE) $(WHAT) ARGS="$(ARGS)"

## make test-browser              | test the study's page in Chromium (needs chromium)
test-browser: setup
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	  echo "error: make test-browser needs Chromium: apt-get install chromium" >&2; exit 1
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser $(ARGS)

# a controller and two nodes on this machine, in their own network and process namespaces
SLURM = slurmctld slurmd slurm-client munge iproute2 openssh-client openssh-server
## make test-slurm                | test both stages under Debian's Slurm, and over ssh (as root; installs both)
test-slurm: setup
	@PATH=$$PATH:/usr/sbin:/sbin; for name in slurmctld slurmd sbatch munged ip sshd; do command -v $$name >/dev/null || missing=1; done; \
	  test -z "$$missing" || { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $(SLURM); }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m slurm $(ARGS)

## make test-container            | build the image and run both stages in it (as root; installs buildah)
test-container: setup
	@command -v buildah mmdebstrap >/dev/null || { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends buildah mmdebstrap; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m container $(ARGS)

## make test-families             | compare every model family with its pipeline and online encoding, on 1, 2 and 4 processes
test-families: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m "slow or not slow" tests/families tests/test_docs.py $(ARGS)

# not into .venv, because diffusers would import an installed torchao in every process
TORCHAO = torchao==0.18.0
## make test-float8               | test training in float8, emulated on the CPU (installs torchao into .torchao)
test-float8: setup
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target .torchao $(TORCHAO)
	PYTHONPATH=.torchao OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s -m float8 tests/train/model tests/bench/gpu_check $(ARGS)

PYTHONS ?= 3.11 3.12 3.13
## make test-install [PYTHONS="3.11 3.12 3.13"] | test the wheel with its extras, in fresh environments
test-install: setup
	$(BIN)/python -m tests.install --pythons $(PYTHONS) $(ARGS)

OLDEST = tests/precompute/encode/test_encoders.py tests/shards/base/test_config.py tests/shards/format/test_models.py \
  tests/test_end_to_end.py tests/train/test_cached_equals_online.py tests/families/test_compiling.py
## make test-oldest               | test the oldest supported versions, in .venv-oldest
test-oldest: .venv-oldest/.installed
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest $(OLDEST) $(ARGS)

.venv-oldest/.installed: requirements.oldest.lock pyproject.toml | setup
	test -x .venv-oldest/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv-oldest
	$(BIN)/uv pip sync --quiet --python .venv-oldest/bin/python requirements.oldest.lock
	$(BIN)/uv pip install --quiet --python .venv-oldest/bin/python --no-deps --editable .
	@touch $@

## make test-gpu-check [ARGS="--python 3.12"] | rehearse the GPU check on a CPU, from a clean export
test-gpu-check: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rehearsal $(ARGS)

## make bench                     | benchmark both stages and write runs/benchmarks.md (on an idle machine)
bench: setup
	$(BIN)/python -m bench --output runs/benchmarks.md $(ARGS)

## make gpu-check [OUT=runs/gpu-check] | check a new GPU: correctness, speed, and where the time goes
gpu-check: setup
	$(BIN)/python -m bench.gpu_check --output "$(or $(OUT),runs/gpu-check)" $(ARGS)

## make docs                      | regenerate the config reference and the tables of model families in docs/
docs: setup
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/families.py

LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --all-extras --no-emit-package torchao --no-emit-index-url pyproject.toml
## make lock                      | update requirements.lock and requirements.oldest.lock
lock: | setup
	$(LOCK) -o requirements.lock
	$(LOCK) --resolution lowest-direct -o requirements.oldest.lock
	$(MAKE) check-lock

# Check that every locked package has a wheel for each platform, so that nothing needs a compiler.
PLATFORMS = x86_64-manylinux_2_28 aarch64-manylinux_2_28
check-lock: setup
	@for platform in $(PLATFORMS); do for version in 3.11 3.12 3.13; do \
	  $(BIN)/uv pip install --quiet --dry-run --no-deps --only-binary :all: --python-platform $$platform \
	    --python-version $$version --target build/check-lock -r requirements.lock || exit 1; \
	  echo "$$platform, Python $$version: wheels only"; done; done
