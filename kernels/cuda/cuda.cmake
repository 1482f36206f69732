# The CUDA plugin, and the same plugin on an emulated device.
#
# libllmrun_cuda.so is built where nvcc is found: the kernels by nvcc, src/backend/cuda*.c by the C compiler. It has the
# CUDA runtime inside and opens cuBLAS at run time; the program itself needs nothing of CUDA. libllmrun_cuda_emu.so is
# the same C and .cu files, compiled for the CPU against emu/, for tests; it needs a C++ compiler and no toolkit.

set(LLMRUN_CUDA "AUTO" CACHE STRING "The CUDA plugin: ON, OFF, or AUTO = where nvcc is found")
set(LLMRUN_CUDA_ARCHS "80;90a;100" CACHE STRING "Compute capabilities that the plugin has code for")
option(LLMRUN_CUDA_EMU "Build the plugin on an emulated device, for tests" ${LLMRUN_TESTS})

file(GLOB LLMRUN_CUDA_C CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/backend/cuda*.c)
file(GLOB LLMRUN_CUDA_CU CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels/cuda/*.cu)
file(GLOB LLMRUN_CUDA_HEADERS CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels/cuda/*.h ${CMAKE_SOURCE_DIR}/kernels/cuda/*.cuh)
set(LLMRUN_CUDA_BASE ${CMAKE_SOURCE_DIR}/src/base/error.c ${CMAKE_SOURCE_DIR}/src/base/mem.c
                     ${CMAKE_SOURCE_DIR}/src/base/dtype.c)

# What stands between the program and a plugin: both carry a digest of these.
set(abi "")
foreach(f src/backend/backend.h src/backend/plugin.h src/base/act.h src/base/comm.h src/base/draw.h
          src/base/error.h)
  file(SHA256 ${CMAKE_SOURCE_DIR}/${f} sum)
  string(APPEND abi ${sum})
  set_property(DIRECTORY ${CMAKE_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/${f})
endforeach()
string(SHA256 abi "${abi}")
string(SUBSTRING ${abi} 0 16 abi)
set(LLMRUN_PLUGIN_ABI "LR_PLUGIN_ABI=\"${PROJECT_VERSION}-${abi}\"")
set_source_files_properties(${CMAKE_SOURCE_DIR}/src/backend/plugin.c PROPERTIES COMPILE_DEFINITIONS "${LLMRUN_PLUGIN_ABI}")

function(llmrun_cuda_plugin name)
  add_library(${name} MODULE ${LLMRUN_CUDA_C} ${LLMRUN_CUDA_BASE} ${ARGN})
  target_compile_definitions(${name} PRIVATE "${LLMRUN_PLUGIN_ABI}")
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/kernels)
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(${name} PRIVATE Threads::Threads m dl)
endfunction()

# ---- with the toolkit ----

if(LLMRUN_CUDA_CU AND NOT LLMRUN_CUDA STREQUAL "OFF")
  find_program(LLMRUN_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin /usr/local/cuda/bin)
  if(NOT LLMRUN_NVCC AND LLMRUN_CUDA STREQUAL "ON")
    message(FATAL_ERROR "LLMRUN_CUDA=ON, but there is no nvcc in PATH, CUDA_HOME/bin or /usr/local/cuda/bin")
  endif()
endif()
# The sanitizers see nothing of device code, and the host's part is seen in the emulated plugin.
if(LLMRUN_NVCC AND LLMRUN_CUDA_CU AND NOT LLMRUN_CUDA STREQUAL "OFF" AND NOT LLMRUN_SANITIZE)
  get_filename_component(LLMRUN_CUDA_ROOT ${LLMRUN_NVCC} REALPATH)
  get_filename_component(LLMRUN_CUDA_ROOT ${LLMRUN_CUDA_ROOT} DIRECTORY)
  get_filename_component(LLMRUN_CUDA_ROOT ${LLMRUN_CUDA_ROOT} DIRECTORY)
  set(codes "")
  foreach(a ${LLMRUN_CUDA_ARCHS})
    list(APPEND codes -gencode arch=compute_${a},code=sm_${a})
  endforeach()
  # chips of other generations compile this at the first start
  list(GET LLMRUN_CUDA_ARCHS 0 a)
  list(APPEND codes -gencode arch=compute_${a},code=compute_${a})
  set(objects "")
  foreach(f ${LLMRUN_CUDA_CU})
    get_filename_component(n ${f} NAME_WE)
    set(o ${CMAKE_BINARY_DIR}/cuda/${n}.o)
    add_custom_command(OUTPUT ${o}
      COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/cuda
      COMMAND ${LLMRUN_NVCC} -std=c++17 -O3 -lineinfo ${codes} -Xcompiler -fPIC,-fvisibility=hidden
              -I${CMAKE_SOURCE_DIR}/kernels -I${CMAKE_SOURCE_DIR}/src -c ${f} -o ${o}
      DEPENDS ${f} ${LLMRUN_CUDA_HEADERS}
      COMMENT "nvcc ${n}.cu" VERBATIM)
    list(APPEND objects ${o})
  endforeach()
  llmrun_cuda_plugin(llmrun_cuda ${objects})
  target_include_directories(llmrun_cuda SYSTEM PRIVATE ${LLMRUN_CUDA_ROOT}/include)
  find_library(LLMRUN_CUDART cudart_static HINTS ${LLMRUN_CUDA_ROOT}/lib64 ${LLMRUN_CUDA_ROOT}/lib REQUIRED)
  target_link_libraries(llmrun_cuda PRIVATE ${LLMRUN_CUDART} rt stdc++)
  # where cuBLAS is looked for beside the system's folders
  set_target_properties(llmrun_cuda PROPERTIES BUILD_RPATH ${LLMRUN_CUDA_ROOT}/lib64 INSTALL_RPATH ${LLMRUN_CUDA_ROOT}/lib64)
endif()

# ---- emulated ----

include(CheckLanguage)
if(LLMRUN_CUDA_EMU AND LLMRUN_CUDA_CU AND CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND NOT LLMRUN_SANITIZE MATCHES "thread|fuzzer")
  check_language(CXX)
endif()
if(CMAKE_CXX_COMPILER)
  enable_language(CXX)
  set(CMAKE_CXX_VISIBILITY_PRESET hidden)
  file(GLOB LLMRUN_EMU_CPP CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/kernels/cuda/emu/*.cpp)
  add_library(llmrun_cuda_emu_kernels OBJECT ${LLMRUN_CUDA_CU} ${LLMRUN_EMU_CPP})
  set_source_files_properties(${LLMRUN_CUDA_CU} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-xc++")
  # kernels run on stacks that the sanitizers don't know: they see the backend's C here, and the kernels in the
  # kernels' own tests
  target_compile_options(llmrun_cuda_emu_kernels PRIVATE -std=c++20 -O2 -fno-strict-aliasing -Wno-unknown-pragmas
                         -fno-sanitize=all)
  set_target_properties(llmrun_cuda_emu_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON)
  llmrun_cuda_plugin(llmrun_cuda_emu $<TARGET_OBJECTS:llmrun_cuda_emu_kernels>)
  set_target_properties(llmrun_cuda_emu PROPERTIES LINKER_LANGUAGE CXX)
  foreach(t llmrun_cuda_emu_kernels llmrun_cuda_emu)
    target_compile_definitions(${t} PRIVATE LLMRUN_CUDA_HOST)
    target_include_directories(${t} BEFORE PRIVATE ${CMAKE_SOURCE_DIR}/kernels/cuda/emu/include ${CMAKE_SOURCE_DIR}/kernels/cuda/emu
                               ${CMAKE_SOURCE_DIR}/kernels ${CMAKE_SOURCE_DIR}/src)
  endforeach()
endif()

# ---- what scripts/gpu_check runs: on the device where nvcc is, else (--dry) on the emulated one ----

if(LLMRUN_DEVICE_ONLY)
  file(GLOB tests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/cuda/test_*.cpp)
  add_executable(cuda_speed ${CMAKE_SOURCE_DIR}/tests/bench/cuda_speed.c)
  set(programs cuda_speed)
  if(tests)
    enable_language(CXX)
    add_executable(cuda_tests ${tests})
    target_compile_options(cuda_tests PRIVATE -std=c++20 -fno-strict-aliasing -Wno-unknown-pragmas)
    list(APPEND programs cuda_tests)
  endif()
  foreach(t ${programs})
    target_link_libraries(${t} PRIVATE llmrun_core)
    if(TARGET llmrun_cuda)
      target_sources(${t} PRIVATE ${objects})
      target_include_directories(${t} SYSTEM PRIVATE ${LLMRUN_CUDA_ROOT}/include)
      target_link_libraries(${t} PRIVATE ${LLMRUN_CUDART} rt stdc++)
      add_dependencies(${t} llmrun_cuda)
    elseif(TARGET llmrun_cuda_emu)
      target_sources(${t} PRIVATE $<TARGET_OBJECTS:llmrun_cuda_emu_kernels>)
      target_compile_definitions(${t} PRIVATE LLMRUN_CUDA_HOST)
      target_include_directories(${t} BEFORE PRIVATE ${CMAKE_SOURCE_DIR}/kernels/cuda/emu/include ${CMAKE_SOURCE_DIR}/kernels/cuda/emu)
      set_target_properties(${t} PROPERTIES LINKER_LANGUAGE CXX)
      add_dependencies(${t} llmrun_cuda_emu)
    endif()
  endforeach()
  find_library(LLMRUN_CMOCKA cmocka)
  if(LLMRUN_CMOCKA AND TARGET llmrun_cuda_emu)
    add_executable(test_cuda ${CMAKE_SOURCE_DIR}/tests/unit/test_cuda.c)
    target_link_libraries(test_cuda PRIVATE llmrun_core ${LLMRUN_CMOCKA})
    add_dependencies(test_cuda llmrun_cuda_emu)
  endif()
endif()
