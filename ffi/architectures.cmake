# Sets `result` to the architectures that the kernels are compiled for, in CMake's notation: machine code for Hopper and
# for the GPUs of this machine, and PTX that a driver translates for any other GPU since Ampere.
# codes: the architectures that the compiler supports, as printed by `nvcc --list-gpu-code`
function(find_architectures result codes)
  set(found 90a-real)
  execute_process(
    COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE printed RESULT_VARIABLE status ERROR_QUIET)
  if(status EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" capabilities "${printed}")
    foreach(capability IN LISTS capabilities)
      string(REPLACE "." "" number "${capability}")
      if(number LESS 80)
        continue()
      elseif(NOT codes MATCHES "sm_${number}([^0-9]|$)")
        message(STATUS "nvcc does not support compute capability ${capability}: the driver will translate PTX")
      elseif(number LESS 90)
        list(APPEND found ${number}-real)
      else()
        list(APPEND found ${number}a-real)
      endif()
    endforeach()
  endif()
  list(REMOVE_DUPLICATES found)
  set(${result} ${found} 80-virtual PARENT_SCOPE)
endfunction()
