"""Leaves: configuration, errors, subprocesses, steps and progress. They import no other package of this project."""
