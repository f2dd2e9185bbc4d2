# Two commands set everything up on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SEED ?= 0

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -r requirements.txt
	touch $@

install: $(VENV)/installed

# Warm-up, stage 1, stage 2, evaluation and the page, on the built-in world. A few minutes on a laptop.
train: install
	$(BIN)/accelerate launch --config_file configs/cpu.yaml train.py --stage 1,2 --evaluate --world_seed $(SEED) --seed $(SEED)
	$(BIN)/python view.py runs/ur2-world$(SEED)-seed$(SEED)

# Everything but the long learning runs; `make slow` runs those.
test: install
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not trust"

slow: install
	$(BIN)/python -m pytest -q -n 2 -m slow

# Every fault of docs/trust.md, and writes there what was seen. About an hour.
trust: install
	$(BIN)/python -m pytest -q -n 2 -m fault --trust

# Which of the papers' claims hold in the built-in world. Goes on where it was interrupted.
ablate: install
	$(BIN)/python -m lab.ablate

clean:
	rm -rf runs .pytest_cache .ruff_cache

.PHONY: install train test slow trust ablate clean
