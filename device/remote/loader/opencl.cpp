#include "opencl.hpp"

#define CL_TARGET_OPENCL_VERSION 120
#include <CL/cl.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "on_board.hpp"

namespace opencl {
namespace {

constexpr std::size_t MAX_LOG = 4000;
constexpr char LINE = '\x1e';  // separates lines in a compiler's output, because a response must be one line
constexpr std::size_t BATCH = 256;  // launches in the queue at a time: each one keeps an event until all have finished
constexpr cl_int NO_PLATFORM = -1001;  // CL_PLATFORM_NOT_FOUND_KHR

// The functions of libOpenCL that this file calls.
#define PITORCH_OPENCL_FUNCTIONS(EACH) \
  EACH(clBuildProgram)                 \
  EACH(clCreateBuffer)                 \
  EACH(clCreateCommandQueue)           \
  EACH(clCreateContext)                \
  EACH(clCreateKernel)                 \
  EACH(clCreateProgramWithBinary)      \
  EACH(clCreateProgramWithSource)      \
  EACH(clEnqueueNDRangeKernel)         \
  EACH(clEnqueueReadBuffer)            \
  EACH(clEnqueueWriteBuffer)           \
  EACH(clFinish)                       \
  EACH(clGetDeviceIDs)                 \
  EACH(clGetDeviceInfo)                \
  EACH(clGetEventInfo)                 \
  EACH(clGetEventProfilingInfo)        \
  EACH(clGetKernelInfo)                \
  EACH(clGetKernelWorkGroupInfo)       \
  EACH(clGetPlatformIDs)               \
  EACH(clGetPlatformInfo)              \
  EACH(clGetProgramBuildInfo)          \
  EACH(clGetProgramInfo)               \
  EACH(clReleaseCommandQueue)          \
  EACH(clReleaseContext)               \
  EACH(clReleaseEvent)                 \
  EACH(clReleaseKernel)                \
  EACH(clReleaseMemObject)             \
  EACH(clReleaseProgram)               \
  EACH(clSetKernelArg)

class Api {
 public:
#define PITORCH_DECLARE(name) decltype(&::name) name = nullptr;
  PITORCH_OPENCL_FUNCTIONS(PITORCH_DECLARE)
#undef PITORCH_DECLARE

  Api() {
    std::string reasons;
    void *handle = nullptr;
    // On phones, the library may be outside the search path, or part of the GPU's driver (Mali, PowerVR).
    for (const char *name : {"libOpenCL.so.1", "libOpenCL.so", "/vendor/lib64/libOpenCL.so",
                             "/vendor/lib64/egl/libGLES_mali.so", "/vendor/lib64/libPVROCL.so"}) {
      handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      if (handle != nullptr) break;
      const char *reason = dlerror();
      if (reasons.empty() || access(name, F_OK) == 0) reasons = reason;
    }
    if (handle == nullptr) throw Failure("no-opencl", reasons);
#define PITORCH_FIND(name) find(handle, #name, name);
    PITORCH_OPENCL_FUNCTIONS(PITORCH_FIND)
#undef PITORCH_FIND
  }

 private:
  template <typename Function>
  static void find(void *handle, const char *name, Function &function) {
    void *found = dlsym(handle, name);
    if (found == nullptr) throw Failure("no-opencl", std::string("libOpenCL.so has no function ") + name);
    std::memcpy(&function, &found, sizeof function);
  }
};

const Api &api() {
  static const Api opened;
  return opened;
}

std::string nameOf(cl_int code) {
  static const std::map<cl_int, const char *> names = {
      {CL_DEVICE_NOT_AVAILABLE, "CL_DEVICE_NOT_AVAILABLE"},
      {CL_COMPILER_NOT_AVAILABLE, "CL_COMPILER_NOT_AVAILABLE"},
      {CL_MEM_OBJECT_ALLOCATION_FAILURE, "CL_MEM_OBJECT_ALLOCATION_FAILURE"},
      {CL_OUT_OF_RESOURCES, "CL_OUT_OF_RESOURCES"},
      {CL_OUT_OF_HOST_MEMORY, "CL_OUT_OF_HOST_MEMORY"},
      {CL_BUILD_PROGRAM_FAILURE, "CL_BUILD_PROGRAM_FAILURE"},
      {CL_INVALID_VALUE, "CL_INVALID_VALUE"},
      {CL_INVALID_COMMAND_QUEUE, "CL_INVALID_COMMAND_QUEUE"},
      {CL_INVALID_BINARY, "CL_INVALID_BINARY"},
      {CL_INVALID_BUILD_OPTIONS, "CL_INVALID_BUILD_OPTIONS"},
      {CL_INVALID_KERNEL_NAME, "CL_INVALID_KERNEL_NAME"},
      {CL_INVALID_ARG_SIZE, "CL_INVALID_ARG_SIZE"},
      {CL_INVALID_WORK_GROUP_SIZE, "CL_INVALID_WORK_GROUP_SIZE"},
      {CL_INVALID_WORK_ITEM_SIZE, "CL_INVALID_WORK_ITEM_SIZE"},
      {CL_INVALID_BUFFER_SIZE, "CL_INVALID_BUFFER_SIZE"},
      {CL_PROFILING_INFO_NOT_AVAILABLE, "CL_PROFILING_INFO_NOT_AVAILABLE"},
      {NO_PLATFORM, "CL_PLATFORM_NOT_FOUND_KHR"},
  };
  const auto found = names.find(code);
  return found != names.end() ? found->second : "error " + std::to_string(code);
}

// The kind of an error that an OpenCL function returned, except for compiler errors.
const char *kindOf(cl_int code) {
  switch (code) {
    case CL_OUT_OF_HOST_MEMORY:
      return "memory";
    case CL_MEM_OBJECT_ALLOCATION_FAILURE:
    case CL_INVALID_BUFFER_SIZE:
      return "device-memory";
    case CL_INVALID_WORK_GROUP_SIZE:
    case CL_INVALID_WORK_ITEM_SIZE:
      return "work-group";
    default:
      return "driver";
  }
}

// `more` is text about the call, which is appended to the error's name.
void require(cl_int code, const char *function, const std::string &more = "") {
  if (code != CL_SUCCESS) throw Failure(kindOf(code), std::string(function) + ": " + nameOf(code) + more);
}

// Read values and strings through a clGet…Info function.
template <typename T, typename Get>
T value(Get get, const char *function) {
  T found{};
  require(get(sizeof found, &found, nullptr), function);
  return found;
}

template <typename Get>
std::string text(Get get, const char *function) {
  std::size_t size = 0;
  require(get(0, nullptr, &size), function);
  std::string found(size, '\0');
  if (size > 0) require(get(size, found.data(), nullptr), function);
  found.resize(std::strlen(found.c_str()));
  return found;
}

auto ofDevice(cl_device_id device, cl_device_info what) {
  return [=](std::size_t size, void *to, std::size_t *needed) {
    return api().clGetDeviceInfo(device, what, size, to, needed);
  };
}

std::string deviceText(cl_device_id device, cl_device_info what) {
  std::string found = text(ofDevice(device, what), "clGetDeviceInfo");
  for (char &each : found)
    if (each == '\t' || each == '\n' || each == '\r') each = ' ';
  return found;
}

template <typename T>
T deviceValue(cl_device_id device, cl_device_info what) {
  return value<T>(ofDevice(device, what), "clGetDeviceInfo");
}

std::vector<cl_device_id> allDevices() {
  cl_uint count = 0;
  const cl_int state = api().clGetPlatformIDs(0, nullptr, &count);
  if (state == NO_PLATFORM || (state == CL_SUCCESS && count == 0))
    throw Failure("no-device", "libOpenCL.so finds no driver");
  require(state, "clGetPlatformIDs");
  std::vector<cl_platform_id> platforms(count);
  require(api().clGetPlatformIDs(count, platforms.data(), nullptr), "clGetPlatformIDs");
  std::vector<cl_device_id> found;
  std::string drivers;
  for (cl_platform_id platform : platforms) {
    drivers += (drivers.empty() ? "" : ", ") + text([=](std::size_t size, void *to, std::size_t *needed) {
                 return api().clGetPlatformInfo(platform, CL_PLATFORM_NAME, size, to, needed);
               }, "clGetPlatformInfo");
    cl_uint devices = 0;
    const cl_int answer = api().clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, 0, nullptr, &devices);
    if (answer != CL_SUCCESS) {
      // This error is not fatal, because other drivers may have devices.
      if (answer != CL_DEVICE_NOT_FOUND) drivers += " (clGetDeviceIDs: " + nameOf(answer) + ")";
      continue;
    }
    const std::size_t before = found.size();
    found.resize(before + devices);
    require(api().clGetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, devices, found.data() + before, nullptr),
            "clGetDeviceIDs");
  }
  if (found.empty()) throw Failure("no-device", "these drivers have no device: " + drivers);
  return found;
}

std::string dimensions(const std::array<std::size_t, 3> &sizes) {
  return std::to_string(sizes[0]) + "×" + std::to_string(sizes[1]) + "×" + std::to_string(sizes[2]);
}

std::string mebibytes(std::uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

// ------------------------------------------------------------------------------------------ kept binaries

std::vector<unsigned char> readFile(const std::string &path) {
  std::vector<unsigned char> content;
  if (FILE *file = std::fopen(path.c_str(), "rb")) {
    std::array<unsigned char, 65536> block{};
    for (std::size_t got = 0; (got = std::fread(block.data(), 1, block.size(), file)) > 0;)
      content.insert(content.end(), block.begin(), block.begin() + static_cast<std::ptrdiff_t>(got));
    if (std::ferror(file) != 0) content.clear();
    (void)std::fclose(file);
  }
  return content;
}

// Errors are not reported: if the binary cannot be kept, the next session builds it again.
void keep(const std::string &path, const std::vector<unsigned char> &content) {
  std::string staged = path + ".XXXXXX";
  const int file = mkstemp(staged.data());
  if (file < 0) return;
  FILE *stream = fdopen(file, "wb");
  const bool whole = stream != nullptr && std::fwrite(content.data(), 1, content.size(), stream) == content.size();
  const bool closed = stream != nullptr && std::fclose(stream) == 0;
  if (!whole || !closed || std::rename(staged.c_str(), path.c_str()) != 0) unlink(staged.c_str());
}

// ------------------------------------------------------------------------------------------ the kernel

class Kernel : public Library {
 public:
  Kernel(const Request &request, bool &kept) : request_(request) {
    const std::vector<cl_device_id> found = allDevices();
    if (request.device >= found.size())
      throw Failure("no-device", "there is no device " + std::to_string(request.device));
    device_ = found[request.device];
    try {
      cl_int state = CL_SUCCESS;
      context_ = api().clCreateContext(nullptr, 1, &device_, nullptr, nullptr, &state);
      require(state, "clCreateContext");
      queue_ = api().clCreateCommandQueue(context_, device_, CL_QUEUE_PROFILING_ENABLE, &state);
      require(state, "clCreateCommandQueue");
      const std::string folder = keptFolder("opencl");
      const std::string path = folder.empty() ? "" : folder + "/" + request.digest;
      kept = !path.empty() && fromBinary(path);
      if (!kept) fromSource(path);
      kernel_ = api().clCreateKernel(program_, request.kernel.c_str(), &state);
      if (state == CL_INVALID_KERNEL_NAME) throw Failure("load", "the source has no kernel " + request.kernel);
      require(state, "clCreateKernel");
      checkGroup();
    } catch (...) {
      clear();
      throw;
    }
  }
  Kernel(const Kernel &) = delete;
  Kernel &operator=(const Kernel &) = delete;
  Kernel(Kernel &&) = delete;
  Kernel &operator=(Kernel &&) = delete;
  ~Kernel() override { clear(); }

  // Arrays are in the board's memory. Copies on the device are updated before each run and read back after the run.
  void *allocate(std::size_t bytes) override {
    const auto most = deviceValue<cl_ulong>(device_, CL_DEVICE_MAX_MEM_ALLOC_SIZE);
    const auto all = deviceValue<cl_ulong>(device_, CL_DEVICE_GLOBAL_MEM_SIZE);
    const std::string sizes = "an array of " + mebibytes(bytes) + " after " + mebibytes(allocated_) +
                              "; the device has " + mebibytes(all) + ", at most " + mebibytes(most) + " for one array";
    if (bytes > most || allocated_ + bytes > all) throw Failure("device-memory", sizes);
    cl_int state = CL_SUCCESS;
    cl_mem buffer =
        api().clCreateBuffer(context_, CL_MEM_READ_WRITE, std::max<std::size_t>(bytes, 1), nullptr, &state);
    require(state, "clCreateBuffer", " for " + sizes);
    void *memory = std::aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT);
    if (memory == nullptr) {
      api().clReleaseMemObject(buffer);
      return nullptr;
    }
    buffers_[memory] = {buffer, bytes};
    allocated_ += bytes;
    return memory;
  }

  void release(void *memory) override {
    const auto found = buffers_.find(memory);
    if (found == buffers_.end()) return;
    api().clReleaseMemObject(found->second.buffer);
    allocated_ -= found->second.bytes;
    buffers_.erase(found);
    std::free(memory);
  }

  void run(const std::vector<pitorch_array> &arrays) override { (void)time(arrays, 1); }

  // The sum of the device's own measurements, without the time for copies and queueing.
  double time(const std::vector<pitorch_array> &arrays, std::uint64_t number) override {
    const auto expected = value<cl_uint>(
        [this](std::size_t size, void *to, std::size_t *needed) {
          return api().clGetKernelInfo(kernel_, CL_KERNEL_NUM_ARGS, size, to, needed);
        },
        "clGetKernelInfo");
    if (expected != arrays.size())
      throw Failure("kernel", "the kernel takes " + std::to_string(expected) + " arguments, found " +
                                  std::to_string(arrays.size()) + " arrays: the inputs, then the result");
    for (std::size_t i = 0; i < arrays.size(); i++) {
      const Buffer &each = buffers_.at(arrays[i].data);
      if (each.bytes > 0)
        require(api().clEnqueueWriteBuffer(queue_, each.buffer, CL_TRUE, 0, each.bytes, arrays[i].data, 0, nullptr,
                                           nullptr),
                "clEnqueueWriteBuffer");
      const cl_int state = api().clSetKernelArg(kernel_, static_cast<cl_uint>(i), sizeof(cl_mem), &each.buffer);
      if (state == CL_OUT_OF_RESOURCES || state == CL_OUT_OF_HOST_MEMORY) require(state, "clSetKernelArg");
      if (state != CL_SUCCESS)
        throw Failure("kernel", "argument " + std::to_string(i) + " is not a __global pointer: " + nameOf(state));
    }
    double seconds = 0;
    for (std::uint64_t done = 0; done < number; done += BATCH)
      seconds += launch(static_cast<std::size_t>(std::min<std::uint64_t>(BATCH, number - done)));
    for (const pitorch_array &array : arrays) {
      const Buffer &each = buffers_.at(array.data);
      if (each.bytes > 0)
        require(
            api().clEnqueueReadBuffer(queue_, each.buffer, CL_TRUE, 0, each.bytes, array.data, 0, nullptr, nullptr),
            "clEnqueueReadBuffer");
    }
    return seconds;
  }

  std::string backend() override {
    return deviceText(device_, CL_DEVICE_NAME) + " (OpenCL driver " + deviceText(device_, CL_DRIVER_VERSION) + ")";
  }
  double modelSeconds() override { return -1; }

 private:
  struct Buffer {
    cl_mem buffer = nullptr;
    std::size_t bytes = 0;
  };

  bool fromBinary(const std::string &path) {
    const std::vector<unsigned char> content = readFile(path);
    if (content.empty()) return false;
    const unsigned char *data = content.data();
    const std::size_t size = content.size();
    cl_int state = CL_SUCCESS;
    program_ = api().clCreateProgramWithBinary(context_, 1, &device_, &size, &data, nullptr, &state);
    if (state == CL_SUCCESS) state = api().clBuildProgram(program_, 1, &device_, nullptr, nullptr, nullptr);
    if (state == CL_SUCCESS) return true;
    // The binary is damaged, or from another driver version: build the source instead.
    if (program_ != nullptr) api().clReleaseProgram(program_);
    program_ = nullptr;
    return false;
  }

  void fromSource(const std::string &path) {
    const char *source = request_.source.data();
    const std::size_t length = request_.source.size();
    cl_int state = CL_SUCCESS;
    program_ = api().clCreateProgramWithSource(context_, 1, &source, &length, &state);
    require(state, "clCreateProgramWithSource");
    state = api().clBuildProgram(program_, 1, &device_, request_.options.c_str(), nullptr, nullptr);
    if (state == CL_BUILD_PROGRAM_FAILURE || state == CL_INVALID_BUILD_OPTIONS)
      throw Failure("build", "clBuildProgram: " + nameOf(state) + LINE + buildLog());
    require(state, "clBuildProgram");
    std::size_t size = 0;
    state = api().clGetProgramInfo(program_, CL_PROGRAM_BINARY_SIZES, sizeof size, &size, nullptr);
    if (path.empty() || state != CL_SUCCESS || size == 0) return;
    std::vector<unsigned char> binary(size);
    unsigned char *data = binary.data();
    state = api().clGetProgramInfo(program_, CL_PROGRAM_BINARIES, sizeof(unsigned char *), &data, nullptr);
    if (state == CL_SUCCESS) keep(path, binary);
  }

  std::string buildLog() {
    std::string found;
    try {
      found = text(
          [this](std::size_t size, void *to, std::size_t *needed) {
            return api().clGetProgramBuildInfo(program_, device_, CL_PROGRAM_BUILD_LOG, size, to, needed);
          },
          "clGetProgramBuildInfo");
    } catch (const Failure &fault) {
      found = fault.what();  // does not replace the compiler's error
    }
    if (found.size() > MAX_LOG) found.resize(MAX_LOG);
    std::replace(found.begin(), found.end(), '\n', LINE);
    return found;
  }

  template <typename T>
  T groupValue(cl_kernel_work_group_info what) {
    return value<T>(
        [this, what](std::size_t size, void *to, std::size_t *needed) {
          return api().clGetKernelWorkGroupInfo(kernel_, device_, what, size, to, needed);
        },
        "clGetKernelWorkGroupInfo");
  }

  // Drivers report most of these errors only at the first launch, with an error code that does not state the limit.
  void checkGroup() {
    const auto local = groupValue<cl_ulong>(CL_KERNEL_LOCAL_MEM_SIZE);
    const auto available = deviceValue<cl_ulong>(device_, CL_DEVICE_LOCAL_MEM_SIZE);
    if (local > available)
      throw Failure("device-memory", "the kernel uses " + std::to_string(local) +
                                         " bytes of local memory; the device has " + std::to_string(available));
    if (request_.local[0] == 0) return;
    const auto required = groupValue<std::array<std::size_t, 3>>(CL_KERNEL_COMPILE_WORK_GROUP_SIZE);
    if (required[0] != 0 && required != request_.local)
      throw Failure("kernel", "reqd_work_group_size requires work groups of " + dimensions(required) +
                                  " work items, found " + dimensions(request_.local));
    const std::size_t items = request_.local[0] * request_.local[1] * request_.local[2];
    const auto most = groupValue<std::size_t>(CL_KERNEL_WORK_GROUP_SIZE);
    if (items > most)
      throw Failure("work-group", dimensions(request_.local) + " = " + std::to_string(items) +
                                      " work items; the device runs at most " + std::to_string(most) +
                                      " of this kernel together");
    const auto limits = deviceValue<std::array<std::size_t, 3>>(device_, CL_DEVICE_MAX_WORK_ITEM_SIZES);
    for (std::size_t i = 0; i < limits.size(); i++)
      if (request_.local[i] > limits[i])
        throw Failure("work-group", dimensions(request_.local) + " work items; the device's limits are " +
                                        dimensions(limits));
  }

  double launch(std::size_t number) {
    std::vector<cl_event> events;
    events.reserve(number);
    const std::size_t *local = request_.local[0] != 0 ? request_.local.data() : nullptr;
    cl_int state = CL_SUCCESS;
    const char *function = "clEnqueueNDRangeKernel";
    std::string more = " for " + dimensions(request_.global) + " work items";
    if (local != nullptr) more += " in work groups of " + dimensions(request_.local);
    for (std::size_t i = 0; i < number && state == CL_SUCCESS; i++) {
      cl_event event = nullptr;
      state = api().clEnqueueNDRangeKernel(queue_, kernel_, 3, nullptr, request_.global.data(), local, 0, nullptr,
                                           &event);
      if (state == CL_SUCCESS) events.push_back(event);
    }
    if (state == CL_SUCCESS) {
      function = "clFinish";
      more.clear();
      state = api().clFinish(queue_);
    }
    double seconds = 0;
    for (cl_event event : events) {
      cl_int status = CL_COMPLETE;
      cl_ulong began = 0, ended = 0;
      if (state == CL_SUCCESS) {
        function = "clGetEventInfo";
        state = api().clGetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof status, &status, nullptr);
      }
      if (state == CL_SUCCESS && status < 0) {
        function = "the kernel's event";
        state = status;
      }
      if (state == CL_SUCCESS) {
        function = "clGetEventProfilingInfo";
        state = api().clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_START, sizeof began, &began, nullptr);
      }
      if (state == CL_SUCCESS)
        state = api().clGetEventProfilingInfo(event, CL_PROFILING_COMMAND_END, sizeof ended, &ended, nullptr);
      seconds += static_cast<double>(ended - began) * 1e-9;
      api().clReleaseEvent(event);
    }
    require(state, function, more);
    return seconds;
  }

  void clear() {
    for (const auto &each : buffers_) {
      api().clReleaseMemObject(each.second.buffer);
      std::free(each.first);
    }
    buffers_.clear();
    if (kernel_ != nullptr) api().clReleaseKernel(kernel_);
    if (program_ != nullptr) api().clReleaseProgram(program_);
    if (queue_ != nullptr) api().clReleaseCommandQueue(queue_);
    if (context_ != nullptr) api().clReleaseContext(context_);
  }

  Request request_;
  cl_device_id device_ = nullptr;
  cl_context context_ = nullptr;
  cl_command_queue queue_ = nullptr;
  cl_program program_ = nullptr;
  cl_kernel kernel_ = nullptr;
  std::map<void *, Buffer> buffers_;
  std::uint64_t allocated_ = 0;
};

}  // namespace

std::string devices() {
  std::string lines;
  for (cl_device_id device : allDevices()) {
    const auto type = deviceValue<cl_device_type>(device, CL_DEVICE_TYPE);
    const std::array<std::string, 6> fields = {
        (type & CL_DEVICE_TYPE_GPU) != 0 ? "GPU" : (type & CL_DEVICE_TYPE_CPU) != 0 ? "CPU" : "accelerator",
        deviceText(device, CL_DEVICE_NAME),
        deviceText(device, CL_DEVICE_VERSION),
        deviceText(device, CL_DRIVER_VERSION),
        std::to_string(deviceValue<cl_uint>(device, CL_DEVICE_MAX_COMPUTE_UNITS)),
        std::to_string(deviceValue<cl_ulong>(device, CL_DEVICE_GLOBAL_MEM_SIZE)),
    };
    for (const std::string &field : fields) lines += field + "\t";
    lines.back() = '\n';
  }
  return lines;
}

std::unique_ptr<Library> build(const Request &request, bool &kept) { return std::make_unique<Kernel>(request, kept); }

}  // namespace opencl
