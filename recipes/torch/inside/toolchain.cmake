# CMake toolchain file for cross-compilation for Linux on ARM, with the target's libraries in Debian's multiarch folders.
# The CPU is determined by the flags of the variant in recipe.toml.
#
# PITORCH_GNU        the target's GNU name, such as arm-linux-gnueabihf
# PITORCH_PROCESSOR  the target's processor, as uname -m reports it
# PITORCH_FLAGS      the compiler options for the target's CPU
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES PITORCH_GNU PITORCH_PROCESSOR PITORCH_FLAGS)

set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${PITORCH_PROCESSOR})
set(CMAKE_LIBRARY_ARCHITECTURE ${PITORCH_GNU})

# Keeps the values from the command line, which variables that are set here would hide.
macro(pitorch_unless_given name value)
  if(NOT DEFINED ${name})
    set(${name} ${value})
  endif()
endmacro()
pitorch_unless_given(CMAKE_C_COMPILER ${PITORCH_GNU}-gcc)
pitorch_unless_given(CMAKE_CXX_COMPILER ${PITORCH_GNU}-g++)
pitorch_unless_given(CMAKE_CXX_COMPILER_TARGET ${PITORCH_GNU})
pitorch_unless_given(CMAKE_STRIP /usr/bin/${PITORCH_GNU}-strip)
# C code calls back into C++: miniz does this for torch.save, which writes to Python objects. Exceptions pass through C code
# only if it has unwind tables, which compilers for ARM generate on request only.
set(CMAKE_C_FLAGS_INIT "${PITORCH_FLAGS} -fexceptions")
set(CMAKE_CXX_FLAGS_INIT "${PITORCH_FLAGS}")

# The build runs programs of the build machine.
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
