"""`Options`: what is asked of a loss scaler beside the rule."""

from typing import Any, Literal, NamedTuple

from polymp.backends.torch.scaler import distributed
from polymp.scaling.gradient_report import OnStuck, checked_on_stuck

SkipOn = Literal["auto", "host", "device"]


class Options(NamedTuple):
    """The arguments of `GradScaler` by their names, and the loss that it is for."""

    on_stuck: OnStuck
    stuck_after: int
    strict: bool
    allow_fp16: bool
    check_loss: bool
    skip_on: SkipOn
    process_group: Any
    loss: str = ""  # its name, if there are several

    def __deepcopy__(self, memo: dict[int, Any]) -> "Options":
        return self  # a process group cannot be copied

    def __reduce__(self) -> Any:
        if self.process_group is not None:
            raise TypeError(
                "a scaler with a process_group cannot be pickled. Save its state_dict() and load "
                "it into one that was made with the group."
            )
        return Options, tuple(self)


def checked(options: Options) -> Options:
    """The options, or an error.

    Raises:
        TypeError: `process_group` is neither None nor a process group.
        ValueError: an option is none of its words, or out of its range.
    """
    if options.skip_on not in ("auto", "host", "device"):
        raise ValueError(f"skip_on must be 'auto', 'host' or 'device', got {options.skip_on!r}.")
    checked_on_stuck(options.on_stuck, options.stuck_after)
    distributed.check_group(options.process_group)
    return options
