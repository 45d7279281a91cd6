# Lets a build reuse the objects of an earlier one. The command line of an object stays the same if its source, the
# headers named here, the flags, and the versions of the compilers and the CUDA toolkit stay the same. Other system
# headers are not considered. pip installs into a new temporary folder each time, so no command line contains that
# folder.

# Copies the headers of a Python package to a folder of the build, without touching copies that have not changed.
function(copy_headers package folder)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
            "import importlib.util as u, os; print(os.path.join(os.path.dirname(u.find_spec('${package}').origin), 'include'))"
    OUTPUT_VARIABLE include OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  file(GLOB_RECURSE headers RELATIVE "${include}" "${include}/*.h")
  if(NOT headers)
    message(FATAL_ERROR "${package} has no headers in ${include}; install the version that pyproject.toml asks for")
  endif()
  file(GLOB_RECURSE copies RELATIVE "${folder}" "${folder}/*")
  list(REMOVE_ITEM copies ${headers})
  foreach(copy IN LISTS copies)
    file(REMOVE "${folder}/${copy}")
  endforeach()
  foreach(header IN LISTS headers)
    configure_file("${include}/${header}" "${folder}/${header}" COPYONLY)
  endforeach()
endfunction()

# Adds a digest of a source, of all headers in the given folders and of the compilers' versions to the source's command
# line. File times are not sufficient: the files of a copied tree or an upgraded compiler can be older than the objects.
function(name_contents target)
  set(all "")
  # environment variables that compilers read in addition to their command lines
  foreach(variable IN ITEMS CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH NVCC_PREPEND_FLAGS NVCC_APPEND_FLAGS NVCC_CCBIN)
    string(APPEND all "${variable}=$ENV{${variable}}\n")
  endforeach()
  foreach(compiler IN ITEMS ${CMAKE_CXX_COMPILER} ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_HOST_LINK_LAUNCHER})
    execute_process(COMMAND ${compiler} --version OUTPUT_VARIABLE version ERROR_QUIET)
    string(APPEND all "${version}")
  endforeach()
  # headers of the toolkit, which may have been upgraded separately from nvcc
  foreach(folder IN LISTS CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES)
    foreach(header IN ITEMS cuda.h cuda_runtime_api.h cuda_runtime.h cuda_fp16.h cuda_fp16.hpp cuda_bf16.h cuda_bf16.hpp)
      if(EXISTS "${folder}/${header}")
        file(SHA256 "${folder}/${header}" digest)
        string(APPEND all "${header} ${digest}\n")
      endif()
    endforeach()
  endforeach()
  foreach(folder IN LISTS ARGN)
    file(GLOB_RECURSE headers "${folder}/*.h" "${folder}/*.cuh")
    foreach(header IN LISTS headers)
      file(SHA256 "${header}" digest)
      string(APPEND all "${header} ${digest}\n")
    endforeach()
  endforeach()
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    file(SHA256 "${CMAKE_CURRENT_SOURCE_DIR}/${source}" digest)
    string(SHA256 digest "${all}${digest}")
    set_property(SOURCE "${source}" APPEND PROPERTY COMPILE_DEFINITIONS "GTP_CONTENTS=${digest}")
  endforeach()
endfunction()
