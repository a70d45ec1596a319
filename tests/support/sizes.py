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
# of them is alone at the end; tests of a file run in one process. Before them is the file that
# shows all ops, to which tests add some.
LONGEST = tuple(
    """
    site/test_site.py shared/test_record_faults.py shared/test_parity_cases.py
    jax/diagnostics/test_record.py shared/test_record_ports.py
    torch/autocast/test_compile_around.py jax/diagnostics/test_locate.py
    torch/diagnostics/test_compare.py site/test_examples.py shared/test_shipped_policies.py
    torch/autocast/test_ops.py torch/scaler/test_compile.py jax/autocast/test_passes.py
    jax/autocast/test_random_programs.py jax/trainers/test_keras.py
    jax/autocast/test_fp8_contraction.py jax/weights/test_low_training.py
    shared/test_scaler_histories.py jax/autocast/test_corpus.py core/test_parity.py
    jax/autocast/test_loops.py core/test_close_and_fits.py shared/test_cases.py
    jax/diagnostics/test_blame_matrix.py torch/autocast/test_fp8_around.py
    shared/test_planted_faults.py torch/scaler/test_ranks.py jax/autocast/test_contraction.py
    jax/autocast/test_solvers.py torch/autocast/test_random_programs.py
    shared/test_sums_and_products.py jax/diagnostics/test_audit.py site/test_docs.py
    core/cli/test_check.py jax/autocast/test_libraries.py torch/modules/test_scoped.py
    shared/test_broken_by_optimizers.py site/test_package.py shared/test_fp8.py
    jax/weights/test_low_weights.py torch/weights/test_low_training.py
    torch/weights/test_freeze_models.py torch/autocast/test_policies.py
    torch/autocast/test_random_policies.py jax/autocast/test_random_policies.py
    torch/diagnostics/test_explain.py jax/weights/test_freeze_serving.py
    core/cli/test_command_line.py jax/diagnostics/test_explain.py
    """.split()
)
