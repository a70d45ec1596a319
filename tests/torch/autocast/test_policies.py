"""Policies in regions: both engines do what `Policy.decide` says, and only where they must."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from polymp.backends.torch.autocast import kernel_registry
from polymp.errors import ForbiddenOpError, PolicyError
from polymp.rules.vocabulary import vocabulary
from polymp.torch import autocast, explain
from tests.support import forks
from tests.support.sizes import LONG
from tests.support.torch.version_changes import VERSION

X = torch.linspace(-1, 1, 12).reshape(3, 4)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def test_the_cuda_table_on_a_cpu():
    """Its dtypes are in shared/test_cases."""
    with autocast("cpu", policy="torch-cuda"):
        assert torch.softmax(X.to(BF16), -1, dtype=BF16).dtype is BF16, "explicit dtypes count"
        with pytest.raises(ForbiddenOpError) as error:
            torch.nn.functional.binary_cross_entropy(X.abs(), X.abs())
    assert str(error.value) == (
        "policy 'torch-cuda' forbids 'binary_cross_entropy', called here with (float32, float32). "
        "Use binary_cross_entropy_with_logits, or give it another rule in the policy."
    )


def test_rows_for_one_dtype_one_overload_and_a_class():
    by_dtype = {"rules": {"softmax": {"float16": "fp32", "bfloat16": "keep"}}}
    by_overload = {"rules": {"sum": "fp32", "aten:sum.dim_IntList": "keep"}}
    by_class = {"rules": {"class:reduction": "fp32", "sum": "keep", "neg": "lower"}}
    for low in (FP16, BF16):
        x = X.to(low)
        with autocast("cpu", low, policy=by_dtype):
            assert torch.softmax(x, -1).dtype is (FP32 if low is FP16 else BF16)
        with autocast("cpu", low, policy=by_overload):
            assert (x.sum().dtype, x.sum(-1).dtype) == (FP32, low)
        with autocast("cpu", low, policy=by_class):
            assert (x.prod().dtype, x.sum().dtype, X.neg().dtype) == (FP32, low, low)


def test_mixed_halves():
    halves = [X.to(BF16), X.to(FP16)]
    cat = {"rules": {"cat": "widest"}}
    with autocast("cpu", BF16, policy=cat):
        assert torch.cat(halves).dtype is FP32
    refuses = pytest.raises(RuntimeError, match=r"^Unexpected floating ScalarType")
    with autocast("cpu", BF16, policy=cat | {"halves": "raise"}), refuses:
        torch.cat(halves)
    with torch.autocast("cpu", BF16), refuses:
        torch.cat(halves)


def test_an_op_left_out_still_lets_ops_inside_it_autocast():
    """Without its row, matmul is transparent: the mm inside it has a row."""
    with autocast("cpu", policy={"rules": {"mm": "lower"}}):
        assert torch.matmul(X, X.t()).dtype is BF16
    with autocast("cpu", policy={"rules": {"mm": "lower", "matmul": "keep"}}):
        assert torch.matmul(X, X.t()).dtype is FP32


def test_numbers_go_through_an_op_without_a_rule():
    """x + 1 reaches a kernel as (tensor, number), in a region that has no rule for add."""
    with autocast("cpu", policy={"rules": {"add": "widest"}}):
        assert torch.equal(X + 1, X.add(torch.ones(3, 4)))
    with autocast("cpu"):
        assert (X.to(BF16) + 1).dtype is BF16
        assert (X.to(BF16) + 1.5).dtype is BF16
        assert ((X > 0) + 1).dtype is torch.int64


def test_gradients_pass_through_our_casts():
    w = torch.randn(4, 4, requires_grad=True)
    with autocast("cpu", policy={"rules": {"mm": "lower", "exp": "fp32_keep"}}):
        loss = torch.mm(X, w).exp().float().sum()
    loss.backward()
    v = w.detach().clone().requires_grad_()
    low = torch.mm(X.to(BF16), v.to(BF16)).float().exp().to(BF16).float().sum()
    (expected,) = torch.autograd.grad(low, v)
    assert torch.equal(w.grad, expected)


def overloads(op):
    every = getattr(torch.ops.aten, op).overloads()
    return ", ".join(op if name == "default" else f"{op}.{name}" for name in every)


# By what a policy has a rule for, what is said after its name.
REFUSED = {
    "aten:log_sofmax.int": "is no op of torch; did you mean log_softmax.int, logsumexp.",
    "aten:softmax": f"is no op of torch; its overloads are {overloads('softmax')}.",
    "aten:nonsense": "is no op of torch.",
    "aten:randperm": f"takes no tensor; its overloads are {overloads('randperm')}.",
    "cbrt": f"torch lacks. {vocabulary().ops['cbrt'].note}",
}


@pytest.mark.parametrize("of", REFUSED)
def test_what_torch_cannot_honour_is_refused_when_the_region_is_made(of):
    before, name = kernel_registry.installed("cpu"), of.removeprefix("aten:")
    with pytest.raises(PolicyError) as error:
        autocast("cpu", policy={"name": "p", "rules": {"mm": "keep", of: "fp32"}})
    assert str(error.value) == f"policy 'p' has a rule for {name!r}, which {REFUSED[of]}"
    assert kernel_registry.installed("cpu") == before, "half of the policy was installed"


def test_checkpoint_leaves_the_casts_of_the_forward_alone():
    """A weight used before and inside it is cast once, as without checkpointing."""
    w = torch.eye(4).requires_grad_()
    seen = []

    def block(x):
        y = torch.mm(x, w)
        seen.append(y.grad_fn.next_functions[1][0])
        return y

    with autocast("cpu"):
        first = torch.mm(X, w).grad_fn.next_functions[1][0]
        checkpoint(block, X.clone().requires_grad_(), use_reentrant=False)
    assert seen == [first]


I64 = torch.tensor([2, 0])
EVERY = torch.tensor([[0, 1, 2], [1, 2, 0]])
MASK = torch.tensor([[True, False, True], [False, True, True], [False, False, True]])


def _set(into, by):
    into[MASK] = by.flatten()[:5]
    return into


# By name, a call with what is written into, and what is written: [3, 3] and [2, 3].
WRITES = {
    "b[mask] = y": _set,
    "masked_scatter": lambda a, b: a.masked_scatter(MASK, b),
    "masked_scatter_": lambda a, b: a.masked_scatter_(MASK, b),
    "index_put_": lambda a, b: a.index_put_((I64,), b),
    "index_copy": lambda a, b: a.index_copy(0, I64, b),
    "index_copy_": lambda a, b: a.index_copy_(0, I64, b),
    "index_add": lambda a, b: a.index_add(0, I64, b, alpha=2),
    "index_add_": lambda a, b: a.index_add_(0, I64, b),
    "scatter": lambda a, b: a.scatter(0, EVERY, b),
    "scatter_": lambda a, b: a.scatter_(0, EVERY, b),
    "scatter_add_": lambda a, b: a.scatter_add_(0, EVERY, b),
    "scatter_reduce": lambda a, b: a.scatter_reduce(0, EVERY, b, "amax"),
    "scatter_reduce_": lambda a, b: a.scatter_reduce_(0, EVERY, b, "amax"),
    "put": lambda a, b: a.put(I64, b[0, :2]),
    "put_": lambda a, b: a.put_(I64, b[0, :2]),
}


@pytest.mark.one_in(3)  # each of them under one of the policies
@pytest.mark.parametrize("policy", ["amp", "lean"])
@pytest.mark.parametrize(("into", "by"), [(FP32, BF16), (BF16, FP32), (torch.float64, BF16)])
@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_into_a_tensor_takes_its_dtype(name, into, by, policy):
    whole, part = torch.randn(3, 3).to(into), torch.randn(2, 3).to(by)
    expected = WRITES[name](whole.clone(), part.to(into))
    if "_add" in name and into is BF16:  # what adds up is rounded once
        expected = WRITES[name](whole.float(), part).to(into)
    with pytest.raises((RuntimeError, IndexError)):
        WRITES[name](whole.clone(), part)
    with explain() as report, autocast("cpu", BF16, policy=policy):
        made = WRITES[name](given := whole.clone(), part)
    assert made.dtype is into
    assert torch.equal(made, expected)
    assert (made is given) == name.endswith(("_", "= y"))
    assert {call.row.rule for call in report if call.row} == {"first"}


@pytest.mark.parametrize("policy", [None, "torch-cuda"])
@pytest.mark.parametrize("name", ["b[mask] = y", "masked_scatter", "scatter_"])
def test_torchs_own_tables_refuse_it_as_torch_does(name, policy):
    with autocast("cpu", BF16, policy="amp"):
        pass  # which puts kernels on the ops
    with autocast("cpu", BF16, policy=policy), pytest.raises((RuntimeError, IndexError)):
        WRITES[name](torch.zeros(3, 3), torch.ones(2, 3, dtype=BF16))


def test_gradients_go_into_what_was_written():
    part = torch.randn(2, 3, dtype=BF16, requires_grad=True)
    whole = torch.zeros(3, 3)
    with autocast("cpu", BF16, policy="lean"):
        whole[I64] = part
        (whole * torch.arange(9.0).view(3, 3)).sum().backward()
    assert torch.equal(part.grad.float(), torch.arange(9.0).view(3, 3)[I64])


@pytest.mark.parametrize("amp_first", [True, False])
def test_a_weight_that_is_written_so_is_cast_anew(amp_first):
    w = torch.nn.Parameter(torch.ones(3, 3))
    policies = ["amp", None] if amp_first else [None, "amp"]
    for policy in policies:
        with torch.no_grad(), autocast("cpu", BF16, policy=policy):
            before = torch.mm(w, w)
            w.index_put_((I64,), torch.full((2, 3), 3.0))
            assert not torch.equal(torch.mm(w, w), before)
            w.fill_(1)


@pytest.mark.parametrize("low", [BF16, torch.float16])
@pytest.mark.parametrize(
    "policy", ["amp", "lean", "matmul", "fp8", {"rules": {"all": "fp32"}}], ids=str
)
def test_a_weight_norm_is_put_on_a_low_module_in_a_region(policy, low):
    """There its norm is float32, and torch's kernel wants one dtype."""
    for dtype in (BF16, torch.float16):
        layer = torch.nn.Linear(4, 4).to(dtype)
        weight, x = layer.weight.detach().clone(), torch.randn(2, 4, dtype=dtype)
        with autocast("cpu", BF16 if policy == "fp8" else low, policy=policy):
            layer = torch.nn.utils.parametrizations.weight_norm(layer)
            torch.testing.assert_close(layer.weight.to(dtype), weight)
            layer(x).float().sum().backward()
        assert all(p.grad is not None for p in layer.parameters())


# --- torch's own database of ops: none fails under a shipped policy that runs without one ---------

PARTS = 4 if LONG else 20
SAMPLES = 2  # of each op
DATABASE = "tests.support.torch.op_database"

# torch's tables for GPUs are torch's: their compiled kernels have the same errors there.
TORCHS_OWN = {
    "matrix_exp": "writes a float32 sum into a low tensor",
    "torch.ops.aten._safe_softmax.default": "its gradient wants a result in its input's dtype",
}


@pytest.mark.sized
@pytest.mark.parametrize("part", range(PARTS) if LONG else [0])
def test_no_op_fails_that_runs_in_the_default_region(part, tmp_path):
    """With its gradients, of float32 and of low inputs."""
    out, printed = tmp_path / "errors", tmp_path / "printed"
    call = forks.Call(
        DATABASE, "main", (part, PARTS, SAMPLES, str(out)), str(printed), strict=False
    )
    assert forks.run(forks.TORCH, [call]) == [0], printed.read_text()[-3000:]
    called, errors = json.loads(out.read_text())
    assert called > 25
    known = [e for e in errors if e.split()[0] in TORCHS_OWN and e.split()[1].startswith("torch-")]
    assert errors == known


# --- A process may use any number of policies, and each takes little memory -----------------------


POLICIES = """
import torch
from polymp.torch import autocast

OPS = "exp log tanh erf sin cos sigmoid sqrt floor ceil sign neg abs".split()
x = torch.full((2, 2), 0.5)


def policy(number):
    rules = {op: ("fp32", "lower")[number >> at & 1] for at, op in enumerate(OPS)}
    return {"name": f"p{number}", "extends": "amp", "rules": rules}


def dtypes(count=len(OPS)):
    return [getattr(torch, op)(x).dtype for op in OPS[:count]]


def wanted(number, count=len(OPS)):
    return [(torch.float32, torch.bfloat16)[number >> at & 1] for at in range(count)]
"""

MEMORY = f"""{POLICIES}
import gc, tracemalloc
from polymp.backends.torch.autocast import torch_table

def use(numbers):
    for number in numbers:
        with autocast("cpu", torch.bfloat16, policy=policy(number)):
            (x @ x).exp()
    gc.collect()

tracemalloc.start()
use(range(torch_table.POLICIES + 8))  # so many have tables
before, _ = tracemalloc.get_traced_memory()
use(range(1000, 1000 + COUNT))
now, _ = tracemalloc.get_traced_memory()
print((now - before) / COUNT)
"""


@pytest.mark.long
def test_a_policy_takes_less_than_a_hundredth_of_a_megabyte() -> None:
    assert float(forks.program(MEMORY.replace("COUNT", "12"))) < 10_000


# The last codes: what runs under them, and what is said when there is none.
MANY = f"""{POLICIES}
import polymp
from polymp.backends.torch.autocast.regions import NONE, code_in_force, codes

first = autocast("cpu", torch.bfloat16, policy=policy(5))
with first:
    assert dtypes() == wanted(5)
codes.free = iter(list(codes.free)[-2:])  # as if all others were given out

outer, inner = (autocast("cpu", torch.bfloat16, policy=policy(n)) for n in (6, 9))
for _ in range(2):
    with first:
        with outer:
            with inner:
                assert dtypes() == wanted(9)
            assert dtypes() == wanted(6)
        assert dtypes() == wanted(5)
assert code_in_force() == NONE

count = 0
def compiled(graph, _):
    global count
    count += 1
    return graph.forward

program = torch.compile(lambda: dtypes(4) and torch.exp(x), backend=compiled)
for number, region in ((6, outer), (9, inner), (6, outer), (5, first), (9, inner)):
    with region:
        assert program().dtype == wanted(number)[0]
assert count == 3, count  # a graph for each policy

w = torch.nn.Parameter(x.clone())
with outer:
    y = torch.utils.checkpoint.checkpoint(lambda: torch.exp(w @ w), use_reentrant=False)
y.sum().backward()

def refused(device, policy=None):
    try:
        autocast(device, torch.bfloat16, policy=policy)
    except polymp.PolicyError as error:
        print(error)

refused("ipu")
refused("cpu", policy(77))
with outer:
    assert dtypes() == wanted(6)
"""


def test_two_thousand_policies_and_what_is_said_when_no_code_is_left() -> None:
    of_ipu, of_policy = forks.program(MANY, strict=True).splitlines()
    assert of_ipu == (
        "autocast('ipu') cannot be used in a process that has used policies: polymp writes them "
        "into torch's autocast state of that device. Use it in a process without policies."
    )
    assert re.sub(r"[12],\d{3}", "N", of_policy) == (
        "no code is left for policy 'p77': this process has used as many sets of policies as "
        "torch's autocast state can tell apart, N. Use fewer policies, of which equal ones count "
        "once, or start another process."
    )


# --- A policy that agrees with torch's table costs nothing, because no kernel is installed --------


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
Path("mine.toml").write_text(policy_files.text(own.name))
mine = policy_files.load("mine.toml")
assert mine.name == "mine" and mine != own
"""
BY_HAND = """
rules = {row.of: str(row.rule) for row in own.rows}
rules["binary_cross_entropy"] = {"rule": rules["binary_cross_entropy"], "instead": instead}
mine = policy_files.load({"name": "mine", "halves": own.halves, "rules": rules})
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
# table of torch's: products that it lowers are multiplications where they add nothing up, and on
# CPUs the gradients of what is read add up in float32.
WIDENS = """
from polymp.backends.torch.autocast import op_facts, torch_table
table = torch_table.table(own, "float16")
wide = {name for name, row in table.items() if row.rule == "widest"}
low = {name for name in op_facts.PRODUCTS & table.keys() if table[name].rule == "lower"}
found = use(policy_files.load({"extends": own.name, "halves": "widen"}))
reads = op_facts.READS if device == "cpu" else set()
assert wide and "matmul" in low and set(found) == wide | low | reads | {"exp", "linear"}, found
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


@pytest.mark.parametrize("policy", ["amp", "lean"])
def test_linear_algebra_of_low_inputs_runs_in_float32(policy: str) -> None:
    x = (torch.eye(4) * 3 + torch.arange(16).reshape(4, 4) / 16).bfloat16()
    with autocast("cpu", torch.bfloat16, policy=policy):
        for op in (torch.det, torch.logdet, torch.linalg.lu_factor, torch.linalg.pinv):
            found = op(x)
            expected = op(x.float())
            assert torch.equal(*(r if torch.is_tensor(r) else r[0] for r in (found, expected)))
        assert torch.matrix_exp(x).isfinite().all(), "torch's kernel for bfloat16 makes NaN"
