# Two commands matter: `make demo` and `make test`. `make help` lists the rest.

# A version manager's shim may be on PATH and yet not run: take the first that does.
PYTHON ?= $(shell for p in python3.11 python3; do \
	$$p -c pass 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
# The oldest JAX we support. `make test JAX="jax jaxlib" VENV=.venv-newest`: the newest.
JAX ?= jax==0.10.0 jaxlib==0.10.0
# Which tests run: `make test-full` takes all.
MARKED ?= -m "not full"
DEMO_ARGS ?=
PYTEST_ARGS ?=
PROGRAMS_ARGS ?=

# A file's tests stay together, and share what was compiled and trained for them; files
# come in their order, so that the one whose single test takes long is not the last.
PYTEST_WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder

BIN = $(VENV)/bin

# Installs faster than pip, and finds the oldest versions.
UV_VERSION = uv==0.13.9
# What makes a release.
RELEASE_TOOLS = build==1.6.1 twine==7.0.0 $(UV_VERSION)
UV = .venv-release/bin/uv
# What clicks through the pages; Chromium and its driver are the system's.
DOCS_TEST_TOOLS = selenium==4.51.0
# What uses other libraries than JAX.
LOWEST_TESTS ?= tests/checkpoint tests/flax tests/optimizers tests/training \
	tests/numerics/test_plot.py tests/numerics/test_report.py tests/test_main.py

.PHONY: help demo test test-full lint types pytest lowest peers programs tables \
	figures notebook docs docs-test dist dist-test format clean FORCE

help:  ## Show this list.
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 10

demo: $(VENV)/demo.stamp  ## Train on real digits in three precisions (DEMO_ARGS=...).
	$(BIN)/python -m examples.digits $(DEMO_ARGS)

test: lint  ## Linters, types, tests, doctests and README code.
	$(MAKE) --no-print-directory -j 2 types pytest

test-full: lint  ## The same, with the tests that take long (marked `full`).
	$(MAKE) --no-print-directory -j 2 types pytest MARKED=

lint: $(VENV)/dev.stamp  ## ruff.
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/dev.stamp  ## pyright.
	$(BIN)/pyright --pythonpath $(BIN)/python

pytest: $(VENV)/dev.stamp  ## Tests that are not marked `full` (PYTEST_ARGS="-k policy").
	$(BIN)/python -m pytest $(PYTEST_WORKERS) $(MARKED) $(PYTEST_ARGS)

# Oldest: all that pyproject.toml names, at its lower bound.
lowest: .venv-lowest/stamp  ## A part of the tests on the oldest version of every dependency.
	.venv-lowest/bin/python -m pytest -m "not full" $(LOWEST_TESTS) $(PYTEST_ARGS)

# The versions whose tests run, and what these need.
PEERS = equinox==0.13.8 flax==0.12.8 optax==0.2.8 dm-haiku==0.0.17 absl-py beartype \
	chex cloudpickle dm-tree einops ml-collections networkx 'pytest>=9' scikit-learn scipy

peers: .venv-peers/stamp  ## Other libraries' tests, with autocast in their transformations.
	.venv-peers/bin/python tests/tools/peers_suites.py

# Its own environment: the figures are those of one jax and one compiler.
ifeq ($(shell uname -sm),Linux x86_64)
programs: .venv-programs/stamp  ## Have compiled train steps grown? (PROGRAMS_ARGS=...).
	.venv-programs/bin/python -m benchmarks.programs --check $(PROGRAMS_ARGS)
else
programs:
	@echo "Compilers for GPUs and TPUs are for Linux on x86_64: not checked here."
endif

tables: $(VENV)/demo.stamp  ## Write the tables of README and docs anew, from the committed results.
	$(BIN)/python -m benchmarks.tables

figures: $(VENV)/demo.stamp  ## Draw the figures of docs/images anew that small programs make.
	$(BIN)/python -m benchmarks.figures

notebook: $(VENV)/demo.stamp  ## Make examples/quickstart.ipynb of docs/ten_minutes.md anew.
	$(BIN)/python -m examples.make_notebook

docs: $(VENV)/docs.stamp  ## Run the notebook, build docs/ into out/site; a broken link fails.
	$(BIN)/python -m examples.make_notebook --run out/quickstart.ipynb
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-test: docs $(VENV)/docs-test.stamp  ## Try the built pages in headless Chromium.
	$(BIN)/python -m pytest -q --confcutdir=tests/site tests/site/in_browser.py $(PYTEST_ARGS)

dist: .venv-release/stamp  ## Build the sdist and the wheel into dist/, and check them.
	rm -rf dist
	.venv-release/bin/python -m build
	.venv-release/bin/python -m twine check --strict dist/*

dist-test: dist  ## Try the wheel alone, and with each extra, in environments of their own.
	for part in core checkpoint completion flax numerics; do \
		extra=[$$part]; test $$part = core && extra=; \
		$(UV) venv --quiet --clear --python $(PYTHON) .venv-wheel && \
		$(UV) pip install --quiet --python .venv-wheel "$$(echo dist/*.whl)$$extra" && \
		.venv-wheel/bin/python -P packaging/smoke.py $$part >/dev/null && \
		.venv-wheel/bin/jmp-lite --version || exit 1; \
	done
	for extra in gpu tpu memory-gpu memory-tpu; do \
		$(UV) pip install --quiet --dry-run --python .venv-wheel \
			"$$(echo dist/*.whl)[$$extra]" || exit 1; \
	done

format: $(VENV)/dev.stamp  ## Rewrite the code as ruff would have it.
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## Remove the environments and everything that was built or cached.
	rm -rf .venv .venv-*
	rm -rf build dist out
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: an environment is installed again only when what it is made from changes.
# PYTHON is read once, when an environment is created: `make clean` to change it.

$(BIN)/python .venv-peers/bin/python .venv-programs/bin/python \
		.venv-release/bin/python:
	@test -n "$(PYTHON)" || { echo "No Python found: set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is too old: 3.11 or newer is needed" >&2; exit 1; }
	$(PYTHON) -m venv $(@D:/bin=)

# $(call install,what), into $(VENV); by pip where uv does not get it.
define install
	@$(BIN)/python -m pip install --quiet $(UV_VERSION) && \
		$(BIN)/uv pip install --quiet --upgrade --python $(BIN)/python $(1) || \
		$(BIN)/python -m pip install --quiet --upgrade $(1)
endef

# Rewritten only when JAX changes, so that another JAX means another installation.
$(VENV)/jax.txt: FORCE | $(BIN)/python
	@printf '%s\n' $(JAX) | cmp -s - $@ || printf '%s\n' $(JAX) > $@

$(VENV)/demo.stamp: pyproject.toml Makefile $(VENV)/jax.txt
	@echo "Installing what the demo needs into $(VENV) (about half a minute) ..."
	$(call install,-r $(VENV)/jax.txt -e '.[examples]')
	@touch $@

$(VENV)/dev.stamp: pyproject.toml Makefile $(VENV)/jax.txt
	@echo "Installing what the tests need into $(VENV) (about a minute) ..."
	$(call install,-r $(VENV)/jax.txt -e '.[dev]')
	@touch $(VENV)/demo.stamp $@

$(VENV)/docs.stamp: pyproject.toml Makefile $(VENV)/jax.txt
	@echo "Installing what builds the pages into $(VENV) (about half a minute) ..."
	$(call install,-r $(VENV)/jax.txt -e '.[docs]')
	@touch $@

.venv-release/stamp: Makefile | .venv-release/bin/python
	@.venv-release/bin/python -m pip install --quiet $(RELEASE_TOOLS)
	@touch $@

$(VENV)/docs-test.stamp: $(VENV)/docs.stamp
	@$(BIN)/python -m pip install --quiet --upgrade 'pytest>=9' $(DOCS_TEST_TOOLS)
	@which chromium chromium-browser google-chrome 2>/dev/null | grep -q . || { \
		echo "Installing Chromium (apt-get) ..."; \
		sudo=; test "$$(id -u)" = 0 || sudo=sudo; \
		$$sudo apt-get -qq update && \
		$$sudo apt-get -qq install -y chromium chromium-driver; }
	@touch $@

.venv-lowest/stamp: pyproject.toml Makefile .venv-release/stamp
	$(UV) venv --quiet --clear --python $(PYTHON) .venv-lowest
	$(UV) pip install --quiet --python .venv-lowest --resolution lowest-direct -e '.[dev]'
	@touch $@

.venv-peers/stamp: pyproject.toml Makefile | .venv-peers/bin/python
	@.venv-peers/bin/python -m pip install --quiet $(JAX) -e . $(PEERS)
	@touch $@

.venv-programs/stamp: benchmarks/programs-requirements.txt pyproject.toml Makefile \
		| .venv-programs/bin/python
	@echo "Installing compilers for GPUs and TPUs into .venv-programs (a minute) ..."
	@.venv-programs/bin/python -m pip install --quiet \
		-r benchmarks/programs-requirements.txt -e '.[flax,numerics]' typer
	@touch $@
