"""The deprecation warning of the names in polymp.torch.cuda and polymp.torch.cpu."""

import warnings


def deprecated(name: str, device: str) -> None:
    """Warn, as torch.amp does, that `torch.<device>.amp.<name>` is an old spelling.

    Args:
        name: of the class or function.
        device: "cpu" or "cuda".
    """
    custom = name.startswith("custom_")
    call = f"args..., device_type='{device}'" if custom else f"'{device}', args..."
    warnings.warn(
        f"`torch.{device}.amp.{name}(args...)` is deprecated. Please use "
        f"`torch.amp.{name}({call})` instead. With polymp: `polymp.torch.{name}({call})`.",
        FutureWarning,
        stacklevel=3,
    )
