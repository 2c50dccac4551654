# `make` lists the targets. Everything runs in .venv, made from the Python that PYTHON names; nothing else is needed but make.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
CODE   := compiler ir passes backends autotune
WORKERS ?= 2
PYTEST = $(BIN)/pytest -n $(WORKERS) --dist worksteal
ZOO ?= zoo

.DEFAULT_GOAL := help
.PHONY: help demo test lint types fast slow thorough gpu cuda-zoo golden pages docs format digits clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/run  ## compile and run the digits model, show what it sees
	@$(BIN)/python examples/demo.py

test: lint types fast slow  ## everything that must hold: style, types, the tests that need no GPU

lint: $(VENV)/dev  ## style: ruff check and ruff format --check
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/dev .types  ## mypy --strict on all of dnnc
	@cd .types && MYPYPATH=. ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p dnnc

fast: $(VENV)/dev  ## the tests of the fast tier: under a minute
	@$(PYTEST) -m "not slow and not gpu"

slow: $(VENV)/dev  ## the other tests that need no GPU
	@$(PYTEST) -m "slow and not thorough and not gpu"

thorough: $(VENV)/dev  ## the cases of families that they leave out, for changes of passes, schedules and emission
	@$(PYTEST) -m "thorough and not gpu"

gpu: $(VENV)/dev  ## the tests that need a CUDA device
	@$(BIN)/pytest -m gpu

cuda-zoo: $(VENV)/dev  ## compile the models of the folder ZOO for a GPU that need not be here; no kernel may spill
	@$(BIN)/python benchmarks/gpu/compile_zoo.py --models $(ZOO)

golden: $(VENV)/dev  ## write the golden files anew; read the diff before you commit it
	@$(PYTEST) -m "not gpu" --update-golden

pages: $(VENV)/dev  ## regenerate the tables of docs: options, operators of ONNX and of PyTorch
	@$(BIN)/python -m dnnc.options > docs/options.md
	@$(BIN)/python -m dnnc ops --onnx --markdown > docs/operators.md
	@sed -i '/core ATen operators are supported/,$$d' docs/pytorch.md
	@$(BIN)/python -m dnnc.frontends.torch.coverage >> docs/pytorch.md

docs: $(VENV)/docs .types  ## build the documentation into site/; it needs no network
	@$(BIN)/mkdocs build --quiet
	@echo "site/index.html; to search it: $(BIN)/python -m http.server -d site"

format: $(VENV)/dev  ## lay the code out anew, sort imports
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

digits: $(VENV)/dev  ## train the model of the demo anew
	@$(BIN)/python examples/train_digits.py

clean:  ## remove the virtual environment and everything that was generated
	rm -rf $(VENV) .types build site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(wildcard $(CODE) tests examples benchmarks) -name __pycache__ -type d -prune -exec rm -rf {} +

# mypy does not see an editable install whose folders have other names than its packages, so it gets a tree of links: dnnc/ is compiler/
# with ir/, passes/ ... inside. The tree is made anew each time, for modules come and go.
# With PYTHONPATH=.types dnnc also runs where nothing can be installed; the metadata tell its version, and PyTorch of the backend.
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
INFO = .types/dnnc-$(VERSION).dist-info

.PHONY: .types
.types:
	@rm -rf .types && mkdir -p .types/dnnc
	@for f in compiler/*; do case $$f in */__pycache__) ;; *) ln -s ../../$$f .types/dnnc/ ;; esac; done
	@for d in $(filter-out compiler,$(wildcard $(CODE))); do ln -s ../../$$d .types/dnnc/; done
	@mkdir $(INFO) && printf 'Metadata-Version: 2.1\nName: dnnc\nVersion: $(VERSION)\n' > $(INFO)/METADATA
	@awk '/^\[project.entry-points./ {sub(/project.entry-points./, ""); on = 1; print; next} /^\[/ {on = 0} on {gsub(/"/, ""); print}' pyproject.toml > $(INFO)/entry_points.txt

# Two stamps: installed to run, installed to develop. pip's editable install follows the sources by itself, but leaves them uncompiled: where the
# shell forbids Python to write bytecode, each process would take a second more to start.
$(VENV)/run: pyproject.toml | $(BIN)/python
	@echo "installing dnnc into $(VENV)"
	@$(PIP) --editable .
	@$(BIN)/python -m compileall -q $(CODE)
	@touch $@

$(VENV)/dev: pyproject.toml | $(BIN)/python
	@echo "installing dnnc and the tools for its development into $(VENV)"
	@$(PIP) --editable ".[dev]"
	@$(BIN)/python -m compileall -q $(CODE)
	@touch $@ $(VENV)/run

$(VENV)/docs: pyproject.toml | $(BIN)/python
	@echo "installing the tools of the documentation into $(VENV)"
	@$(PIP) --editable ".[docs]"
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 10) and f"dnnc needs Python >= 3.10, this is {v}; try make PYTHON=python3.12")'
	@$(PYTHON) -m venv $(VENV)
