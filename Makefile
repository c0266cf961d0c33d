# The same commands as in the README, shorter. They need nothing but Python >= 3.11 and pip.
PYTHON ?= python3
BIN = .venv/bin

.PHONY: test check slow bench campaign results clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test]'
	touch $@

test: .venv/ready
	$(BIN)/python -m pytest

check: .venv/ready
	$(BIN)/ruff format --check . && $(BIN)/ruff check . && $(BIN)/mypy

slow: .venv/ready
	$(BIN)/python -m pytest -m slow

bench: .venv/ready
	$(BIN)/python -m pbrl.bench

campaign: .venv/ready # kills, full disks, mutated files, nonsense: some hours; docs/reliability.md
	$(BIN)/python tests/campaign

results: .venv/ready # the reference runs that are missing: days; safe to stop at any time, the same command goes on
	$(BIN)/python -m pbrl.reference run

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
