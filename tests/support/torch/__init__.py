"""Models, programs and tools for the tests of the torch backend."""
