"""Helpers of the tests: random graphs, fuzzers, mutation, conformance. `PYTHONPATH=tests python -m support.fuzz
--help`.
"""
