"""The jobs: build steps, the pipelines that order the steps, and the functions that tasks call to run a job."""
