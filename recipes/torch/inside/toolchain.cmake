# CMake's toolchain file: Linux on 32-bit ARM, compiled on another machine, with the target's libraries in Debian's folders
# for them. Which CPU that is, recipe.toml says: the flags of a variant.
#
# PITORCH_GNU        the target's GNU name, as arm-linux-gnueabihf
# PITORCH_PROCESSOR  as uname says there
# PITORCH_FLAGS      the compilers' options for its CPU
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES PITORCH_GNU PITORCH_PROCESSOR PITORCH_FLAGS)

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${PITORCH_PROCESSOR})
set(CMAKE_LIBRARY_ARCHITECTURE ${PITORCH_GNU})

# What the command line names stays as it is: a variable that is set here would hide it.
macro(pitorch_unless_given name value)
  if(NOT DEFINED ${name})
    set(${name} ${value})
  endif()
endmacro()
pitorch_unless_given(CMAKE_C_COMPILER ${PITORCH_GNU}-gcc)
pitorch_unless_given(CMAKE_CXX_COMPILER ${PITORCH_GNU}-g++)
pitorch_unless_given(CMAKE_CXX_COMPILER_TARGET ${PITORCH_GNU})
pitorch_unless_given(CMAKE_STRIP /usr/bin/${PITORCH_GNU}-strip)
# C calls C++ back: miniz does, for torch.save, which writes to objects of Python's. What is raised there gets through C
# where that has unwind tables, which on ARM compilers make only when they are told.
set(CMAKE_C_FLAGS_INIT "${PITORCH_FLAGS} -fexceptions")
set(CMAKE_CXX_FLAGS_INIT "${PITORCH_FLAGS}")

# Programs that the build runs are this machine's.
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
