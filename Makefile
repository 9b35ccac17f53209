# Two commands do everything: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test doctor lint clean
demo: $(VENV)/.train            ## train on this machine, on the best path it has
	$(BIN)/grpo-portable train --auto
	@echo 'next: `. $(BIN)/activate`, then `grpo-portable recipes` says what else fits here'

test: $(VENV)/.test             ## lint, type-check and test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 2 --dist worksteal

doctor: $(VENV)/.base           ## what can this machine do?
	$(BIN)/grpo-doctor

lint: $(VENV)/.test
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info

# The base install is light: the doctor must run before gigabytes are chosen.
$(VENV)/.base: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q -e .
	touch $@

# torch comes first and apart: which build fits is the doctor's word (driver, card, platform; the CPU build without a GPU).
$(VENV)/.train: $(VENV)/.base
	$(PIP) install -q --retries 1 $$($(BIN)/python -m doctor --install-plan --pip-args)
	$(PIP) install -q -e '.[train]'
	touch $@

$(VENV)/.test: $(VENV)/.train
	$(PIP) install -q -e '.[train,test]'
	touch $@
