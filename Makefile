# make demo   trains the example model in every dtype, in torch and in JAX, and compares them
# make test   lint, types and tests; tests/site/test_site.py among them builds the documentation.
#             make pytest is the tests alone
# make test-long  the full parameter sweeps, of which make test runs only a part, and longer randomised test sequences
# make test-faults  planted faults in every pair of programs and 200 seeds without one: hours, on one core
# make test-versions  what may differ between versions of torch and jax, on the oldest and on the newest
#             that are supported; test-oldest and test-newest are one of the two. 6 GB of disk each
# make test-frameworks  the adapters of Lightning, accelerate and transformers, with the oldest of these that are
#             supported, and with the newest of them on the newest torch; there that of Keras, too
# make docs   the documentation, in site/
# make dist   the sdist and the wheel, in dist/, checked as a package index would check them
# make gpu    what only a GPU can show, in 9 minutes; with the interpreter's own torch and jax.
#             MINUTES=9 DEVICE=cuda OUT=build/gpu ARGS=--resume; DEVICE=cpu is a dry run
# All but make gpu set up .venv or one like it first if it is missing or out of date. PYTHON picks the interpreter, 3.11 or later.
# The newest jax needs Python 3.12: test-newest takes a python3.12, or else a python3.13, that is on the PATH or that pyenv has, else PYTHON,
# with the newest torch and with the newest jax that this Python can have; NEWEST picks another.

# python3.12 for 3.12, if it runs; or pyenv's newest 3.12, whose python3.12 may be on the PATH and not selected.
# Not 3.13.0: torch.compile warns of it, and in tests warnings are errors.
runs = -c 'import ensurepip, sys; sys.exit(sys.version_info[:3] == (3, 13, 0))'
interpreter = $(shell for p in python$1 "$$(pyenv prefix $1)/bin/python$1"; do $$p $(runs) && echo $$p && break; done 2>/dev/null)

PYTHON ?= python3
NEWEST ?= $(firstword $(foreach v,3.12 3.13,$(call interpreter,$v)) $(PYTHON))
PY     := .venv/bin/python
READY  := .venv/.ready
BENCH  := .venv-bench/.ready
DIST   := .venv-dist/.ready
PEERS  := benchmarks/requirements-torch.txt benchmarks/requirements-jax.txt

# What may differ between versions.
VERSIONED := tests/site/test_package.py tests/core/rules/test_vocabulary.py \
    $(addprefix tests/torch/, $(addsuffix .py, compat/test_private_names compat/test_differences \
        $(addprefix autocast/test_, arguments compile compile_around custom_function fp8_around fp8_product \
            func lean_policy ops policies recurrent regions torch_table) \
        weights/test_bake \
        $(addprefix scaler/test_, compile histories))) \
    $(addprefix tests/jax/, $(addsuffix .py, compat/test_private_names scaler/test_optimizer_step \
        $(addprefix autocast/test_, contraction fp8_contraction fp8_regions random_programs regions)))

# What adapts polymp to other packages, each of which a run of its tests must have.
ADAPTERS := tests/torch/trainers
ADAPTED  := torch,lightning,accelerate,transformers

# Many tests start processes, each of which would compile polymp again where this is set.
unexport PYTHONDONTWRITEBYTECODE

DEVICE  ?= cuda
MINUTES ?= 9
OUT     ?= build/gpu

DOCUMENTED := polymp backends

PYTEST := -m pytest -n auto --dist loadfile --no-loadscope-reorder

# The marks of the tests that make test and test-versions ask; ASKED= asks all of them. .ci/run has
# all of make test, of the sizes of test-long.
ASKED ?= not long

# The tests that are part of lint.
LINTED := tests/core/test_layers.py tests/core/test_docstrings.py

.PHONY: demo test pytest test-long test-faults test-versions test-oldest test-newest test-frameworks lint style types docs dist bench gpu clean

demo: $(READY)
	$(PY) examples/train_torch.py
	$(PY) examples/train_jax.py
	$(PY) examples/compare.py

# Types are checked beside the first of the tests: that is one process, and there are cores to spare.
test: style
	@$(MAKE) --no-print-directory -j2 types pytest

pytest: $(READY)
	POLYMP_REQUIRE=jax,keras,$(ADAPTED) $(PY) $(PYTEST) -m "$(ASKED)"

test-long: $(READY)
	POLYMP_REQUIRE=jax,keras,$(ADAPTED) POLYMP_SIZE=long $(PY) $(PYTEST) -m "long or sized"

test-faults: $(READY)
	POLYMP_REQUIRE=torch,jax POLYMP_SIZE=full $(PY) -m pytest -m "" tests/shared/test_record_faults.py

test-versions: test-oldest test-newest

test-oldest test-newest: test-%: .venv-%/.ready
	POLYMP_REQUIRE=torch,jax .venv-$*/bin/python $(PYTEST) -m "$(ASKED)" $(VERSIONED)

test-frameworks: .venv-frameworks/.ready .venv-newest/.ready
	POLYMP_REQUIRE=$(ADAPTED) .venv-frameworks/bin/python $(PYTEST) $(ADAPTERS)
	POLYMP_REQUIRE=$(ADAPTED),keras .venv-newest/bin/python $(PYTEST) $(ADAPTERS) tests/jax/trainers

lint: style
	$(PY) -m pytest -q $(LINTED)

style: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	.venv/bin/pydoclint --config=pyproject.toml $(DOCUMENTED)
	$(PY) -m ruff check --preview --select DOC501 $(DOCUMENTED)

types: $(READY)
	$(PY) -m mypy

docs: $(READY)
	$(PY) docs/make_pages.py
	$(PY) -m mkdocs build --strict

# The wheel is made from the sdist.
dist: $(DIST)
	rm -rf dist
	.venv-dist/bin/python -m build
	.venv-dist/bin/python -m twine check --strict dist/*

# Every benchmark runs, also after one that misses a bar; docs/speed.md is made of the records.
bench: $(BENCH)
	@missed=0; \
	for name in torch_overhead policy_costs jax_overhead contraction scaler seeing low_weights low_weights_jax fp8 torch_speed jax_speed jax_corpus trainers trainers_jax speed_page feature_costs; do \
	    .venv-bench/bin/python benchmarks/$$name.py || missed=1; \
	done; \
	exit $$missed

gpu:
	$(PYTHON) benchmarks/gpu.py --device $(DEVICE) --minutes $(MINUTES) --out $(OUT) $(ARGS)

$(BENCH): pyproject.toml constraints.txt $(PEERS)
	$(PYTHON) -m venv --clear .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    -e '.[torch,jax,examples,dev]' $(PEERS:%=-r %)
	touch $@

$(DIST):
	$(PYTHON) -m venv --clear .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0
	touch $@

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,jax,examples,docs,dev]'
	touch $@

.venv-oldest/.ready: INTERPRETER = $(PYTHON)
.venv-newest/.ready: INTERPRETER = $(NEWEST)
.venv-oldest/.ready .venv-newest/.ready: .venv-%/.ready: pyproject.toml constraints-%.txt
	$(INTERPRETER) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-$*.txt \
	    -e '.[torch,jax,examples,dev]'
	touch $@

.venv-frameworks/.ready: pyproject.toml constraints-frameworks.txt
	$(PYTHON) -m venv --clear .venv-frameworks
	.venv-frameworks/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-frameworks.txt \
	    -e '.[torch,lightning,accelerate,transformers]' hypothesis pytest pytest-xdist
	touch $@

clean:
	rm -rf .venv .venv-bench .venv-dist .venv-frameworks .venv-oldest .venv-newest build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis examples/out
