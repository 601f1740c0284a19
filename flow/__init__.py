"""The jobs: build steps, the pipelines that order them, and the functions that the tasks call to run them."""
