"""A policy that agrees with torch's table costs nothing, because no kernel is installed.

Each device has a process of its own, for kernels stay once they are installed. What calls of ops
that do differ cost is measured by benchmarks/policies.py.
"""

from __future__ import annotations

import pytest

from tests.support import forks
from tests.support.torch.version_changes import VERSION

# Regions are entered and ops run under the policy `mine`; a CUDA region has fake tensors.
USE = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from polymp.backends.torch.autocast import kernel_registry
from polymp.rules import policy_files
from polymp.torch import autocast

torch.cuda.amp.common.amp_definitely_not_available = lambda: False
torch.cuda.is_bf16_supported = lambda: True


def use(policy):
    for low in (torch.float16, torch.bfloat16):
        with autocast(device, low, policy=policy), torch.no_grad(), FakeTensorMode():
            x = torch.ones(4, 4, device=device)
            dtypes = (x @ x).dtype, torch.softmax(x @ x, -1).dtype, x.to(low).sum().dtype
        assert dtypes == (low, *wanted(low)), dtypes
    return kernel_registry.installed(device)


def wanted(low):
    return (low, low) if device == "cpu" else (torch.float32, torch.float32)


own = policy_files.load(f"torch-{device}")
"""

# The policy as a user would come to it.
AS_FILE = """
from pathlib import Path
Path("mine.toml").write_text(policy_files.to_toml(own).replace(own.name, "mine"))
mine = policy_files.load("mine.toml")
assert mine.name == "mine" and mine != own
"""
BY_HAND = """
rules = {row.of: str(row.rule) for row in own.rows}
rules["binary_cross_entropy"] = {"rule": rules["binary_cross_entropy"], "instead": instead}
mine = policy_files.load({"name": "mine", "halves": own.halves, "rules": rules})
assert not any(row.apply for row in mine.rows)
"""
EXTENDED = """
mine = policy_files.load({"name": "mine", "extends": own.name, "rules": {"softmax": softmax}})
"""
OWN = AS_FILE, BY_HAND, EXTENDED
INSTEAD = {"cpu": "", "cuda": "binary_cross_entropy_with_logits"}
SOFTMAX = {"cpu": "parts", "cuda": "fp32"}


DIFFERS = """
assert use(mine.override(keep=["exp", "linear"])) == ("exp", "linear")
assert use(mine.override(rules={"mm": {"float16": "fp32"}})) == ("exp", "linear", "mm")
"""
# torch raises where float16 meets bfloat16; a policy that widens needs kernels for that. It is no
# table of torch's: products that it lowers are multiplications where they add nothing up.
WIDENS = """
from polymp.backends.torch.autocast import op_facts, torch_table
table = torch_table.table(own, "float16")
wide = {name for name, row in table.items() if row.rule == "widest"}
low = {name for name in op_facts.PRODUCTS & table.keys() if table[name].rule == "lower"}
found = use(policy_files.load({"extends": own.name, "halves": "widen"}))
assert wide and "matmul" in low and set(found) == wide | low | {"exp", "linear"}, found
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_policy_that_says_what_torch_does_installs_no_kernel(device, tmp_path):
    """And one that differs installs those in which it does, which shows that this can fail."""
    if device == "cuda" and VERSION < (2, 12):
        pytest.skip("torch 2.11 does not register rms_norm, for which torch-cuda has a row")
    same = [part + "assert use(mine) == (), kernel_registry.installed(device)\n" for part in OWN]
    program = "".join([_head(device), USE, *same, AS_FILE, DIFFERS, WIDENS])
    forks.program(program, folder=tmp_path)


def _head(device: str) -> str:
    return f"device, instead, softmax = {device!r}, {INSTEAD[device]!r}, {SOFTMAX[device]!r}\n"
