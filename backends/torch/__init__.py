"""The torch backend: the core's decision at the dispatcher's autocast keys, and a fused scaler."""
