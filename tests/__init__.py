"""The tests of polymp."""

# Options of a process in which warnings are errors, as in pyproject.toml they are here.
STRICT = ("-W", "error", "-W", "default:polymp is tested with:UserWarning")
