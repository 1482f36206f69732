# What cmake --install puts where, and the Debian packages that cpack -G DEB makes of it (scripts/package).
#
#   bin/llmrun, LIBDIR/llmrun/*.so (plugins: src/base/place.h), LIBDIR/lua/5.4/llmrun.so (for a stock lua5.4),
#   LIBDIR/libllmrun.so, include/llmrun.h, LIBDIR/pkgconfig/llmrun.pc (the C library),
#   the manual page, completions, the documentation with the examples, share/llmrun/library (for editors)

set(LLMRUN_LUADIR ${CMAKE_INSTALL_LIBDIR}/lua/5.4 CACHE STRING "Where llmrun.so for a stock Lua is installed")
set(LLMRUN_DEBIAN OFF)
if(EXISTS /etc/debian_version AND CMAKE_INSTALL_PREFIX STREQUAL "/usr")
  set(LLMRUN_DEBIAN ON)
endif()

# The Lua module: the same objects as the program's, less Lua itself, which the program that opens it brings.
add_library(llmrun_module MODULE src/module.c src/shared.c $<TARGET_OBJECTS:llmrun_core>)
target_include_directories(llmrun_module PRIVATE src)
target_link_libraries(llmrun_module PRIVATE ${LLMRUN_LIBRARIES})
# threads and exit handlers may outlive the Lua state: the file stays mapped (nodelete)
target_link_options(llmrun_module PRIVATE -Wl,-z,nodelete -Wl,--exclude-libs,ALL -Wl,--wrap=stderr)
set_target_properties(llmrun_module PROPERTIES OUTPUT_NAME llmrun PREFIX "")

# The C library (src/llmrun.h). Its number follows that of the interface, which is not promised before 1.0.
add_library(llmrun_shared SHARED src/shared.c $<TARGET_OBJECTS:llmrun_core>)
target_link_libraries(llmrun_shared PRIVATE ${LLMRUN_LIBRARIES} ${LUA_LINK_LIBRARIES})
target_link_options(llmrun_shared PRIVATE -Wl,--exclude-libs,ALL -Wl,--wrap=stderr)
set_target_properties(llmrun_shared PROPERTIES OUTPUT_NAME llmrun VERSION ${PROJECT_VERSION} SOVERSION 0 LINKER_LANGUAGE C)
set(LLMRUN_PC ${CMAKE_BINARY_DIR}/llmrun.pc)
# from the folder of the file to the prefix: the tree may be installed anywhere
file(RELATIVE_PATH LLMRUN_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" LLMRUN_PC_PREFIX "${LLMRUN_PC_PREFIX}")
configure_file(${CMAKE_SOURCE_DIR}/scripts/llmrun.pc.in ${LLMRUN_PC} @ONLY)

# Manual page and completions, out of the program's own help.
set(LLMRUN_MANUALS "")
foreach(kind man bash zsh fish)
  set(o ${CMAKE_BINARY_DIR}/manual/llmrun.${kind})
  add_custom_command(OUTPUT ${o}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/manual
    COMMAND llmrun ${CMAKE_SOURCE_DIR}/scripts/gen_manual.lua ${kind} ${o}
    DEPENDS llmrun ${CMAKE_SOURCE_DIR}/scripts/gen_manual.lua VERBATIM)
  list(APPEND LLMRUN_MANUALS ${o})
endforeach()
set(o ${CMAKE_BINARY_DIR}/manual/llmrun.1.gz)
add_custom_command(OUTPUT ${o} COMMAND gzip -9nc ${CMAKE_BINARY_DIR}/manual/llmrun.man > ${o}
  DEPENDS ${CMAKE_BINARY_DIR}/manual/llmrun.man VERBATIM)
list(APPEND LLMRUN_MANUALS ${o})
# not under the sanitizers, where nothing is installed from
if(NOT LLMRUN_SANITIZE)
  add_custom_target(llmrun_manual ALL DEPENDS ${LLMRUN_MANUALS})
  add_dependencies(llmrun llmrun_module)
else()
  set_target_properties(llmrun_module llmrun_shared PROPERTIES EXCLUDE_FROM_ALL ON)
  return()
endif()

set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME llmrun)
install(TARGETS llmrun RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT llmrun)
install(TARGETS llmrun_module LIBRARY DESTINATION ${LLMRUN_LUADIR} COMPONENT llmrun)
foreach(t llmrun_cuda llmrun_mpi llmrun_nccl)
  if(TARGET ${t})
    string(REPLACE llmrun_ "" component ${t})
    if(LLMRUN_DEBIAN) # a package names no folders of the machine that it was made on
      set_target_properties(${t} PROPERTIES INSTALL_RPATH "")
    endif()
    install(TARGETS ${t} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}/llmrun COMPONENT ${component})
  endif()
endforeach()
install(TARGETS llmrun_shared LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
        NAMELINK_COMPONENT development)
install(FILES src/llmrun.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
install(FILES ${LLMRUN_PC} DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)

install(FILES ${CMAKE_BINARY_DIR}/manual/llmrun.1.gz DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT llmrun)
install(FILES ${CMAKE_BINARY_DIR}/manual/llmrun.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
        RENAME llmrun COMPONENT llmrun)
set(zsh site-functions)
if(LLMRUN_DEBIAN)
  set(zsh vendor-completions)
endif()
install(FILES ${CMAKE_BINARY_DIR}/manual/llmrun.zsh DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/${zsh} RENAME _llmrun COMPONENT llmrun)
install(FILES ${CMAKE_BINARY_DIR}/manual/llmrun.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT llmrun)
install(FILES README.md DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT llmrun)
install(FILES lua/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME LUA.md COMPONENT llmrun)
install(DIRECTORY lua/library DESTINATION ${CMAKE_INSTALL_DATADIR}/llmrun COMPONENT llmrun)
install(DIRECTORY examples DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT llmrun)

# ---- Debian packages: the program, its plugins, the C library ----

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_CONTACT "the llmrun authors <maintainers@llmrun.invalid>" CACHE STRING "Who answers for the packages")
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_SECTION misc)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL "")

# A component as a package NAME with the texts SUMMARY and DESCRIPTION, and the files that every package has.
function(llmrun_package component name summary description)
  string(TOUPPER ${component} upper)
  install(FILES ${CMAKE_SOURCE_DIR}/scripts/debian/copyright DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${name} COMPONENT ${component})
  install(FILES ${CMAKE_BINARY_DIR}/changelog.gz DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${name} COMPONENT ${component})
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${name} PARENT_SCOPE)
  set(CPACK_DEBIAN_${upper}_DESCRIPTION "${summary}\n${description}" PARENT_SCOPE)
  set(CPACK_COMPONENTS_ALL ${CPACK_COMPONENTS_ALL} ${component} PARENT_SCOPE)
endfunction()

if(LLMRUN_DEBIAN)
  execute_process(COMMAND gzip -9nc ${CMAKE_SOURCE_DIR}/scripts/debian/changelog
                  OUTPUT_FILE ${CMAKE_BINARY_DIR}/changelog.gz)
  llmrun_package(llmrun llmrun "LLM inference engine whose decisions are Lua programs"
    "The engine owns kernels, paged KV memory, continuous batching and sampling;\na Lua program owns what happens: prompts, agents, samplers, scheduling\npolicies, how a model's layers are wired. With an OpenAI server, and a module\nfor Lua 5.4.")
  set(CPACK_DEBIAN_LLMRUN_PACKAGE_SUGGESTS "lua5.4, lua-busted, llmrun-mpi")
  llmrun_package(library libllmrun0 "LLM inference engine, C library"
    "Loads models and holds conversations with them, from C.")
  set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libs)
  install(FILES scripts/debian/libllmrun0.lintian-overrides DESTINATION share/lintian/overrides RENAME libllmrun0 COMPONENT library)
  set(CPACK_DEBIAN_LIBRARY_PACKAGE_CONTROL_EXTRA ${CMAKE_SOURCE_DIR}/scripts/debian/triggers)
  llmrun_package(development libllmrun-dev "LLM inference engine, headers of the C library"
    "What programs are compiled with that use libllmrun: the header, the name for\nthe linker, and a file for pkg-config.")
  set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
  set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "libllmrun0 (= ${PROJECT_VERSION})")
  foreach(plugin "mpi;for groups of processes" "nccl;for groups of GPUs" "cuda;for NVIDIA GPUs")
    list(GET plugin 0 p)
    list(GET plugin 1 what)
    if(TARGET llmrun_${p})
      llmrun_package(${p} llmrun-${p} "LLM inference engine, plugin ${what}"
        "A plugin that llmrun opens when it is asked for.")
      string(TOUPPER ${p} upper)
      set(CPACK_DEBIAN_${upper}_PACKAGE_DEPENDS "llmrun (= ${PROJECT_VERSION})")
    endif()
  endforeach()
endif()
include(CPack)
