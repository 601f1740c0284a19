"""Start, stop and connect to the Docker engine, and run containers in it."""
