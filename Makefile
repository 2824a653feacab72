# demo and test set up .venv alone; gpu uses the interpreter and packages that are there.
SHELL := /bin/bash
BIN := .venv/bin
PYTHON ?= python3
RANKS ?= 2
DEMO_ROWS ?= 300000
# One thread per rank: the ranks are the parallelism, and more threads than cores only fight.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test lint bench gpu clean
help:
	@echo "make demo   generated data, $(RANKS) ranks, AUC against the best possible"
	@echo "make test   lint, types, all tests"
	@echo "make bench  benchmarks of this machine's CPU -> benchmarks/results/"
	@echo "make gpu    tests and benchmarks that need a GPU, with PYTHON=$(PYTHON) as it is"

.venv/.stamp: pyproject.toml .ci/setup
	@.ci/setup

# Two tests at a time, for many of them wait more than they compute.
test: lint
	$(BIN)/python -m pytest -n 2 -m "not alone"
	$(BIN)/python -m pytest -m alone

lint: .venv/.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright

TRAIN = $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) train_wdl.py --config configs/demo.yaml
demo: .venv/.stamp .demo/data/manifest.json
	$(TRAIN)
	$(TRAIN) model.deep=false optimizer.sparse.lr=0.02 run.dir=.demo/wide
	@$(BIN)/python .ci/demo_report.py .demo/wdl .demo/wide

.demo/data/manifest.json: | .venv/.stamp
	$(BIN)/python -m data synth --rows $(DEMO_ROWS) --vocab-scale 0.002 --output .demo/data

# Every file of these names runs, and writes to benchmarks/results/.
CPU_BENCHMARKS = $(patsubst benchmarks/%.py,benchmarks.%,$(wildcard benchmarks/cpu_*.py))

bench: .venv/.stamp
	@status=0; for module in $(CPU_BENCHMARKS); do \
	    echo "== $$module"; $(BIN)/python -m $$module || status=1; done; exit $$status

# With the interpreter and packages that are there; what lacks is said. Time on such a machine is
# rare, so each part runs whatever became of the others.
gpu:
	@$(PYTHON) -m benchmarks.gpu

clean:
	rm -rf .venv .demo build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
