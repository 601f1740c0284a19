"""The Docker engine: connect to it, start and stop it, run containers in it."""
