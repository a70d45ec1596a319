"""Programs, meshes and tools for the tests of the jax backend."""
