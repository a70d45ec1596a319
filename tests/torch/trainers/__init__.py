"""The adapters of training frameworks, against the frameworks themselves."""
