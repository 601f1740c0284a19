// TVM's C interface: the layouts are defined in dlpack.h and tvm/ffi/c_api.h (apache-tvm-ffi 0.1.15).
#ifndef PITORCH_TVM_ABI_H
#define PITORCH_TVM_ABI_H

#include <cstdint>

struct DLTensor {
  void *data;
  int32_t deviceType;
  int32_t deviceId;
  int32_t dimensions;
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
  const int64_t *shape;
  int64_t *strides;
  uint64_t byteOffset;
};

struct Any {
  int32_t typeIndex;
  uint32_t padding;
  union {
    int64_t integer;
    void *pointer;
  };
};

constexpr int32_t CPU = 1;
constexpr int32_t INTEGER = 1;  // the type index
constexpr int32_t TENSOR_POINTER = 7;

#endif
