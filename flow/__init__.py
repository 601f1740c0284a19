"""The jobs: steps over a context, pipelines of steps, and the functions behind the tasks that run them."""
