"""What scaling a loss leaves behind: a mark on the product, and a word where it is no use."""

import threading
import warnings
from typing import Any

import jax

from polymp.backends.jax.autocast import regions
from polymp.backends.jax.scaler import tree_math
from polymp.callsite import outside
from polymp.errors import ScalerWarning
from polymp.scaling.gradient_report import NO_EFFECT
from polymp.scaling.scale_rule import ScaleRule


class _Told(threading.local):
    """The rules of the scalers that this thread was warned of."""

    def __init__(self) -> None:
        self.rules: set[ScaleRule] = set()


_TOLD = _Told()


def multiplied(tree: Any, scale: Any, rule: ScaleRule) -> Any:
    """Every float of the tree times the scale, in the scope that `expect_scaler` looks for.

    Warns:
        ScalerWarning: the loss comes from a bfloat16 region; once in a thread for scalers of one
            rule, for a scaler is another object after each step.
    """
    if regions.latest_low() == "bfloat16" and rule not in _TOLD.rules:
        _TOLD.rules.add(rule)
        warnings.warn(NO_EFFECT, ScalerWarning, stacklevel=outside())
    with jax.named_scope(regions.SCALED):
        return tree_math.multiplied(tree, scale)
