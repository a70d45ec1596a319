"""The shipped tables against what this torch registers, by name."""

import pytest
import torch

from polymp.backends.torch import kernels, native
from polymp.backends.torch.compat import overload
from polymp.rules import LOW, Apply, Rule

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
COUNTS = {  # torch 2.13: lower, fp32 by cast, by dtype argument, by appended dtype, widest, forbid
    "cpu": (24, 100, 0, 0, 3, 0),
    "cuda": (37, 59, 11, 2, 11, 1),
    "mps": (27, 58, 0, 0, 10, 0),
    "xpu": (33, 59, 11, 2, 11, 1),
}


def ruled(device, format="float16"):
    """The overloads of torch's that the device's table rules, with their rows.

    Ops that somebody registered, such as other tests in this process, are not torch's.
    """
    table = native.table(native.policy(device), format)
    return {op: row for op, row in table.items() if "::" not in op}


@pytest.mark.parametrize("device", native.DEVICES)
def test_the_table_holds_exactly_what_torch_registers(device, capsys):
    added, gone = native.drift(device)
    if VERSION == (2, 13):
        assert (added, gone) == ([], [])
    else:
        with capsys.disabled():
            print(f"\ntorch {torch.__version__}, torch-{device}: torch also has {added}")
            print(f"torch {torch.__version__}, torch-{device}: torch lacks {gone}")
    table = ruled(device)
    common = native.kernels(device) & table.keys()
    assert len(common) > 0.8 * len(table), "this is another table altogether"


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize("device", native.DEVICES)
def test_counts_by_rule(device, low):
    rows = ruled(device, low).values()

    def count(rule, apply=Apply.CAST):
        return sum(r.rule is rule and (r.apply or Apply.CAST) is apply for r in rows)

    assert COUNTS[device] == (
        count(Rule.LOWER),
        count(Rule.FP32),
        count(Rule.FP32, Apply.DTYPE_ARGUMENT),
        count(Rule.FP32, Apply.APPEND_DTYPE),
        count(Rule.WIDEST),
        count(Rule.FORBID),
    )


@pytest.mark.parametrize("device", native.DEVICES)
def test_every_row_is_an_op_of_torch(device):
    missing = [op for op in ruled(device) if overload(op) is None]
    if VERSION == (2, 13):
        assert missing == []


def test_drift_is_seen(monkeypatch):
    changed = native.kernels("cpu") - {"mm"} | {"brand_new"}
    monkeypatch.setattr(native, "kernels", lambda device: changed)
    added, gone = native.drift("cpu")
    assert "brand_new" in added
    assert "mm" in gone
    assert native.row("cpu", "mm", "float16") is None
    assert native.row("cpu", "bmm", "float16").rule is Rule.LOWER


def test_a_device_without_a_table_has_an_empty_policy():
    assert native.policy("hpu").rows == ()
    assert native.kernels("hpu") == frozenset()


def test_kernels_are_read_before_ours_stand_beside_them():
    kernels.install_for_transforms("cpu")
    assert "add_.Tensor" not in native.kernels("cpu")
    assert not any(op.endswith("_") for op in native.kernels("cpu"))
