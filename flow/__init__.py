"""Define the build steps, the pipelines that order these steps, and the functions that tasks call to run jobs."""
