"""Tables, programs and tools that the tests share; none of these files is a test."""
