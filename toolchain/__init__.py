"""Configuration, errors, subprocesses, steps and progress: modules that import no other package of this project."""
