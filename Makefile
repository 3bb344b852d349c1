# make serve · make test · make eval · make venv      each sets up .venv by itself
PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
ARGS   ?=

.PHONY: serve test test-slow gpu-test lint eval venv browser clean

serve: venv
	$(PY) serve.py $(ARGS)

test: venv lint
	$(PY) -m pytest $(ARGS)

test-slow: venv
	$(PY) -m pytest -m slow --no-shares $(ARGS)

# On a machine with a GPU: the kernels and the engine on it, then the sweep beside PyTorch's own kernels.
gpu-test: venv
	$(PY) -c "import torch; assert torch.cuda.is_available(), 'torch sees no CUDA or HIP device'"
	$(PY) -m pytest -m "slow or not slow" --no-shares tests/kernels/on_device tests/test_engine.py tests/test_main_job.py
	$(PY) -m evals.kernels --run $(ARGS)

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Ten minutes: the README's table and plot on this machine. The lines go to results/, the report to evals/report/.
EVAL ?= --workloads chat,code,extract --num-prompts 8 --max-tokens 48 --concurrency 1,8 --methods ngram,auto --k 4 --adaptive --dtype bfloat16
EVAL_FILE := results/readme.jsonl
eval: venv
	rm -f $(EVAL_FILE)
	$(PY) -m evals.speedup $(EVAL) --minutes 8 --out $(EVAL_FILE) $(ARGS)
	$(PY) -m evals.report $(EVAL_FILE) --out evals/report --readme README.md

venv: $(VENV)/.ready

# The build of torch that is pinned decides everything else, so it goes in first.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --disable-pip-version-check -c constraints.txt torch
	$(VENV)/bin/pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# What the tests of the page need beyond `make venv`; without it they are skipped, and say so.
browser: venv
	$(VENV)/bin/pip install --disable-pip-version-check -c constraints.txt playwright
	command -v chromium || (apt-get update && apt-get install -y --no-install-recommends chromium)

clean:
	rm -rf $(VENV) build dist *.egg-info
