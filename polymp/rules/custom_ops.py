"""Registering ops of the user's own, so that policies speak of them like of any other.

    register_op("my_norm", "fp32", torch="mylib::my_norm", jax=my_norm)

One name, the rule that holds where a policy does not speak of it, and its spelling in one framework
or in both. Everything is checked before anything is changed. A framework is imported only for the
spelling given in it.
"""

from dataclasses import replace
from typing import Any

from polymp.backends import get
from polymp.errors import PolicyError
from polymp.rules.policy import Rule, member
from polymp.rules.vocabulary import CUSTOM, Op, nearest, vocabulary


def register_op(
    name: str, rule: str, torch: Any = None, jax: Any = None, *, kind: str = CUSTOM
) -> None:
    """Make an op of the user's own follow policies and regions.

    In an enabled region its inputs are cast as the rule says and what it is made of is not asked
    again; backward runs in the formats of forward. A policy may give it another rule by its name,
    or by that of its class. There is no way back: an op stays for the life of the process. What
    torch.compile or jax.jit compiled before is not compiled again: register first.

    Args:
        name: for policies; not one that the vocabulary has. The same name may be registered once
            for torch and once for jax, with the same rule.
        rule: what it does where a policy does not speak of it: lower, fp32, fp32_keep, widest,
            first, keep, forbid or parts.
        torch: an op of `torch.library` (Triton kernels are reached through one): "mylib::my_op", a
            list of such names, or what `torch.library.custom_op` returned. For an
            `autograd.Function` or a Python function, use the decorator `polymp.torch.register`.
        jax: a primitive, or a function: plain, jitted, `jax.custom_jvp` or `jax.custom_vjp`.
        kind: its class, for rules that speak of "class:KIND".

    Raises:
        PolicyError: the name or a spelling is taken, the rule or class unknown, torch has no such
            op, or it writes into its arguments or has an autocast kernel already.
        TypeError: an argument of another type, or neither torch nor jax given.
        BackendMissingError: the framework of a spelling is not installed.
    """
    where = f"register_op({name!r})"
    op = _checked(name, rule, kind, where)
    if torch is None and jax is None:
        raise TypeError(f"{where}: say what it is: torch=..., jax=..., or both")
    aten: tuple[str, ...] = ()
    primitives: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    if torch is not None:
        get("torch")
        from polymp.backends.torch.autocast import custom_ops

        aten = custom_ops.overloads(torch, where)
    if jax is not None:
        get("jax")
        from polymp.backends.jax.autocast.known_functions import FUNCTIONS, spelled

        primitives, functions = spelled(jax, where)
    vocabulary().register(replace(op, aten=aten, jax=primitives, functions=functions))
    if torch is not None:
        custom_ops.install(aten)
    if functions:
        FUNCTIONS.add(jax, name)


def register_function(name: str, rule: str, kind: str, where: str, spelled: str) -> None:
    """Register a Python function of torch's side, whose decorator asks the policy itself."""
    vocabulary().register(replace(_checked(name, rule, kind, where), aten=(spelled,)))


def _checked(name: str, rule: str, kind: str, where: str) -> Op:
    """A new op without spellings; errors as in `register_op`."""
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"{where}: the name must be an identifier, such as 'my_op'")
    known = member(Rule, rule, "rule", where, f"for op {name!r}")
    words = vocabulary()
    if kind != CUSTOM and kind not in words.kinds:
        raise PolicyError(
            f"{where}: no class {kind!r}.{nearest(kind, words.kinds)} "
            f"Classes: {', '.join(sorted(words.kinds))}."
        )
    if name in words.ops and not words.ops[name].rule:
        raise PolicyError(
            f"{where}: the vocabulary has an op of that name. Choose another name, or give that op "
            "a rule in a policy."
        )
    return Op(name, kind, rule=known)
