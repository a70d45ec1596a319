"""The checks of an op that a user registers, so that policies can have rows for it.

`polymp.register_op` checks it here, asks the backends for its spellings, and adds it to the
vocabulary.
"""

from polymp.errors import PolicyError
from polymp.rules.row import Rule, member
from polymp.rules.vocabulary import CUSTOM, Op, nearest, vocabulary


def checked(name: str, rule: str, kind: str, where: str) -> Op:
    """Return an op to be registered, without spellings yet."""
    if not isinstance(name, str) or not name.isidentifier():
        raise TypeError(f"{where}: the name must be an identifier, such as 'my_op'")
    known = member(Rule, rule, "rule", where, f"for op {name!r}")
    if known is Rule.FP8:
        raise PolicyError(
            f"{where}: rule fp8 is for matrix products of torch and JAX, not for op {name!r}. "
            "Write lower."
        )
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
