// Times the CUDA kernels in comparison with a device-to-device copy, without XLA. Uses normally distributed numbers,
// 256 MiB by default. Times each format by rows, by columns and both, and transposed dequantization. Each time is
// followed by a checksum of the output, which must not change.
//
//     nvcc -std=c++20 -O3 -fmad=false -arch=sm_90a -Iffi/include -o time_cuda ffi/tests/time_cuda.cu
//         ffi/kernels/cuda/*.cu
//     time_cuda [FILTER] [AMAX] [MIB]     time_cuda both.NVFP4_1D 5.5 64
//     ncu --profile-from-start off --set full time_cuda both.NVFP4_1D 5.5 256 once
#include <cuda_profiler_api.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "gtp/cuda.h"

namespace {

using namespace gtp;

constexpr int64_t kCols = 4096;
int64_t bytes_of_array = int64_t{256} << 20;
constexpr int kArrays = 16;  // used in turn, so that none stays in a cache

bool once = false;

void require(const char* error) {
  if (!error) return;
  std::fprintf(stderr, "%s\n", error);
  std::exit(1);
}

void check(cudaError_t error) { require(error == cudaSuccess ? nullptr : cudaGetErrorString(error)); }

template <class T>
T* device(int64_t bytes) {
  void* data = nullptr;
  check(cudaMalloc(&data, bytes));
  return static_cast<T*>(data);
}

__device__ uint64_t mixed(uint64_t x) {
  x = (x + 1) * 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  return x ^ x >> 27;
}

__global__ void normal(uint32_t* words, int64_t count, int bytes, uint64_t seed) {
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const uint64_t bits = mixed(i + (seed << 40));
    const float radius = sqrtf(-2 * logf(((bits >> 40) + 1) * 0x1p-25f)), turn = (bits & 0xFFFFFF) * 0x1p-23f;
    const uint32_t one = __float_as_uint(radius * cospif(turn)), two = __float_as_uint(radius * sinpif(turn));
    words[i] = bytes == 4 ? one : one >> 16 | (two & 0xFFFF0000u);
  }
}

__global__ void add_up(const uint32_t* words, int64_t count, unsigned long long* sum) {
  uint64_t mine = 0;
  for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    mine += words[i] * mixed(i);
  }
  atomicAdd(sum, mine);
}

unsigned sum_of(const void* data, int64_t bytes) {
  static auto* sum = device<unsigned long long>(8);
  check(cudaMemset(sum, 0, 8));
  add_up<<<1024, 256>>>(static_cast<const uint32_t*>(data), bytes / 4, sum);
  unsigned long long host = 0;
  check(cudaMemcpy(&host, sum, 8, cudaMemcpyDeviceToHost));
  return static_cast<unsigned>(host >> 48);
}

// Returns the median microseconds per call; 0 if the call runs only once, for a profiler.
template <class Call>
double microseconds(const Call& call) {
  if (once) {
    check(cudaProfilerStart());
    call(0);
    check(cudaProfilerStop());
    return 0;
  }
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin));
  check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int round = 0; round < 9; ++round) {
    check(cudaEventRecord(begin));
    for (int i = 0; i < kArrays; ++i) call(i);
    check(cudaEventRecord(end));
    check(cudaEventSynchronize(end));
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end));
    if (round > 0) times.push_back(milliseconds * 1000 / kArrays);
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

struct Buffers {
  char *x = device<char>(bytes_of_array), *y = device<char>(bytes_of_array);
  uint8_t *codes[2] = {device<uint8_t>(bytes_of_array / 2), device<uint8_t>(bytes_of_array / 2)};
  uint8_t *scales[2] = {device<uint8_t>(bytes_of_array / 16), device<uint8_t>(bytes_of_array / 16)};
};

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  const float largest = argc > 2 ? std::strtof(argv[2], nullptr) : 5.5f;
  if (argc > 3) bytes_of_array = std::max(std::strtoll(argv[3], nullptr, 10), 1LL) << 20;
  std::vector<Buffers> buffers(kArrays);
  auto* amax = device<float>(4);
  check(cudaMemcpy(amax, &largest, 4, cudaMemcpyHostToDevice));
  const auto copied = [&](int i) {
    check(cudaMemcpyAsync(buffers[i].y, buffers[i].x, bytes_of_array, cudaMemcpyDefault));
  };
  const double rate = 2 * bytes_of_array / microseconds(copied);
  std::printf("copy %.2f TB/s\n", rate * 1e-6);
  once = argc > 4;

  for (int code = 0; code < kFormatCount; ++code) {
    const Format& format = kFormats[code];
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const int64_t count = bytes_of_array / dtype_bytes(dtype), rows = count / kCols, codes = format.code_bytes(count);
      const int64_t scales = format.block_rows ? count / format.block_rows / format.block_cols : 0;
      for (int i = 0; i < kArrays; ++i) {
        normal<<<4096, 256>>>(reinterpret_cast<uint32_t*>(buffers[i].x), bytes_of_array / 4, dtype_bytes(dtype), i);
      }
      const auto report = [&](const char* operation, int copies, const auto& call, const auto& sum) {
        const std::string name = std::string(operation) + "." + format.name + (dtype == DType::kF32 ? ".f32" : ".bf16");
        if (name.find(filter) == std::string::npos) return;
        const double time = microseconds(call);
        const double moved = static_cast<double>(bytes_of_array + copies * (codes + scales));
        if (once) return;
        std::printf("%-24s %7.1f us  %5.1f%% of a copy  %04x\n", name.c_str(), time, 100 * moved / time / rate, sum());
      };
      for (int ways = 1; ways <= 3; ++ways) {
        const auto quantized = [&](int i) {
          const auto copy = [&](int way) {
            return Copy{buffers[i].codes[way], buffers[i].scales[way], amax, codes, scales, codes, scales, 0, 0};
          };
          QuantizeJob job{buffers[i].x, 1, rows, kCols, rows * kCols, {}, {}, 1, 0, dtype, format.transposed_columns};
          if (ways & 1) job.row = copy(0);
          if (ways & 2) job.column = copy(1);
          require(cuda::quantize({job}, {code, false, nullptr}, nullptr));
        };
        for (int i = 0; ways == 2 && i < kArrays; ++i) quantized(i);  // input of the dequantization below
        report(ways == 1 ? "rows" : ways == 2 ? "columns" : "both", ways == 3 ? 2 : 1, quantized, [&] {
          unsigned sum = 0;
          for (int way = 0; way < 2; ++way) {
            if (!(ways >> way & 1)) continue;
            sum += sum_of(buffers[0].codes[way], codes) + 3 * sum_of(buffers[0].scales[way], scales);
          }
          return sum & 0xFFFF;
        });
      }
      if (!format.transposed_columns) continue;
      report("transposed", 1, [&](int i) {
        const Buffers& b = buffers[i];
        const DequantizeJob job{b.codes[1], b.scales[1], amax, b.y, 1, kCols, rows, kCols, codes, scales, count,
                                1, 0, dtype, Layout::kColumnsTransposed};
        require(cuda::dequantize({job}, code, nullptr));
      }, [&] { return sum_of(buffers[0].y, bytes_of_array); });
    }
  }
  check(cudaDeviceSynchronize());
  return 0;
}
