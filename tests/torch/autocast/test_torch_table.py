"""The shipped tables against what this torch registers, by name."""

import pytest

from polymp.backends.torch.autocast import op_facts, region_casts, torch_table
from polymp.backends.torch.compat import dispatcher
from polymp.rules import policy_files
from polymp.rules.row import Rule
from polymp.rules.vocabulary import vocabulary
from tests.support.torch.kernels import drift
from tests.support.torch.version_changes import LACKS, NAMED, VERSION


def ruled(device, dtype="float16"):
    """The overloads of torch's that the device's table rules, with their rows.

    Ops that somebody registered, such as other tests in this process, are not torch's.
    """
    table = torch_table.table(torch_table.policy(device), dtype)
    return {op: row for op, row in table.items() if "::" not in op}


@pytest.mark.parametrize("device", torch_table.DEVICES)
def test_the_table_holds_exactly_what_torch_registers(device):
    assert drift(device) == ([], [])
    table = ruled(device)
    common = torch_table.kernels(device) & table.keys()
    assert len(common) > 0.8 * len(table), "this is another table altogether"


def test_the_vocabulary_names_what_torch_has_and_what_other_versions_have():
    names = {name for op in vocabulary().ops.values() for name in op.aten if "::" not in name}
    assert {name for name in names if dispatcher.overload(name) is None} == LACKS
    assert not LACKS & {op for device in torch_table.DEVICES for op in ruled(device)}


def test_an_op_that_torch_did_not_register_yet_has_no_row_of_torchs(monkeypatch):
    """A policy's own row for it holds; a region without a policy does as torch does."""
    named = policy_files.load("torch-cuda")
    for since, there in (((2, 11), True), ((9, 9), False)):
        monkeypatch.setitem(torch_table.SINCE, "rms_norm", since)
        table = torch_table.policy.__wrapped__("cuda")
        assert ("rms_norm" in torch_table.table(table, "float16")) is there
        assert torch_table.table(named, "float16")["rms_norm"].rule is Rule.FP32
    assert torch_table.policy("cuda").rows == (named if VERSION >= (2, 12) else table).rows


def test_overloads_with_named_dimensions_are_left_to_torch():
    registered = {
        op for d in torch_table.DEVICES for op in dispatcher.registered(dispatcher.autocast_key(d))
    }
    registered = {op for op in registered if op.partition(".")[0] not in op_facts.WRITERS}  # ours
    assert {op for op in registered if dispatcher.takes_names(op)} == (
        {*NAMED} if VERSION < (2, 13) else set()
    )
    assert not any(torch_table.kernels(device) & {*NAMED} for device in torch_table.DEVICES)


def test_drift_is_seen(monkeypatch):
    changed = torch_table.kernels("cpu") - {"mm"} | {"brand_new"}
    monkeypatch.setattr(torch_table, "kernels", lambda device: changed)
    added, gone = drift("cpu")
    assert "brand_new" in added
    assert "mm" in gone
    assert torch_table.row("cpu", "mm", "float16") is None
    assert torch_table.row("cpu", "bmm", "float16").rule is Rule.LOWER


def test_a_device_without_a_table_has_an_empty_policy():
    assert torch_table.policy("hpu").rows == ()
    assert torch_table.kernels("hpu") == frozenset()


def test_kernels_are_read_before_ours_stand_beside_them():
    region_casts.watch("cpu")
    assert "add_.Tensor" not in torch_table.kernels("cpu")
    assert not any(op.endswith("_") for op in torch_table.kernels("cpu"))
