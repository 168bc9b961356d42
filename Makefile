# Every target first sets up .venv from constraints.txt.
# With VENV=0 it uses the installed $(PYTHON) and its packages as they are.
PYTHON ?= python3
VENV ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

ifeq ($(VENV),0)
python := $(PYTHON)
ready :=
export PYTHONPATH := $(CURDIR)
else
python := .venv/bin/python
ready := .venv/ready
endif

.PHONY: demo test test-full aot lint clean

demo: $(ready)
	$(python) examples/demo.py

test: $(ready)
	$(python) -m pytest -n 2 -m "not full and not aot_all"

test-full: $(ready)
	$(python) -m pytest -n 2 -m full

aot: $(ready)
	$(python) -m pytest -n 2 -m aot_all

# mypy reads the installed layout, laid out with links under build/types.
lint: $(ready)
	$(python) -m ruff check
	$(python) -m ruff format --check
	rm -rf build/types
	mkdir -p build/types/treegen
	ln -s $(CURDIR)/treegen/* $(CURDIR)/autotune_cache $(CURDIR)/ir $(CURDIR)/templates build/types/treegen
	$(python) -m mypy

# A finished environment is updated; one whose making was interrupted is made anew.
.venv/ready: pyproject.toml setup.cfg constraints.txt
	@echo "installing treegen and what it needs (torch, triton, test tools; some GB) into .venv: this may take minutes"
	if [ -e $@ ]; then rm $@; else $(PYTHON) -m venv --clear .venv; fi
	.venv/bin/python -m pip install --quiet --constraint constraints.txt setuptools
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +
