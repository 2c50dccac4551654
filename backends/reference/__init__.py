"""The graph interpreter as a backend."""
