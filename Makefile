# SPDX-License-Identifier: Apache-2.0
#
# The two commands of this project, demo and test, and their parts. Everything that is built lies
# under build/ and .venv/; a stamp file stands for each step, so a second run does only what changed.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
JOBS ?= $(shell n=$$(nproc); echo $$(( n < 8 ? n : 8 )))
DEMO_ARGS ?=

# Folders stand in the lists too: their times change when a file comes or goes.
CORE := backing sync vmm $(wildcard backing/*.[ch] sync/*.[ch] vmm/*.[ch])
PYTHON_CODE := python/ext python/growpool bench/native \
	$(wildcard python/ext/*.[ch] python/growpool/* python/growpool/_bench/* bench/native/*.[ch])
PACKAGE := $(CORE) $(PYTHON_CODE) CMakeLists.txt pyproject.toml README.md LICENSE

# ThreadSanitizer and AddressSanitizer lay out memory at fixed places, which the strongest address
# randomisation can take from them; where a sandbox forbids to switch it off they run with it.
NO_ASLR := $(shell setarch -R true 2>/dev/null && echo setarch -R)

SHORT := GP_TEST_OPS=10000
LONG := GP_TEST_LONG=1 GP_TEST_OPS=100000

.PHONY: help demo test test-long bench clean setup-test install
.PHONY: testing-build asan-build tsan-build c-tests python-tests wheel-check lint asan-tests tsan-tests
.PHONY: long-c-tests long-python-tests long-asan-tests long-tsan-tests mutants format
.PHONY: fuzz-build fuzz long-fuzz

help:
	@echo "make demo       a pool grows, meets its limit and shrinks; DEMO_ARGS='--device host'"
	@echo "make test       every check: C and Python tests, lint, sanitizers"
	@echo "make test-long  the same with the full counts"
	@echo "make fuzz       random operations and faults, for FUZZ_SECONDS (60), from a kept corpus"
	@echo "make bench      host memory in figures; a GPU: python -m growpool bench"
	@echo "make mutants    breaks the core on purpose; the named tests must notice"
	@echo "make format     clang-format over the C files"
	@echo "make clean      removes build/ and .venv/"

# ---- demo ----------------------------------------------------------------------------------------

demo: install
	$(BIN)/python -m growpool demo $(DEMO_ARGS)

install: .venv/.stamp-install

.venv/.stamp-venv: tools/setup.sh
	tools/setup.sh demo
	touch $@

.venv/.stamp-install: .venv/.stamp-venv $(PACKAGE)
	$(PIP) install --quiet --progress-bar off '.[demo]'
	touch $@

# ---- test ----------------------------------------------------------------------------------------

# In order, so that the cheapest and most telling failure comes first and the output closes with a
# runner's own summary.
test:
	$(MAKE) setup-test
	$(MAKE) install
	$(MAKE) c-tests
	$(MAKE) python-tests
	$(MAKE) lint
	$(MAKE) wheel-check
	$(MAKE) asan-tests
	$(MAKE) tsan-tests
	$(MAKE) fuzz

test-long:
	$(MAKE) setup-test
	$(MAKE) install
	$(MAKE) long-c-tests
	$(MAKE) long-python-tests
	$(MAKE) lint
	$(MAKE) wheel-check
	$(MAKE) mutants
	$(MAKE) long-asan-tests
	$(MAKE) long-tsan-tests
	$(MAKE) long-fuzz

setup-test: .venv/.stamp-setup-test

.venv/.stamp-setup-test: tools/setup.sh pyproject.toml
	tools/setup.sh test
	$(PIP) install --quiet --progress-bar off $$($(BIN)/python tools/extra.py test)
	test -e .venv/.stamp-venv || touch .venv/.stamp-venv
	touch $@

CMAKE = $(BIN)/cmake
CUDA_INCLUDE = $$($(BIN)/python tools/cuda_include.py)
# configure FOLDER COMPILER SECONDS [OPTION...]; each call is quick when nothing changed.
configure = $(CMAKE) -S . -B build/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	-DCMAKE_C_COMPILER=$(2) -DGROWPOOL_TESTING=ON -DGROWPOOL_BUILD_TESTS=ON \
	-DGROWPOOL_TEST_SECONDS=$(or $(TEST_SECONDS),120) $(3) --log-level=WARNING

testing-build: setup-test
	$(call configure,testing,gcc,-DGROWPOOL_BUILD_EXTENSION=ON \
		-DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DGROWPOOL_CUDA_INCLUDE=$(CUDA_INCLUDE))
	$(CMAKE) --build build/testing --parallel $(JOBS)

asan-build: setup-test
	$(call configure,asan,clang,-DGROWPOOL_SANITIZE=address)
	$(CMAKE) --build build/asan --parallel $(JOBS)

tsan-build: setup-test
	$(call configure,tsan,clang,-DGROWPOOL_SANITIZE=thread)
	$(CMAKE) --build build/tsan --parallel $(JOBS)

fuzz-build: setup-test
	$(call configure,fuzz,clang,-DGROWPOOL_SANITIZE=fuzzer)
	$(CMAKE) --build build/fuzz --parallel $(JOBS) --target fuzz_pool

CTEST = $(BIN)/ctest --output-on-failure --no-tests=error --parallel $(JOBS)
ASAN_ENV := ASAN_OPTIONS=detect_leaks=1:strict_string_checks=1 UBSAN_OPTIONS=print_stacktrace=1
TSAN_ENV := TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1
# A hang ends as a failure that shows every thread's stack.
PYTEST = PYTHONPATH=$(CURDIR)/build/testing/python timeout --signal=ABRT --kill-after=10 \
	$(or $(PYTEST_SECONDS),480) $(BIN)/python -X faulthandler -m pytest

lint: setup-test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/c_files.py | xargs $(BIN)/clang-format --dry-run -Werror

c-tests: testing-build
	$(CTEST) --test-dir build/testing

python-tests: testing-build
	$(PYTEST)
	GP_TEST_EMERGENCY=1 $(PYTEST) tests/contract tests/python

# The package that users get, as pip built it: no simulated device, nothing of the tests.
wheel-check: install
	env -u PYTHONPATH $(BIN)/python tools/wheel_check.py

asan-tests: asan-build
	$(SHORT) $(ASAN_ENV) $(NO_ASLR) $(CTEST) --test-dir build/asan --label-exclude emergency

tsan-tests: tsan-build
	$(SHORT) $(TSAN_ENV) $(NO_ASLR) $(CTEST) --test-dir build/tsan --label-regex threads

fuzz: fuzz-build
	$(ASAN_ENV) $(NO_ASLR) tools/fuzz.sh $(or $(FUZZ_SECONDS),60)

# Another seed each time: a long run is for finding, a short one for keeping.
long-fuzz: fuzz-build
	$(ASAN_ENV) $(NO_ASLR) tools/fuzz.sh $(or $(FUZZ_SECONDS),600) -seed=0

long-c-tests long-asan-tests long-tsan-tests: TEST_SECONDS := 3600
long-python-tests: PYTEST_SECONDS := 7200

long-c-tests: testing-build
	$(LONG) $(CTEST) --test-dir build/testing

long-python-tests: testing-build
	$(LONG) $(PYTEST)
	GP_TEST_EMERGENCY=1 $(PYTEST) tests/contract tests/python

long-asan-tests: asan-build
	$(LONG) $(ASAN_ENV) $(NO_ASLR) $(CTEST) --test-dir build/asan

long-tsan-tests: tsan-build
	$(LONG) $(TSAN_ENV) $(NO_ASLR) $(CTEST) --test-dir build/tsan --label-regex threads

mutants: setup-test
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python tools/mutants.py

# The C library as users build it; tests/test_install.py keeps it up to date in the same folder.
bench: setup-test
	$(CMAKE) -S . -B build/library -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
		-DCMAKE_C_COMPILER=gcc --log-level=WARNING
	$(CMAKE) --build build/library --parallel $(JOBS) --target bench_range_pages
	build/library/bench_range_pages
	$(MAKE) install
	$(BIN)/python -m growpool bench --device host

# ---- upkeep --------------------------------------------------------------------------------------

format: setup-test
	$(BIN)/python tools/c_files.py | xargs $(BIN)/clang-format -i

clean:
	rm -rf build .venv dist _skbuild .pytest_cache .mypy_cache .ruff_cache
