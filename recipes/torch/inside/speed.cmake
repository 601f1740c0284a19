# What makes the build fast and its products free of paths, laid over upstream's own CMake files from outside:
# CMAKE_PROJECT_Torch_INCLUDE reads this right after project(Torch).

# Not in CMAKE_CXX_FLAGS, which torch.__config__ shows: the path would be in the product after all.
add_compile_options(-ffile-prefix-map=${CMAKE_SOURCE_DIR}=.)

if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  # A precompiled header without time stamps: ccache knows it by its content, and a second build gives the same.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:SHELL:-Xclang -fno-pch-timestamp>")

  # Clang 18 and later put constraints into the names of templates, which GCC 14 does not: extensions would not find them.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fclang-abi-compat=17>")

  # An argument of 8 bytes' alignment starts at a register of even number. Clang takes a class's alignment for that from its
  # own members, and not from its bases; GCC from both. What torch's exported functions take so is std::optional of 64
  # bits, which libstdc++ derives from where the value lies: for Clang it gets a member of that alignment and of no length.
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

  # Modules find each other's types by pybind11's name for the compiler. Extensions are compiled by GCC, here and by
  # users; both compilers have one C++ ABI, so they may share.
  execute_process(COMMAND ${CMAKE_C_COMPILER} -fopenmp -dM -E -x c /dev/null
    OUTPUT_VARIABLE macros COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "__GXX_ABI_VERSION ([0-9]+)" _ "${macros}")
  add_compile_definitions("$<$<COMPILE_LANGUAGE:CXX>:PYBIND11_COMPILER_TYPE=\"_gcc\">"
    "$<$<COMPILE_LANGUAGE:CXX>:PYBIND11_BUILD_ABI=\"_cxxabi${CMAKE_MATCH_1}\">")

  # OpenMP's run-time library stays GCC's: Clang's directives would call another one. There are none in the C++ sources
  # (patch "one OpenMP region"), which call functions of the library alone.
  if(USE_OPENMP)
    string(REGEX MATCH "_OPENMP ([0-9]+)" _ "${macros}")
    set(OpenMP_CXX_FLAGS "-D_OPENMP=${CMAKE_MATCH_1} -isystem /usr/src/recipe/inside/openmp" CACHE STRING "")
    set(OpenMP_CXX_LIB_NAMES gomp CACHE STRING "")
    execute_process(COMMAND ${CMAKE_C_COMPILER} -print-file-name=libgomp.so
      OUTPUT_VARIABLE library OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    set(OpenMP_gomp_LIBRARY ${library} CACHE FILEPATH "")
  endif()
endif()

# The sources of two libraries read the same 2,000 headers a thousand times over. GCC could not use what was precompiled
# without them for sources that have options or macros of their own, as the kernels of aten/src/ATen/native/cpu; Clang can,
# and what is precompiled does not ask for those macros. object_ptr.cpp specialises what was instantiated there.
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

# Sources of one folder in one: what each of them makes of the same headers, templates and inline functions is made once.
# Left alone are sources that have options or macros of their own, generated ones, which are long enough, and those that
# have names in common with their neighbours.
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

# The OpenMP region, in C.
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
