# What makes the build fast and its products free of paths, laid over upstream's own CMake files from outside:
# CMAKE_PROJECT_Torch_INCLUDE reads this right after project(Torch).

# Not in CMAKE_CXX_FLAGS, which torch.__config__ shows: the path would be in the product after all.
add_compile_options(-ffile-prefix-map=${CMAKE_SOURCE_DIR}=.)

# The sources of two libraries read the same 2,000 headers a thousand times over. Those compiled with options or macros
# of their own, as the kernels of aten/src/ATen/native/cpu, could not use what was precompiled without: they stay as
# they are.
function(pitorch_precompile)
  foreach(library torch_cpu torch_python)
    target_precompile_headers(${library} PRIVATE
      "$<$<COMPILE_LANGUAGE:CXX>:/usr/src/recipe/inside/${library}.h>")
    get_target_property(sources ${library} SOURCES)
    foreach(source IN LISTS sources)
      get_source_file_property(definitions ${source} TARGET_DIRECTORY ${library} COMPILE_DEFINITIONS)
      get_source_file_property(flags ${source} TARGET_DIRECTORY ${library} COMPILE_FLAGS)
      if(definitions OR flags OR source MATCHES "MapAllocator|third_party")
        set_source_files_properties(${source} TARGET_DIRECTORY ${library} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
      endif()
    endforeach()
  endforeach()
endfunction()

cmake_language(DEFER CALL pitorch_precompile)
