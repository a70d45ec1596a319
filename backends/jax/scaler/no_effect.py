"""The warning that a loss scaler has no effect on a loss from a bfloat16 region."""

import threading
import warnings

from polymp.backends.jax.autocast import regions
from polymp.code_origin import outside
from polymp.errors import ScalerWarning
from polymp.scaling.gradient_report import NO_EFFECT
from polymp.scaling.scale_rule import ScaleRule


class _Told(threading.local):
    """The rules of the scalers that this thread was warned of: each step makes another scaler."""

    def __init__(self) -> None:
        self.rules: set[ScaleRule] = set()


_TOLD = _Told()


def warn_in_bfloat16(rule: ScaleRule) -> None:
    """Warn if a loss that is scaled here comes from a bfloat16 region; once for each rule."""
    if regions.latest_low() == "bfloat16" and rule not in _TOLD.rules:
        _TOLD.rules.add(rule)
        warnings.warn(NO_EFFECT, ScalerWarning, stacklevel=outside())
