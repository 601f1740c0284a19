"""A wheel with one pybind11 extension."""

import pybind11
from setuptools import Extension, setup

setup(
    name="pitorch-benchmark-sample",
    version="1.0",
    py_modules=[],
    ext_modules=[
        Extension(
            "sample",
            ["sample.cpp"],
            include_dirs=[pybind11.get_include()],
            extra_compile_args=["-O2", "-g0", "-std=c++17"],
        )
    ],
)
