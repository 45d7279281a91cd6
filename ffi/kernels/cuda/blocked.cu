// Multiplies e4m3 codes with float32 scales of blocks of 128, by cuBLASLt on Hopper (CUDA 12.9 and later).
//
// cuBLASLt is found at run time among the libraries that JAX has loaded, so that nothing needs to be linked with it, and
// its header is not needed to build. What is used of it is declared here.
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <array>
#include <map>
#include <mutex>
#include <tuple>

#include "gtp/cuda.h"

namespace gtp::cuda {
namespace {

// From cublasLt.h, whose interface does not change between versions.
using Opaque = void*;
enum : int { kComputeFloat = 68, kFloat = 0, kBFloat16 = 14, kE4M3 = 28, kTransposed = 1 };
enum Attribute : int { kTransA = 3, kPointerA = 17, kPointerB = 18, kModeA = 31, kModeB = 32 };
enum : int { kRuns = 4, kTiles = 5 };         // VEC128_32F and BLK128x128_32F
constexpr int kWorkspaceBytes = 1;            // a preference
constexpr size_t kFirstWithBlocks = 120900;   // the version of CUDA 12.9, as in gtp_jax/ops/_quantize/_blocked.py
struct Algorithm {
  uint64_t data[8];
};
struct Found {
  Algorithm algorithm;
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

struct Functions {
  size_t (*version)();
  int (*create)(Opaque*);
  int (*describe)(Opaque*, int compute, int scale);
  int (*set)(Opaque, Attribute, const void*, size_t);
  int (*lay_out)(Opaque*, int type, uint64_t rows, uint64_t cols, int64_t stride);
  int (*prefer)(Opaque*);
  int (*set_preference)(Opaque, int, const void*, size_t);
  int (*find)(Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, int, Found*, int*);
  int (*multiply)(Opaque, Opaque, const void*, const void*, Opaque, const void*, Opaque, const void*, const void*, Opaque, void*,
                  Opaque, const Algorithm*, void*, size_t, cudaStream_t);
  bool complete;
};

template <class Function>
bool load(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

const Functions& functions() {
  static const Functions found = [] {
    Functions f{};
    void* library = nullptr;
    for (const int flags : {RTLD_LAZY | RTLD_NOLOAD, RTLD_LAZY}) {
      for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
        if (library == nullptr) library = dlopen(name, flags);
      }
    }
    f.complete = library != nullptr && load(library, "cublasLtGetVersion", f.version) &&
                 load(library, "cublasLtCreate", f.create) && load(library, "cublasLtMatmulDescCreate", f.describe) &&
                 load(library, "cublasLtMatmulDescSetAttribute", f.set) &&
                 load(library, "cublasLtMatrixLayoutCreate", f.lay_out) &&
                 load(library, "cublasLtMatmulPreferenceCreate", f.prefer) &&
                 load(library, "cublasLtMatmulPreferenceSetAttribute", f.set_preference) &&
                 load(library, "cublasLtMatmulAlgoGetHeuristic", f.find) && load(library, "cublasLtMatmul", f.multiply);
    return f;
  }();
  return found;
}

// What was decided for products of one shape.
struct Plan {
  Opaque handle, description, a, b, out;
  Algorithm algorithm;
};

// Makes the plan, or returns the reason why there is none. cuBLASLt's matrices are column-major, so it computes
// out^T = right left^T.
const char* make(const BlockedJob& job, Plan& plan) {
  const Functions& lt = functions();
  const int mode_a = job.tiles ? kTiles : kRuns, mode_b = kRuns, transposed = kTransposed;
  const int type = job.wide ? kFloat : kBFloat16;
  const auto bytes = static_cast<size_t>(job.workspace_bytes);
  Opaque preference;
  Found found;
  int count = 0;
  const auto size = [](int64_t n) { return static_cast<uint64_t>(n); };
  const bool made = lt.create(&plan.handle) == 0 && lt.describe(&plan.description, kComputeFloat, kFloat) == 0 &&
                    lt.set(plan.description, kTransA, &transposed, sizeof transposed) == 0 &&
                    lt.set(plan.description, kModeA, &mode_a, sizeof mode_a) == 0 &&
                    lt.set(plan.description, kModeB, &mode_b, sizeof mode_b) == 0 &&
                    lt.set(plan.description, kPointerA, &job.right_scales, sizeof(void*)) == 0 &&
                    lt.set(plan.description, kPointerB, &job.left_scales, sizeof(void*)) == 0 &&
                    lt.lay_out(&plan.a, kE4M3, size(job.depth), size(job.columns), job.depth) == 0 &&
                    lt.lay_out(&plan.b, kE4M3, size(job.depth), size(job.rows), job.depth) == 0 &&
                    lt.lay_out(&plan.out, type, size(job.columns), size(job.rows), job.columns) == 0 &&
                    lt.prefer(&preference) == 0 &&
                    lt.set_preference(preference, kWorkspaceBytes, &bytes, sizeof bytes) == 0;
  if (!made) return "cuBLASLt rejected the description of a product in blocks of 128";
  if (lt.find(plan.handle, plan.description, plan.a, plan.b, plan.out, plan.out, preference, 1, &found, &count) != 0 ||
      count == 0) {
    return "cuBLASLt has no kernel for this product in blocks of 128";
  }
  plan.algorithm = found.algorithm;
  return nullptr;
}

}  // namespace

size_t cublaslt_version() { return functions().complete ? functions().version() : 0; }

const char* blocked_matmul(const BlockedJob& job, Stream stream) {
  const Functions& lt = functions();
  if (cublaslt_version() < kFirstWithBlocks) {
    return "products in blocks of 128 take cuBLASLt of CUDA 12.9 or later";
  }
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return cudaGetErrorString(error);
  static std::mutex mutex;
  static std::map<std::tuple<int, int64_t, int64_t, int64_t, bool, bool>, Plan> plans;
  const std::lock_guard<std::mutex> lock(mutex);  // the pointers are part of a plan's description
  const auto key = std::make_tuple(device, job.rows, job.columns, job.depth, job.tiles, job.wide);
  auto place = plans.find(key);
  if (place == plans.end()) {
    Plan plan{};
    if (const char* error = make(job, plan)) return error;
    place = plans.emplace(key, plan).first;
  }
  const Plan& plan = place->second;
  lt.set(plan.description, kPointerA, &job.right_scales, sizeof(void*));
  lt.set(plan.description, kPointerB, &job.left_scales, sizeof(void*));
  const float one = 1.0f, zero = 0.0f;
  const int status = lt.multiply(plan.handle, plan.description, &one, job.right, plan.a, job.left, plan.b, &zero, job.out,
                                 plan.out, job.out, plan.out, &plan.algorithm, job.workspace,
                                 static_cast<size_t>(job.workspace_bytes), static_cast<cudaStream_t>(stream));
  return status == 0 ? nullptr : "cuBLASLt failed to launch a product in blocks of 128";
}

}  // namespace gtp::cuda
