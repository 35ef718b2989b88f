# `make demo` and `make test` set up what they need in virtual environments of this directory.
# An active environment with torch and triton is used by the GPU targets, which install nothing.
PYTHON ?= python3
BIN := .venv/bin
OLDEST := .venv-oldest/bin
PIP_FLAGS := --quiet --disable-pip-version-check
# The interpreter replaces the compiler in a whole process, so it has one of its own; its small NumPy
# products only suffer from threads.
INTERPRETED := TRITON_INTERPRET=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: demo test test-oldest gpu-test bench lint clean
.DELETE_ON_ERROR:

demo: .venv/ready  ## a real prefill over FILES (default: this repository's documents)
	$(BIN)/python -m kda $(FILES)

test: .venv/ready  ## everything that needs no GPU, on the newest supported Triton and CuTeDSL
	$(BIN)/python -m pytest -m "not gpu"
	$(INTERPRETED) $(BIN)/python -m pytest -m "not gpu" tests/test_prefill.py tests/test_stages.py tests/test_segments.py tests/test_inputs.py

test-oldest: .venv-oldest/ready  ## the kernels on the oldest supported Triton and CuTeDSL
	$(OLDEST)/python -m pytest -m "not gpu" tests/test_compile.py tests/test_direct.py tests/test_cute_compile.py tests/test_cute_layouts.py tests/test_cute_cache.py
	$(INTERPRETED) $(OLDEST)/python -m pytest -m "not gpu" tests/test_stages.py

gpu-test:  ## on a Hopper GPU, with the active Python's torch and triton
	$(PYTHON) -m pytest -m gpu

bench:  ## on a Hopper GPU: every topic and the report; ARGS="--cases ... --providers ..."
	$(PYTHON) -m bench all $(ARGS)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-oldest

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	touch $@

.venv-oldest/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	$(OLDEST)/python -m pip install $(PIP_FLAGS) -c constraints.txt 'triton==3.6.0' 'nvidia-cutlass-dsl==4.6.2' apache-tvm-ffi 'numpy<2.4' torch pytest
	touch $@
