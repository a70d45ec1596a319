"""How much of a sweep or of a random history a run of the tests does.

    make test        a part that covers every kind, in minutes
    make test-long   with POLYMP_SIZE=long: the rest of the sweeps, and histories at full length
    make test-faults with POLYMP_SIZE=full: planted faults in every pair of programs, hours

A sweep is marked `one_in(n)`: `make test` runs one in n of its parameters, `make test-long` the
others. A test of random programs or histories is marked `sized` and takes its count from `size`;
both runs have it, the second one with the larger count. So is every test of Hypothesis.
"""

import os

FULL = os.environ.get("POLYMP_SIZE") == "full"
LONG = FULL or os.environ.get("POLYMP_SIZE") == "long"


def size(few: int, many: int) -> int:
    """A count: `few` in `make test`, `many` in `make test-long`."""
    return many if LONG else few


# What takes longest, longest first. With several processes these files start first, so that none
# of them is alone at the end; tests of a file run in one process.
LONGEST = tuple(
    """
    site/test_docs.py torch/autocast/test_ops.py jax/autocast/test_corpus.py
    jax/autocast/test_random_programs.py torch/scaler/test_ranks.py torch/scaler/test_compile.py
    jax/weights/test_low_training.py jax/weights/test_low_weights.py jax/weights/test_low_runs.py
    site/test_examples.py torch/trainers/test_transformers.py shared/test_planted_faults.py
    shared/test_cases.py shared/test_shipped_policies.py shared/test_survival.py
    jax/autocast/test_contraction.py shared/test_parity_cases.py shared/test_scaler_histories.py
    jax/autocast/test_solvers.py shared/test_record_faults.py shared/test_custom_ops.py
    jax/autocast/test_libraries.py jax/autocast/test_sharded_weights.py jax/autocast/test_loops.py
    torch/weights/test_freeze_models.py torch/autocast/test_random_policies.py
    jax/autocast/test_hlo.py jax/autocast/test_known_functions.py
    torch/autocast/test_random_programs.py torch/diagnostics/test_ranks.py
    torch/diagnostics/test_catch.py jax/autocast/test_lean_policy.py jax/autocast/test_sharding.py
    jax/autocast/test_passes.py jax/autocast/test_export.py torch/autocast/test_lean_policy.py
    site/test_site.py jax/autocast/test_random_policies.py torch/modules/test_scoped.py
    jax/weights/test_freeze_serving.py jax/scaler/test_checkpoint.py
    """.split()
)
