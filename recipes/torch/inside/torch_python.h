// What most sources of libtorch_python read. Python's own header comes first, as it asks to.
#pragma once
#include <torch/csrc/python_headers.h>

#include <ATen/core/Tensor.h>
#include <c10/util/irange.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_arg_parser.h>
