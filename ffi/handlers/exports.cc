// What Python asks of the library, besides the handlers: what they are, and how they were built.
#include <cstdio>
#include <string>

#include "backend.h"
#include "gtp/formats.h"
#include "gtp/record.h"
#include "xla/ffi/api/c_api.h"

// The names are separated by spaces.
#define GTP_TARGETS \
  "gtp_multi_amax gtp_hadamard_amax gtp_quantize gtp_dequantize gtp_pack gtp_pack_apart gtp_unpack gtp_stamp"
#ifdef GTP_WITH_HOPPER
// These kernels are empty unless they are compiled for sm_90a.
#define GTP_HOPPER " gtp_grouped_product gtp_grouped_outer gtp_grouped_blocked_product gtp_grouped_blocked_outer"
#else
#define GTP_HOPPER
#endif
#ifdef GTP_WITH_CUDA
#define GTP_CUDA_TARGETS                                                                                             \
  GTP_TARGETS " gtp_take gtp_transpose gtp_quantize_runs gtp_blocked_product gtp_swiglu_amax gtp_swiglu_quantize"    \
              " gtp_swiglu_quantize_gradient gtp_read gtp_arrive gtp_write gtp_leave" GTP_HOPPER
#else
#define GTP_CUDA_TARGETS
#endif

namespace {

std::string json(const gtp::Format& format) {
  char text[512];
  std::snprintf(text, sizeof text,
                R"({"name": "%s", "element": %d, "element_max": %.9g, "element_bits": %d, "block": [%d, %d], )"
                R"("scale": %d, "scale_max": %.9g, "has_amax": %s, "transposed_columns": %s})",
                format.name, static_cast<int>(format.element), format.element_max, format.element_bits,
                format.block_rows, format.block_cols, static_cast<int>(format.scale), format.scale_max,
                format.has_amax ? "true" : "false", format.transposed_columns ? "true" : "false");
  return text;
}

std::string facts() {
  std::string formats;
  for (const gtp::Format& format : gtp::kFormats) formats += (formats.empty() ? "" : ", ") + json(format);
  return R"({"ffi_version": [)" + std::to_string(XLA_FFI_API_MAJOR) + ", " + std::to_string(XLA_FFI_API_MINOR) +
         R"(], "cuda_version": ")" GTP_CUDA_VERSION R"(", "cuda_architectures": ")" GTP_CUDA_ARCHITECTURES
         R"(", "targets": {"cpu": ")" GTP_TARGETS R"(", "CUDA": ")" GTP_CUDA_TARGETS R"("}, "record": [)" +
         std::to_string(gtp::kRecordDevices) + ", " + std::to_string(gtp::kStampsKept) + ", " +
         std::to_string(gtp::kStampIdBits) + R"(], "formats": [)" + formats + "]}";
}

}  // namespace

// Returns JSON: the version of XLA's interface, what the CUDA kernels were compiled with and for, the names of the
// targets on each platform, the sizes in `gtp/record.h`, and the formats in the order of their codes. The handler of
// the target `gtp_pack` is `gtp_pack_cpu` on CPUs and `gtp_pack_cuda` on GPUs.
GTP_EXPORT const char* gtp_facts() {
  static const std::string text = facts();
  return text.c_str();
}

// Returns the version of cuBLASLt, such as 120900; 0 if there is none, or the library was not built for CUDA.
GTP_EXPORT size_t gtp_cublaslt_version() {
#ifdef GTP_WITH_CUDA
  return gtp::cuda::cublaslt_version();
#else
  return 0;
#endif
}
