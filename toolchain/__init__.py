"""Leaves: configuration, errors, subprocesses, steps and progress. They import nothing of ours."""
