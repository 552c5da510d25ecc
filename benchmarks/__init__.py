"""Benchmarks: `make bench`, or `python -m benchmarks --help`. They assert nothing; RESULTS.md says what was measured."""
