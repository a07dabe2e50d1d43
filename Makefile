# Two commands on a fresh machine (python3 >= 3.10 with venv, a C++ compiler, make, cmake):
#
#     make demo      the number formats, measured on the embedded network
#     make test      every check; ends with pytest's closing line
#
# Both set up .venv first. `make help` lists the rest.
#
# .venv holds an editable install: what you edit is what runs, with or without make, and only the library is rebuilt
# when csrc/ changes. That the wheel is complete shows in .venv-oldest, which has the wheel and not the sources.

PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
OLDEST_RUNTIME := 1.20.1

BIN := $(VENV)/bin
PIP_OPTIONS := -qq --no-input --disable-pip-version-check --progress-bar off
INSTALL := $(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt
OLDEST_INSTALL := $(OLDEST)/bin/python -m pip install $(PIP_OPTIONS)

NATIVE_SOURCES := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
# folders too: deleting a file changes the folder's date
PACKAGE_SOURCES := $(shell find src -name __pycache__ -prune -o -print)

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-unit test-oldest test-slow lint generated install clean

help:
	@echo "make demo         show the number formats on the embedded network"
	@echo "make test         lint, generated files, oldest ONNX Runtime, tests"
	@echo "make test-slow    the tests marked slow"
	@echo "make test-oldest  the native library on ONNX Runtime $(OLDEST_RUNTIME)"
	@echo "make lint         ruff, mypy, import direction"
	@echo "make install      set up $(VENV) and nothing else"
	@echo "make clean        remove environments, builds and caches"

demo: install
	@$(BIN)/quark formats

test: lint generated test-oldest test-unit

test-unit: install
	@$(BIN)/python -m pytest -m "not slow"

# pytest's status 5 says that no test has the mark
test-slow: install
	@$(BIN)/python -m pytest -m slow || [ $$? -eq 5 ]

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

# csrc/formats/format_table.inc comes from src/quark/formats/catalog.py
generated: install
	@$(BIN)/python -m quark.formats.codegen --check

test-oldest: $(OLDEST)/.stamp
	@$(OLDEST)/bin/python -m pytest -p no:cacheprovider tests/native

install: $(VENV)/.stamp

# Without build isolation: the pinned build tools, and a build folder that the next build can reuse.
$(VENV)/.stamp: pyproject.toml constraints.txt $(NATIVE_SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "python3 is too old: 3.10 or newer is needed")'
	@echo "setting up $(VENV) (minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# torch by itself and first, at its pinned version: a resolver that may choose brings CUDA libraries along
	@$(INSTALL) torch
	@$(INSTALL) scikit-build-core cmake ninja
	@$(INSTALL) --no-build-isolation --editable ".[all,dev]"
	@touch $@

$(OLDEST)/.stamp: $(VENV)/.stamp $(PACKAGE_SOURCES)
	@echo "setting up $(OLDEST): our wheel and onnxruntime $(OLDEST_RUNTIME)"
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@sed '/^onnxruntime==/d' constraints.txt > $(OLDEST)/constraints.txt
	@$(OLDEST_INSTALL) -c $(OLDEST)/constraints.txt \
		onnxruntime==$(OLDEST_RUNTIME) numpy onnx onnx-ir ml_dtypes pytest pytest-timeout
	@rm -rf build/wheel
	@$(BIN)/python -m pip wheel $(PIP_OPTIONS) --no-build-isolation --no-deps --wheel-dir build/wheel .
	@$(OLDEST_INSTALL) --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

clean:
	rm -rf $(VENV) $(OLDEST) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
