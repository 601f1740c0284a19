// The function compile(), and the class of the kernels that compile() returns.
#ifndef QPU_KERNEL_H
#define QPU_KERNEL_H

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

#include "qpu/detail/builder.h"
#include "qpu/error.h"
#include "qpu/shared_array.h"
#include "qpu/vector.h"

namespace qpu {

namespace detail {

// For a parameter of type T, defines the type of the argument that the caller passes, and converts
// this argument to a uniform.
template <typename T>
struct Argument;
template <>
struct Argument<Int> {
  typedef int Host;
  static std::uint32_t uniform(int x) { return static_cast<std::uint32_t>(x); }
};
template <>
struct Argument<Float> {
  typedef float Host;
  static std::uint32_t uniform(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
  }
};
QPU_API std::uint32_t arrayUniform(bool given, std::uint32_t address);
// The argument for a Ptr parameter: an array, or the address of an array element.
template <typename H>
class ArrayOrPlace {
 public:
  ArrayOrPlace(const SharedArray<H>* array)
      : given_(array != nullptr), address_(array ? array->getAddress() : 0) {}
  ArrayOrPlace(std::nullptr_t) : given_(false), address_(0) {}
  ArrayOrPlace(BusPointer<H> place) : given_(true), address_(place.address()) {}
  std::uint32_t uniform() const { return arrayUniform(given_, address_); }

 private:
  bool given_;
  std::uint32_t address_;
};
template <typename H>
struct ArrayArgument {
  typedef ArrayOrPlace<H> Host;
  static std::uint32_t uniform(const ArrayOrPlace<H>& array) { return array.uniform(); }
};
template <typename T>
struct HostElement;
template <>
struct HostElement<Int> {
  typedef int type;
};
template <>
struct HostElement<Float> {
  typedef float type;
};
template <typename T>
struct HostElement<Ptr<T> > {
  typedef typename HostElement<T>::type* type;
};
template <typename T>
struct Argument<Ptr<T> > : ArrayArgument<typename HostElement<T>::type> {};

template <typename T>
struct Plain : std::remove_cv<typename std::remove_reference<T>::type> {};

template <std::size_t... I>
struct Indices {};
template <std::size_t N, std::size_t... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <std::size_t... I>
struct MakeIndices<0, I...> {
  typedef Indices<I...> type;
};

// Passes a parameter variable to the kernel function. If the function takes the variable by
// value, the variable is constructed in place, because a copy would be recorded as a statement of
// the kernel. If the function takes the variable by reference, this object holds the variable while
// the function runs.
template <typename T>
struct Parameter {
  Node node;
  explicit Parameter(std::size_t position) : node(parameter(position)) {}
  typename Plain<T>::type pass() { return typename Plain<T>::type(FromNode(node)); }
};
template <typename T>
struct Parameter<T&> {
  typename Plain<T>::type variable;
  explicit Parameter(std::size_t position) : variable(FromNode(parameter(position))) {}
  T& pass() { return variable; }
};

template <typename F, typename... Ts>
struct Call {
  template <std::size_t... I>
  static void run(F& f, Indices<I...>) {
    pass(f, Parameter<Ts>(I)...);
  }
  static void pass(F& f, Parameter<Ts>... parameters) { f(parameters.pass()...); }
};

}  // namespace detail

// A compiled kernel. Copies of the object share the program, but each copy has its own QPU count.
// Several threads can call kernels at the same time. Threads can even call the same Kernel object
// if no thread changes the object's QPU count during these calls.
template <typename... Ts>
class Kernel {
 public:
  explicit Kernel(const detail::Program* program)
      : program_(program, detail::releaseProgram) {}

  // Sets the number of QPUs, n (1..12), that later calls use. The default is 1. Throws
  // ArgumentError if n is out of range.
  void setNumQPUs(int n) {
    detail::requireQpuCount(*program_, n);
    qpus_ = n;
  }
  int numQPUs() const { return qpus_; }
  const char* name() const { return detail::programName(*program_); }

  // Returns the machine code as text. Comments in the text name the source constructs from which
  // the code was compiled. After a call on the emulator with profiling enabled, the text also
  // contains each instruction's execution count and its stall time according to the model. Throws
  // CompileError if the kernel cannot be compiled for QPUs.
  std::string listing() const {
    const std::unique_ptr<char, void (*)(char*)> text(detail::programListing(*program_),
                                                      detail::freeText);
    return text.get();
  }
  void dump(std::FILE* file = stdout) const { (void)std::fputs(listing().c_str(), file); }
  // Enables or disables execution and stall counters for each instruction. The counters apply to
  // later calls on the emulator and make these calls slower.
  void setProfiling(bool on) { profiling_ = on; }
  // Returns the statistics of the most recent emulator call through any copy of this kernel.
  Cycles cycles() const { return detail::programCycles(*program_); }
  // Writes the machine code to a file that qpu-objdump, the C interface (qpu.h) and the Python
  // package can read. Throws CompileError if the kernel cannot be compiled for QPUs, and
  // ArgumentError if the file cannot be written.
  void save(const char* path) const { detail::saveProgram(*program_, path); }

  // Runs the kernel to completion. Throws ArgumentError if an array argument is null or not
  // allocated. Throws ExecutionError, or an error derived from it, if the running kernel fails.
  void operator()(typename detail::Argument<Ts>::Host... arguments) const {
    const std::array<std::uint32_t, sizeof...(Ts) + 1> uniforms = {
        {detail::Argument<Ts>::uniform(arguments)..., 0}};
    detail::launch(*program_, qpus_, uniforms.data(), sizeof...(Ts), profiling_);
  }
  // Equivalent to operator(). Programs for QPULib use this name.
  void call(typename detail::Argument<Ts>::Host... arguments) const { (*this)(arguments...); }

 private:
  std::shared_ptr<const detail::Program> program_;
  int qpus_ = 1;
  bool profiling_ = false;
};

namespace detail {

template <typename F, typename... Ts>
Kernel<typename Plain<Ts>::type...> compileFunction(F& f, const char* name, const void* address) {
  const std::array<Type, sizeof...(Ts) + 1> types = {
      {Element<typename Plain<Ts>::type>::type()..., Type::Int}};
  Trace trace(name, address, types.data(), sizeof...(Ts));
  Call<F, Ts...>::run(f, typename MakeIndices<sizeof...(Ts)>::type());
  return Kernel<typename Plain<Ts>::type...>(trace.finish());
}

template <typename M>
struct Callable;
template <typename C, typename... Ts>
struct Callable<void (C::*)(Ts...) const> {
  typedef Kernel<typename Plain<Ts>::type...> KernelType;
  template <typename F>
  static KernelType compile(F& f, const char* name) {
    return compileFunction<F, Ts...>(f, name, nullptr);
  }
};
template <typename C, typename... Ts>
struct Callable<void (C::*)(Ts...)> : Callable<void (C::*)(Ts...) const> {};

}  // namespace detail

// Runs f once to record its program, and returns the program as a kernel. Error messages contain
// `name`, or the function's symbol if `name` is null and the dynamic loader finds a symbol. Throws
// CompileError if the kernel's source is invalid, and BackendError if QPU_BACKEND names an unusable
// backend.
template <typename... Ts>
Kernel<typename detail::Plain<Ts>::type...> compile(void (*f)(Ts...), const char* name = nullptr) {
  return detail::compileFunction<void (*)(Ts...), Ts...>(f, name,
                                                         reinterpret_cast<const void*>(f));
}

// Overload for a lambda or another object that has exactly one operator().
template <typename F>
typename detail::Callable<decltype(&F::operator())>::KernelType compile(
    F f, const char* name = nullptr) {
  return detail::Callable<decltype(&F::operator())>::compile(f, name);
}

}  // namespace qpu

#endif
