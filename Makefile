# Everything here sets itself up in .venv with plain pip: `make demo` and `make test` are all
# that a new clone needs. Versions below are those of this project's own development only;
# the package itself has floors and no exact pins (pyproject.toml).

VENV ?= .venv
# A CPU build is taken where pip finds one, a CUDA build works as well. Override it like this:
#   make test TORCH="torch --index-url <PyTorch's index of CPU wheels>"
TORCH ?= torch==2.13.0
MEGATRON ?= megatron-core==0.16.1
# Leave empty for the first Python 3.10 or newer that can make virtual environments.
PYTHON ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --quiet
CKPT := $(VENV)/bin/ckpt
CODE := ckpt tests examples tools benchmarks
# Tests and examples are checked where they have types; fixtures come without.
UNTYPED := --allow-untyped-defs --allow-incomplete-defs --allow-untyped-calls
UNTYPED += --no-check-untyped-defs --no-warn-unused-ignores --cache-dir .mypy_cache/tests
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test lint format docs bench bench-bridge bench-full-scale install install-megatron
.PHONY: test-slow test-store test-ray test-megatron-slow test-megatron test-vllm test-transformers4 test-gpu engine test-wheel test-pythons clean

help:
	@echo "make demo    convert, check and serve the example checkpoint"
	@echo "make test    the default tests; no GPU, no vLLM, no megatron-core"
	@echo "make lint    ruff and mypy"
	@echo "make docs    write docs/cli.md and docs/support.md"
	@echo "make bench   time the conversion beside cp and a naive conversion; SIZE=8GB for large ones"
	@echo "make bench-full-scale   time inspect and --plan on checkpoints of 1 to 11 TB, all holes"
	@echo "also:        test-slow test-store test-ray test-megatron test-vllm test-transformers4 test-gpu test-wheel test-pythons format clean"

demo: $(VENV)/.app
	$(CKPT) run pipeline.yaml

test: $(VENV)/.test
	$(PY) -m pytest -n 2 --dist loadfile -m "not slow and not vllm and not megatron and not gpu and not store and not ray"

test-slow: $(VENV)/.test
	$(PY) -m pytest -n 2 --dist load -m "slow and not vllm and not megatron and not gpu and not store and not ray"

test-ray: $(VENV)/.ray
	$(PY) -m pytest -m "ray and not gpu"

test-store: $(VENV)/.store
	$(PY) -m pytest -m "store and not gpu"

test-megatron: $(VENV)/.megatron
	$(PY) -m pytest -n 2 --dist loadfile -m "megatron and not slow and not vllm and not gpu"

test-megatron-slow: $(VENV)/.megatron
	$(PY) -m pytest -n 2 --dist loadfile -m "megatron and slow and not vllm and not gpu"

engine: $(VENV)/.app
	$(CKPT) engine install vllm

test-vllm: $(VENV)/.test engine
	$(PY) -m pytest -m "vllm and not megatron and not gpu"

test-transformers4: $(VENV)/transformers4
	$(PY) -m pytest tests/test_transformers4.py --transformers4 $<

test-gpu: $(VENV)/.megatron
	$(PY) -m pytest -m gpu

test-wheel: $(VENV)/.test
	$(PY) tools/check_wheel.py

test-pythons: $(VENV)/.test
	$(PY) tools/check_pythons.py

lint: $(VENV)/.lint
	$(PY) -m ruff check $(CODE)
	$(PY) -m ruff format --check $(CODE)
	$(PY) -m mypy
	$(PY) -m mypy $(UNTYPED) tests examples

format: $(VENV)/.lint
	$(PY) -m ruff format $(CODE)
	$(PY) -m ruff check --fix $(CODE)

docs: $(VENV)/.app
	$(PY) tools/make_docs.py

bench-full-scale: $(VENV)/.app
	$(PY) benchmarks/full_scale.py

# SIZE=8GB ROUNDS=5 is the measurement of docs/performance.md; BENCH adds further options.
bench: $(VENV)/.app
	$(PY) benchmarks/bench_convert.py $(SIZE:%=--size %) $(ROUNDS:%=--rounds %) $(BENCH)

# The same with mbridge, which needs megatron-core and runs on a CPU with stand-ins.
bench-bridge: $(VENV)/mbridge
	$(MAKE) bench BENCH="--bridge $(VENV)/mbridge $(BENCH)"

install: $(VENV)/.app
install-megatron: $(VENV)/.megatron

# A stamp for each step: reruns are instant, and a changed pyproject.toml installs anew.
# torch comes first and by itself, so that no other package chooses its build.
$(VENV)/.torch:
	tools/make_venv.sh $(VENV) $(PYTHON)
	$(PIP) install "pip>=25.1"
	$(PIP) install $(TORCH)
	@touch $@

$(VENV)/.app: $(VENV)/.torch pyproject.toml
	$(PIP) install -e ".[serving]"
	@touch $@

$(VENV)/.test: $(VENV)/.app
	$(PIP) install --group test
	@touch $@

$(VENV)/.ray: $(VENV)/.test
	$(PIP) install -e ".[ray]"
	@touch $@

$(VENV)/.store: $(VENV)/.test
	$(PIP) install --group store
	@touch $@

# The last transformers 4, beside the newer one and without what it would change.
OLDER := transformers==4.57.3 "huggingface-hub<1.0" "tokenizers<0.23" requests urllib3 idna
OLDER += charset-normalizer certifi
$(VENV)/transformers4: $(VENV)/.test
	$(PIP) install --no-deps --target $@ $(OLDER)

$(VENV)/mbridge: $(VENV)/.megatron
	$(PIP) install --no-deps --target $@ mbridge==0.15.1 einops $(OLDER)

$(VENV)/.lint: $(VENV)/.app
	$(PIP) install --group test --group lint
	@touch $@

# Without its dependencies: it needs nothing that is not there, and must not change torch.
$(VENV)/.megatron: $(VENV)/.test
	$(PIP) install psutil
	$(PIP) install --no-deps $(MEGATRON)
	@touch $@

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache
