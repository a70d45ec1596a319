"""Records of steps on a GPU against those on a CPU and, on the GPU, those of torch."""

from __future__ import annotations

import jax
import pytest

import polymp
from polymp.diagnostics.run_record import RunRecord
from tests.shared.test_record_faults import recorded, shares
from tests.support.decoder import Config

CONFIG = Config(layers=2, layer=1)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU and jax for it"),
]


def on_gpu(low: str, precision: str | None = "highest") -> RunRecord:
    with jax.default_matmul_precision(precision):
        return recorded("nnx", 0, config=CONFIG._replace(low=low))


@pytest.mark.parametrize(
    ("low", "precision"), [("", "highest"), ("", None), ("bfloat16", "highest")]
)
def test_a_gpu_and_a_cpu_raise_no_alarm(low: str, precision: str | None) -> None:
    """Also where the GPU may take TF32."""
    with jax.default_device(jax.devices("cpu")[0]):
        cpu = recorded("nnx", 0, config=CONFIG._replace(low=low))
    comparison = polymp.compare(on_gpu(low, precision), cpu)
    assert comparison.explained, str(comparison)
    assert max(shares(comparison)) > 0, "the two are one"


def test_both_frameworks_on_a_gpu_raise_no_alarm() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU for torch")
    theirs = recorded("torch", 0, config=CONFIG, device="cuda")
    comparison = polymp.compare(on_gpu(""), theirs)
    assert comparison.explained, str(comparison)
