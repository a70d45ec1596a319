"""Loss scaling as arithmetic: the update rule of the scale, and reports of gradients.

Knows numbers, and nothing of tensors or optimizers. Imports errors, dtypes and rules.

    rule, state = ScaleRule(), ScaleState()
    state = step(rule, state, finite=True)
"""

from polymp.scaling.scale_rule import ScaleRule as ScaleRule
from polymp.scaling.scale_rule import ScaleState as ScaleState
from polymp.scaling.scale_rule import from_state_dict as from_state_dict
from polymp.scaling.scale_rule import step as step
from polymp.scaling.scale_rule import to_state_dict as to_state_dict
