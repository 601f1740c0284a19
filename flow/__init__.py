"""The jobs: pipelines of steps from the configuration to the products."""
