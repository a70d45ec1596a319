"""A process may use any number of policies, and each takes little memory."""

from __future__ import annotations

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
from polymp.backends.torch.autocast import policy_code
from polymp.backends.torch.autocast.policy_code import codes, in_force

first = autocast("cpu", torch.bfloat16, policy=policy(5))
with first:
    assert dtypes() == wanted(5)
    assert len(in_force()) == 2
while len(code := next(codes.free)) == 2:
    pass
assert code not in codes.policies

outer, inner = (autocast("cpu", torch.bfloat16, policy=policy(n)) for n in (6, 9))
for _ in range(2):
    with first:
        with outer:
            assert len(in_force()) == 3
            with inner:
                assert dtypes() == wanted(9)
            assert dtypes() == wanted(6)
        assert (dtypes(), len(in_force())) == (wanted(5), 2)
assert in_force() == policy_code.NONE
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

try:
    with autocast("mtia", torch.bfloat16):
        pass
except Exception as error:
    print(error)
"""


def test_there_is_no_last_policy() -> None:
    printed = forks.program(MANY, strict=True)
    assert "cannot be used in a process that has used policies" in printed
