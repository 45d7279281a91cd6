// The Python module gtp_jax.native._native: handlers as capsules, and how they were built.
#include <pybind11/pybind11.h>

#include <type_traits>

#include "gtp/formats.h"
#ifdef GTP_WITH_CUDA
#include "gtp/cuda.h"
#endif
#include "xla/ffi/api/c_api.h"

#define GTP_FOR_EACH_OPERATION(DO) \
  DO(multi_amax) DO(hadamard_amax) DO(quantize) DO(dequantize) DO(pack) DO(pack_apart) DO(unpack)
#define GTP_FOR_EACH_CUDA_OPERATION(DO) DO(take) DO(transpose) DO(quantize_runs) DO(blocked_product)
// These kernels are empty unless they are compiled for sm_90a.
#define GTP_FOR_EACH_HOPPER_OPERATION(DO) \
  DO(grouped_product) DO(grouped_outer) DO(grouped_blocked_product) DO(grouped_blocked_outer)

#define GTP_DECLARE(name)                                             \
  extern "C" XLA_FFI_Error* gtp_##name##_cpu(XLA_FFI_CallFrame* frame); \
  extern "C" XLA_FFI_Error* gtp_##name##_cuda(XLA_FFI_CallFrame* frame);
GTP_FOR_EACH_OPERATION(GTP_DECLARE)
GTP_FOR_EACH_CUDA_OPERATION(GTP_DECLARE)
GTP_FOR_EACH_HOPPER_OPERATION(GTP_DECLARE)
#undef GTP_DECLARE

namespace py = pybind11;

namespace {

template <class Handler>
py::capsule capsule(Handler* handler) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Handler, XLA_FFI_CallFrame*>, "not an XLA FFI handler");
  return py::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

py::dict handlers() {
  py::dict cpu, cuda;
#define GTP_ADD(name) cpu["gtp_" #name] = capsule(gtp_##name##_cpu);
  GTP_FOR_EACH_OPERATION(GTP_ADD)
#undef GTP_ADD
#ifdef GTP_WITH_CUDA
#define GTP_ADD(name) cuda["gtp_" #name] = capsule(gtp_##name##_cuda);
  GTP_FOR_EACH_OPERATION(GTP_ADD)
  GTP_FOR_EACH_CUDA_OPERATION(GTP_ADD)
#ifdef GTP_WITH_HOPPER
  GTP_FOR_EACH_HOPPER_OPERATION(GTP_ADD)
#endif
#undef GTP_ADD
#endif
  py::dict platforms;
  platforms["cpu"] = cpu;
  platforms["CUDA"] = cuda;
  return platforms;
}

py::list formats() {
  py::list all;
  for (const gtp::Format& format : gtp::kFormats) {
    py::dict facts;
    facts["name"] = format.name;
    facts["element"] = static_cast<int>(format.element);
    facts["element_max"] = format.element_max;
    facts["element_bits"] = format.element_bits;
    facts["block"] = py::make_tuple(format.block_rows, format.block_cols);
    facts["scale"] = static_cast<int>(format.scale);
    facts["scale_max"] = format.scale_max;
    facts["has_amax"] = format.has_amax;
    facts["transposed_columns"] = format.transposed_columns;
    all.append(facts);
  }
  return all;
}

size_t cublaslt_version() {
#ifdef GTP_WITH_CUDA
  return gtp::cuda::cublaslt_version();
#else
  return 0;
#endif
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() = "The compiled part of gtp_jax.native.";
  module.def("handlers", &handlers, "Returns the XLA FFI handlers, as capsules by platform and target name.");
  module.def("formats", &formats, "Returns the formats as the kernels define them, in the order of their codes.");
  module.def("cublaslt_version", &cublaslt_version,
             "Returns the version of cuBLASLt, such as 120900; 0 if there is none, or it was not built for CUDA.");
  module.attr("ffi_version") = py::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("cuda_architectures") = GTP_CUDA_ARCHITECTURES;
  module.attr("cuda_version") = GTP_CUDA_VERSION;
}
