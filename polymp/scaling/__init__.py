"""Loss scaling as arithmetic: the update rule of the scale, and reports of gradients.

Knows numbers, and nothing of tensors or optimizers. Imports errors and dtypes. The rule is public:
`polymp.scaling.step`, its constants and its state.
"""

from polymp.scaling.scale_rule import (
    ScaleRule,
    ScaleState,
    from_state_dict,
    pick,
    step,
    to_state_dict,
)

__all__ = ["ScaleRule", "ScaleState", "from_state_dict", "pick", "step", "to_state_dict"]


def __dir__() -> list[str]:
    return __all__
