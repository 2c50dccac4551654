"""Helpers of tests: random graphs, fuzzers, conformance. `PYTHONPATH=tests python -m support.fuzz --help`."""
