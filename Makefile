# Two commands: `make notebooks` and `make test`. Both set up .venv first; nothing is installed outside it.
PYTHON ?= python3
# torch is needed only for sentence-transformers models; 2.13.0 is the release this is tested with.
TORCH ?= torch==2.13.0
PY := .venv/bin/python
OUT := runs/latest

.PHONY: setup notebooks test test-slow showcase figures lint chromium commit-notebooks clean

setup: .venv/.ready

.venv/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "amem needs Python >= 3.11, $(PYTHON) is " + sys.version.split()[0] + "; call: make PYTHON=python3.12 ...")'
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install --quiet "$(TORCH)" || $(PY) -m pip install --quiet torch
	$(PY) -m pip install --quiet -e '.[dev,bench]'
	touch $@

# All notebooks, top to bottom, each into runs/latest/notebooks/.
notebooks: setup
	rm -rf $(OUT)
	mkdir -p $(OUT)/notebooks
	$(PY) -m nbconvert --to notebook --execute --log-level WARN \
	  --ExecutePreprocessor.record_timing=False --ExecutePreprocessor.store_widget_state=False \
	  --output-dir $(OUT)/notebooks $(sort $(wildcard notebooks/[0-9]*.ipynb))
	@echo "notebooks with their outputs: $(OUT)/notebooks; open one with: .venv/bin/jupyter lab $(OUT)/notebooks"

test: setup
	$(PY) -m pytest

# What takes minutes and gigabytes: 100,000 and 1,000,000 points.
test-slow: setup
	$(PY) -m pytest -m slow

# The committed runs, made again from the bundled stories.
showcase: setup
	for language in zh en; do \
	  $(PY) -m amem run --rules --story $$language --out runs/showcase_$$language --fresh || exit 1; done

# Put the executed notebooks back into notebooks/: outputs kept, execution counts and metadata of the run left out.
commit-notebooks: notebooks
	cp $(OUT)/notebooks/*.ipynb notebooks/
	.venv/bin/nbstripout --keep-output notebooks/*.ipynb

# The pictures of the README.
figures: setup
	for language in zh en; do \
	  $(PY) -m amem figure runs/showcase_$$language --out notebooks/figures/trace_$$language.png || exit 1; done

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# Debian's Chromium: the browser tests drive it, and static images are made with it.
chromium:
	apt-get update -qq && apt-get install -y -qq chromium fonts-noto-cjk

clean:
	rm -rf .venv runs/latest build *.egg-info
