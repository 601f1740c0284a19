"""A wheel with one pybind11 extension."""

import pybind11
from setuptools import Extension, setup

setup(
    name="pitorch-benchmark-standin",
    version="1.0",
    py_modules=[],
    ext_modules=[
        Extension(
            "standin",
            ["standin.cpp"],
            include_dirs=[pybind11.get_include()],
            extra_compile_args=["-O2", "-g0", "-std=c++17"],
        )
    ],
)
