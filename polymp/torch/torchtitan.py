"""torchtitan: a model converter that has the model's calls open a region with a policy.

    register_model_converter(lambda *_: Converter("lean"), "polymp")  # torchtitan's function

torchtitan's trainer opens no region: with FSDP it casts parameters and inputs, and no policy sees
these casts. A model converter changes the model before it is compiled and sharded. torchtitan 0.2
has them; 0.3 has none that see the model.
"""

import torch
import torch.nn as nn

from polymp.backends.torch.autocast import dtype_names
from polymp.backends.torch.autocast.api import PolicyLike
from polymp.backends.torch.compat.accelerators import accelerator
from polymp.backends.torch.modules.in_region import open_region
from polymp.rules import policy_files
from polymp.rules.row import LOW

__all__ = ["Converter"]


class Converter:
    """A model converter of torchtitan: the model's calls open a region with a policy.

        from torchtitan.protocols.model_converter import register_model_converter

        register_model_converter(lambda *_: Converter("lean"), "polymp")

    and in the job's configuration `model.converters = ["polymp"]` and
    `training.mixed_precision_param = "float32"`, without which torchtitan's FSDP casts all
    parameters and inputs before the policy sees them. Losses that torchtitan computes after the
    model's call are computed in float32.

    Args:
        policy: of the region, also one with rules by module path; None for torch's own table.
        dtype: the low dtype, bfloat16 or float16.
        device: type of the devices to train on; None for this machine's accelerator, or "cpu".

    Raises:
        TypeError: `dtype` is no dtype.
        ValueError: `dtype` is not a low dtype.
        PolicyError: the policy cannot be read.

    Source:
        torchtitan 0.2.2, torchtitan/protocols/model_converter.py, `ModelConverter`.
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        dtype: torch.dtype | str = torch.bfloat16,
        device: str | None = None,
    ) -> None:
        self._policy = None if policy is None else policy_files.load(policy)
        self._dtype = dtype_names.of(dtype, "Converter(): dtype", LOW)
        self._device = device or accelerator()

    def convert(self, model: nn.Module) -> None:
        """Have every call of the model open the region, in place.

        Args:
            model: before it is compiled or sharded.

        Raises:
            TypeError: the model is scripted, traced or lazy.
            PolicyError: the model is converted already.
        """
        open_region(model, self._policy, self._dtype, self._device)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Do nothing: casts of weights end with the region.

        Args:
            model: or its parts.
        """
