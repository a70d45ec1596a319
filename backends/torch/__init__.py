"""The torch backend: the core's decision at the dispatcher's autocast keys, and a fused scaler."""

from polymp.versions import require

require("torch")  # says what to install if it is missing
