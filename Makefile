# Every target first sets up .venv from constraints.txt.
# With VENV=0 it uses the installed $(PYTHON) and its packages as they are.
PYTHON ?= python3
VENV ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifeq ($(VENV),0)
python := $(PYTHON)
ready :=
docs_ready :=
export PYTHONPATH := $(CURDIR)
else
python := .venv/bin/python
ready := .venv/ready
docs_ready := .venv/docs-ready
endif

.PHONY: demo check test test-full aot lint docs clean

demo: $(ready)
	$(python) examples/demo.py

# What a change most often breaks, in less than a minute.
check: $(ready)
	$(python) -m ruff check --no-cache
	$(python) -m pytest -n 2 -m "not full and not aot_all" \
		tests/project/test_layers.py tests/project/test_sizes.py tests/ir tests/target tests/report

test: $(ready)
	$(python) -m pytest -n 2 -m "not full and not aot_all"

test-full: $(ready)
	$(python) -m pytest -n 2 -m full

aot: $(ready)
	$(python) -m pytest -n 2 -m aot_all

# mypy reads the installed layout, laid out with links under build/types.
lint: $(ready)
	$(python) -m ruff check --no-cache
	$(python) -m ruff format --check
	rm -rf build/types
	mkdir -p build/types/treegen
	ln -s $(CURDIR)/treegen/* $(CURDIR)/autotune_cache $(CURDIR)/ir $(CURDIR)/templates build/types/treegen
	$(python) -m mypy

# Warnings are errors, among them links to pages and headings that do not exist.
docs: $(docs_ready)
	$(python) -m sphinx --quiet --fail-on-warning --fresh-env docs build/docs
	@echo "the documentation is in build/docs/index.html"

# A finished environment is updated; one whose making was interrupted is made anew.
.venv/ready: pyproject.toml setup.cfg constraints.txt
	@echo "installing treegen and what it needs (torch, triton, test tools; some GB) into .venv: this may take minutes"
	if [ -e $@ ]; then rm $@; else $(PYTHON) -m venv --clear .venv; fi
	.venv/bin/python -m pip install --quiet --constraint constraints.txt setuptools
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

.venv/docs-ready: .venv/ready
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
