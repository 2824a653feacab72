# demo and test set up .venv alone; gpu uses the interpreter and packages that are there.
SHELL := /bin/bash
BIN := .venv/bin
PYTHON ?= python3
RANKS ?= 2
DEMO_ROWS ?= 300000
# One thread per rank: the ranks are the parallelism, and more threads than cores only fight.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo docs test tests-together test-slow test-plain test-versions lint bench gpu clean
help:
	@echo "make demo   generated data, $(RANKS) ranks, AUC against the best possible"
	@echo "make docs   the documentation site -> site/index.html"
	@echo "make test   lint, types, all tests but the slow ones"
	@echo "make test-slow  what those leave out: machines cut off, runs killed, long equality, make docs"
	@echo "make test-plain  the tests without FBGEMM, DALI and numba"
	@echo "make test-versions  the tests on the newest Python at hand, and on 3.12 with torch 2.11"
	@echo "make lint   the checks of make test that run nothing: format, style, types"
	@echo "make bench  what runs on this machine's CPU in minutes -> benchmarks/results/"
	@echo "make gpu    tests and benchmarks that need a GPU, with PYTHON=$(PYTHON) as it is"

.venv/.stamp: pyproject.toml .ci/setup
	@.ci/setup

# Four tests at a time, for many of them wait more than they compute; neighbours on one worker,
# which sets up once what a file shares.
PYTEST = -m pytest -n 4 --dist worksteal -m "not alone and not slow"
# The checks that run nothing go beside the start of the tests, and fail with them.
test: .venv/.stamp
	$(MAKE) --no-print-directory -j 2 lint tests-together
	$(BIN)/python -m pytest -m "alone and not slow"

tests-together: .venv/.stamp
	env -u MAKEFLAGS -u MFLAGS $(BIN)/python $(PYTEST)

test-slow: .venv/.stamp docs
	$(BIN)/python -m pytest -m slow

# On the torch kernel and memory maps, as where there are no wheels of the others.
test-plain: .venv-plain/.stamp
	.venv-plain/bin/python $(PYTEST)
	.venv-plain/bin/python -m pytest -m "alone and not slow"

.venv-plain/.stamp: pyproject.toml .ci/setup
	@PLAIN=1 VENV=.venv-plain .ci/setup

# Each in a virtual environment of its own, .venv-*.
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

# A broken link or reference is an error. So is a script, style or font from another host: the site
# works without network, the search included.
docs: .venv-docs/.stamp
	rm -rf site
	.venv-docs/bin/python -m sphinx --fail-on-warning --keep-going --quiet docs site
	.venv-docs/bin/python .ci/check_site.py site

.venv-docs/.stamp: pyproject.toml .ci/setup
	@PLAIN=1 EXTRAS=docs VENV=.venv-docs .ci/setup

# With what each is given; cpu_criteo needs genuine rows, named by SBPFLOW_CRITEO_ROWS.
CPU_BENCHMARKS = "boxing --ranks $(RANKS) --output benchmarks/results/boxing.jsonl" \
    "engine kernel" "engine rows" "stages --shape dcnv2" "data loader" "cpu_criteo"

bench: .venv/.stamp
	@status=0; for words in $(CPU_BENCHMARKS); do \
	    echo "== benchmarks.$$words"; $(BIN)/python -m benchmarks.$$words || status=1; \
	done; exit $$status

# With the interpreter and packages that are there; what lacks is said. Time on such a machine is
# rare, so each part runs whatever became of the others.
gpu:
	@$(PYTHON) -m benchmarks.gpu

clean:
	rm -rf .venv .venv-* .demo site build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
