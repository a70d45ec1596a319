"""How much of a sweep or of a random history a run of the tests does.

    make test        a part that covers every kind, in minutes
    make test-long   with POLYMP_SIZE=long: the rest of the sweeps, and histories at full length

A sweep is marked `one_in(n)`: `make test` runs one in n of its parameters, `make test-long` the
others. A test of random programs or histories is marked `sized` and takes its count from `size`;
both runs have it, the second one with the larger count. So is every test of Hypothesis.
"""

import os

LONG = os.environ.get("POLYMP_SIZE") == "long"


def size(few: int, many: int) -> int:
    """A count: `few` in `make test`, `many` in `make test-long`."""
    return many if LONG else few


# What takes longest, longest first. With several processes these files start first, so that none
# of them is alone at the end; tests of a file run in one process.
LONGEST = (
    "torch/autocast/test_ops.py",
    "jax/autocast/test_corpus.py",
    "site/test_docs.py",
    "jax/autocast/test_random_programs.py",
    "torch/scaler/test_compile.py",
    "jax/autocast/test_solvers.py",
    "shared/test_scaler_histories.py",
    "torch/autocast/test_random_policies.py",
    "shared/test_cases.py",
    "torch/autocast/test_random_programs.py",
    "shared/test_planted_faults.py",
    "site/test_examples_trained.py",
    "core/cli/test_cli.py",
    "jax/autocast/test_random_policies.py",
    "site/test_site.py",
    "shared/test_survival.py",
    "shared/test_custom_ops.py",
    "jax/autocast/test_libraries.py",
    "jax/autocast/test_loops.py",
    "torch/autocast/test_models.py",
    "torch/scaler/test_ranks.py",
    "torch/modules/test_scoped.py",
    "torch/weights/test_hold_casts.py",
    "torch/weights/test_freeze_models.py",
    "jax/scaler/test_optax_wrapper.py",
    "jax/scaler/test_flax_steps.py",
    "jax/weights/test_freeze_serving.py",
    "jax/scaler/test_checkpoint.py",
    "site/test_examples_torch.py",
)
