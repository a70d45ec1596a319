"""A process may use any number of policies, and each takes little memory."""

from __future__ import annotations

import re

from tests.support import forks

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


def test_a_policy_takes_less_than_a_hundredth_of_a_megabyte() -> None:
    assert float(forks.program(MEMORY.replace("COUNT", "12"))) < 10_000


# Policies without a scope agree with what they did before; of the first codes none is left.
MANY = f"""{POLICIES}
import polymp
from polymp.backends.torch.autocast import regions as policy_code
from polymp.backends.torch.autocast.regions import code_in_force, codes

first = autocast("cpu", torch.bfloat16, policy=policy(5))
with first:
    assert dtypes() == wanted(5)
    assert len(code_in_force()) == 2
while len(code := next(codes.free)) == 2:
    pass
assert code not in codes.policies

outer, inner = (autocast("cpu", torch.bfloat16, policy=policy(n)) for n in (6, 9))
for _ in range(2):
    with first:
        with outer:
            assert len(code_in_force()) == 3
            with inner:
                assert dtypes() == wanted(9)
            assert dtypes() == wanted(6)
        assert (dtypes(), len(code_in_force())) == (wanted(5), 2)
assert code_in_force() == policy_code.NONE
assert not torch.is_autocast_enabled(policy_code.THIRD)

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

refused("mtia")
refused("ipu")
left = sum(1 for _ in codes.free)
three = len(codes.policies) - 2 + 1  # not NONE and the code of `first`, but the code above
assert policy_code.PAIRS + three + left == policy_code.ALL
refused("cpu", policy(77))
with outer:
    assert dtypes() == wanted(6)
"""


def test_more_than_two_thousand_policies_and_what_is_said_when_no_code_is_left() -> None:
    of_mtia, of_ipu, of_policy = forks.program(MANY, strict=True).splitlines()
    print(of_mtia, of_ipu, of_policy, sep="\n")
    written = "policies: polymp writes them into torch's autocast state of that device. "
    assert re.sub(r"[12],\d{3}", "N", of_mtia) == (
        "autocast('mtia') cannot be used in a process that has used more than N sets of "
        f"{written}Use it in a process with fewer policies; equal ones count once."
    )
    assert of_ipu == (
        "autocast('ipu') cannot be used in a process that has used "
        f"{written}Use it in a process without policies."
    )
    assert re.sub(r"\d\d,\d{3}", "N", of_policy) == (
        "no code is left for policy 'p77': this process has used as many sets of policies as "
        "torch's autocast state can tell apart, N. Use fewer policies, of which equal ones count "
        "once, or start another process."
    )
