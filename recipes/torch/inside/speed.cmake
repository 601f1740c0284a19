# Settings for a fast build and for products without paths, without changes in upstream's CMake files. CMake includes this
# file after project(Torch), because of CMAKE_PROJECT_Torch_INCLUDE.

# torch.__config__ shows CMAKE_CXX_FLAGS, so this option with a path must not be there.
add_compile_options(-ffile-prefix-map=${CMAKE_SOURCE_DIR}=.)

if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  # Without time stamps, precompiled headers are reproducible, and ccache identifies them by their content.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-Xclang -fno-pch-timestamp>")

  # Clang 18 and later mangle the constraints of templates; GCC 14 does not, so extensions would not find these symbols.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fclang-abi-compat=17>")

  # An argument with an alignment of 8 bytes starts at an even-numbered register. To determine the alignment of a class, Clang
  # uses its own members, and GCC also its bases. This concerns std::optional of 64-bit types in torch's exported functions:
  # libstdc++ stores the value in a base. For Clang, the class gets an additional member with this alignment and no size.
  find_file(optional optional PATHS ${CMAKE_CXX_IMPLICIT_INCLUDE_DIRECTORIES} REQUIRED NO_CACHE NO_DEFAULT_PATH
    NO_CMAKE_FIND_ROOT_PATH)
  file(READ ${optional} header)
  set(place "using _Base = _Optional_base<_Tp>;")
  string(REPLACE "${place}"
    "${place} conditional_t<alignof(_Tp) >= 8, unsigned long long, char> _M_alignment[0] = {};" aligned "${header}")
  if(aligned STREQUAL header)
    message(FATAL_ERROR "${optional} has no \"${place}\": GCC and Clang would pass std::optional<int64_t> differently")
  endif()
  file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/abi/optional CONTENT "@aligned@" @ONLY)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-isystem ${CMAKE_BINARY_DIR}/abi>")

  # pybind11 shares types only between modules with the same compiler name. Extensions are compiled by GCC, here and by
  # users. Both compilers have the same C++ ABI, so they can share types.
  execute_process(COMMAND ${CMAKE_C_COMPILER} -fopenmp -dM -E -x c /dev/null
    OUTPUT_VARIABLE macros COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "__GXX_ABI_VERSION ([0-9]+)" _ "${macros}")
  add_compile_definitions("$<$<COMPILE_LANGUAGE:CXX>:PYBIND11_COMPILER_TYPE=\"_gcc\">"
    "$<$<COMPILE_LANGUAGE:CXX>:PYBIND11_BUILD_ABI=\"_cxxabi${CMAKE_MATCH_1}\">")

  # The OpenMP runtime is GCC's libgomp. Clang's code for directives would call another runtime, but the C++ sources contain
  # no directives (patch 0004); they only call functions of the runtime.
  if(USE_OPENMP)
    string(REGEX MATCH "_OPENMP ([0-9]+)" _ "${macros}")
    set(OpenMP_CXX_FLAGS "-D_OPENMP=${CMAKE_MATCH_1} -isystem /usr/src/recipe/inside/openmp" CACHE STRING "")
    set(OpenMP_CXX_LIB_NAMES gomp CACHE STRING "")
    execute_process(COMMAND ${CMAKE_C_COMPILER} -print-file-name=libgomp.so
      OUTPUT_VARIABLE library OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    set(OpenMP_gomp_LIBRARY ${library} CACHE FILEPATH "")
  endif()
endif()

# The sources of two libraries include the same 2,000 headers. Sources with additional options or macros, such as the kernels
# in aten/src/ATen/native/cpu, cannot use a precompiled header made without these with GCC; with Clang they can, and the
# precompiled headers do not use these macros. object_ptr.cpp specialises a template that the headers instantiate.
function(pitorch_precompile)
  foreach(library torch_cpu torch_python)
    target_precompile_headers(${library} PRIVATE
      "$<$<COMPILE_LANGUAGE:CXX>:/usr/src/recipe/inside/${library}.h>")
    get_target_property(sources ${library} SOURCES)
    foreach(source IN LISTS sources)
      get_source_file_property(definitions ${source} TARGET_DIRECTORY ${library} COMPILE_DEFINITIONS)
      get_source_file_property(flags ${source} TARGET_DIRECTORY ${library} COMPILE_FLAGS)
      if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND source MATCHES "/native/cpu/")
        continue()
      endif()
      if(definitions OR flags OR source MATCHES "MapAllocator|object_ptr|third_party")
        set_source_files_properties(${source} TARGET_DIRECTORY ${library} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
      endif()
    endforeach()
  endforeach()
endfunction()

# Unity builds: the sources of a folder are compiled together, so that their common headers, templates and inline functions
# are compiled once. Excluded are sources with additional options or macros, generated sources, which are large enough, and
# sources that define the same names as others in their folder.
function(pitorch_unite)
  set(folders "/torch/csrc/(jit|api|autograd|dynamo|utils)/|/torch/csrc/[^/]*$|/ATen/functorch/")
  string(CONCAT alone
    "/generated/|/jit/backends/|/jit/frontend/tracer|/jit/serialization/export|/operators/quantization"
    "|/register_(prim_ops|prim_ops_fulljit|special_ops)[.]|/symbolic_shape_registry[.]|/python_legacy_variable"
    "|/autograd/(autograd_meta|profiler_kineto)[.]|/BatchRulesBinaryOps|/LegacyBatchingRegistrations"
    "|/passes/xnnpack_rewrite[.]|/dynamo/(init|utils)[.]|/onnx/shape_type_inference|/utils/tensor_numpy")
  set(size_torch_cpu 8)
  set(size_torch_python 6)
  foreach(library torch_cpu torch_python)
    set_target_properties(${library} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
    get_target_property(sources ${library} SOURCES)
    list(REMOVE_DUPLICATES sources)
    list(SORT sources)
    foreach(source IN LISTS sources)
      get_source_file_property(apart ${source} TARGET_DIRECTORY ${library} SKIP_PRECOMPILE_HEADERS)
      if(source MATCHES "${folders}" AND NOT source MATCHES "${alone}" AND NOT apart)
        get_filename_component(folder ${source} DIRECTORY)
        string(REGEX REPLACE "^.*/(torch/csrc|ATen)" "" folder "${folder}")
        string(MAKE_C_IDENTIFIER "${library}${folder}" group)
        list(APPEND ${group} ${source})
        list(LENGTH ${group} number)
        math(EXPR number "(${number} - 1) / ${size_${library}}")
        set_source_files_properties(${source} TARGET_DIRECTORY ${library} PROPERTIES UNITY_GROUP ${group}_${number})
      endif()
    endforeach()
  endforeach()
endfunction()

# Compiles the OpenMP region, which is in C, with GCC.
function(pitorch_openmp)
  if(USE_OPENMP)
    set(team /usr/src/recipe/inside/openmp/team.c)
    target_sources(torch_cpu PRIVATE ${team})
    set_source_files_properties(${team} TARGET_DIRECTORY torch_cpu PROPERTIES COMPILE_OPTIONS "-fopenmp;-fexceptions")
  endif()
endfunction()

cmake_language(DEFER CALL pitorch_precompile)
cmake_language(DEFER CALL pitorch_unite)
cmake_language(DEFER CALL pitorch_openmp)
