# make demo   trains the example model in every format, in torch and in JAX, and compares them
# make test   every check that CI runs
# Both set up .venv first if it is missing or out of date. PYTHON picks the interpreter, 3.11 or later.

PYTHON ?= python3
PY     := .venv/bin/python
READY  := .venv/.ready

.PHONY: demo test lint types bench clean

demo: $(READY)
	$(PY) examples/train_torch.py
	$(PY) examples/train_jax.py
	$(PY) examples/compare.py

test: lint types
	POLYMP_REQUIRE=torch,jax $(PY) -m pytest -n auto --dist loadfile

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)
	$(PY) -m mypy

bench: $(READY)
	$(PY) benchmarks/torch_overhead.py
	$(PY) benchmarks/policies.py
	$(PY) benchmarks/jax_overhead.py
	$(PY) benchmarks/scaler.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,jax,examples,dev]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis examples/out
