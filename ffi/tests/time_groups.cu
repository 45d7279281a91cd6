// Times the amaxes and FP8 codes of 128 float32 matrices of 9.4 MB, in three ways: all amaxes before all codes; in groups
// of matrices small enough that reading them for the codes hits the L2 cache; and in one pass that takes the amax while it
// makes codes with the power of two that a sixteenth of the matrix requires, and is repeated for a matrix whose amax
// requires another. Experiments for ideas in docs/experiments.md.
//
//     nvcc -std=c++17 -arch=sm_90a -o time_groups ffi/tests/time_groups.cu && ./time_groups
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

constexpr int kThreads = 256, kLoads = 8;
constexpr int kMatrices = 128;
constexpr int64_t kElements = int64_t{2048} * 1152, kQuads = kElements / 4;
constexpr int kBlocks = (kQuads + kThreads * kLoads - 1) / (kThreads * kLoads);  // per matrix

template <bool kStreaming>
__global__ void __launch_bounds__(kThreads) largest(const float4* x, uint32_t* amax) {
  const int matrix = blockIdx.x / kBlocks;
  const float4* own = x + matrix * kQuads;
  float4 words[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t at = int64_t{blockIdx.x % kBlocks} * kThreads * kLoads + i * kThreads + threadIdx.x;
    words[i] = at >= kQuads ? make_float4(0, 0, 0, 0) : kStreaming ? __ldcs(own + at) : own[at];
  }
  float top = 0;
#pragma unroll
  for (const float4& w : words) top = fmaxf(top, fmaxf(fmaxf(fabsf(w.x), fabsf(w.y)), fmaxf(fabsf(w.z), fabsf(w.w))));
  __shared__ uint32_t tops[kThreads / 32];
  uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(top));
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = bits;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (const uint32_t other : tops) bits = max(bits, other);
  atomicMax(amax + matrix, bits);
}

__global__ void __launch_bounds__(kThreads) codes(const float4* x, const uint32_t* amax, uint32_t* out) {
  const int matrix = blockIdx.x / kBlocks;
  const float factor = 448.f / __uint_as_float(amax[matrix]);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t at = int64_t{blockIdx.x % kBlocks} * kThreads * kLoads + i * kThreads + threadIdx.x;
    if (at >= kQuads) continue;
    const float4 w = __ldcs(x + matrix * kQuads + at);
    const auto pair = [&](float a, float b) -> uint32_t {
      return __nv_cvt_float2_to_fp8x2(make_float2(a * factor, b * factor), __NV_SATFINITE, __NV_E4M3);
    };
    __stcs(out + matrix * kQuads + at, pair(w.x, w.y) | pair(w.z, w.w) << 16);
  }
}

// The exponent of the power of two by which a matrix of this amax is multiplied.
__device__ int shift(uint32_t amax) { return 8 - (static_cast<int>(amax >> 23) - 127); }

__global__ void __launch_bounds__(kThreads) sampled(const float4* x, uint32_t* sample) {
  constexpr int kSampled = (kBlocks + 15) / 16;
  const int matrix = blockIdx.x / kSampled, block = blockIdx.x % kSampled * 16;
  float top = 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t at = int64_t{block} * kThreads * kLoads + i * kThreads + threadIdx.x;
    const float4 w = at >= kQuads ? make_float4(0, 0, 0, 0) : __ldcs(x + matrix * kQuads + at);
    top = fmaxf(top, fmaxf(fmaxf(fabsf(w.x), fabsf(w.y)), fmaxf(fabsf(w.z), fabsf(w.w))));
  }
  const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(top));
  if (threadIdx.x % 32 == 0) atomicMax(sample + matrix, bits);
}

// Makes codes with the power of two that `used` requires, and takes the amax. If `known` is given, makes the codes
// again with the power that it requires, unless that is the same.
__global__ void __launch_bounds__(kThreads) codes_and_amax(const float4* x, const uint32_t* used, uint32_t* amax,
                                                           uint32_t* out, const uint32_t* known) {
  const int matrix = blockIdx.x / kBlocks;
  if (known && shift(known[matrix]) == shift(used[matrix])) return;
  const float factor = exp2f(static_cast<float>(shift(known ? known[matrix] : used[matrix])));
  float top = 0;
  float4 words[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t at = int64_t{blockIdx.x % kBlocks} * kThreads * kLoads + i * kThreads + threadIdx.x;
    words[i] = at >= kQuads ? make_float4(0, 0, 0, 0) : __ldcs(x + matrix * kQuads + at);
  }
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t at = int64_t{blockIdx.x % kBlocks} * kThreads * kLoads + i * kThreads + threadIdx.x;
    if (at >= kQuads) continue;
    const float4 w = words[i];
    top = fmaxf(top, fmaxf(fmaxf(fabsf(w.x), fabsf(w.y)), fmaxf(fabsf(w.z), fabsf(w.w))));
    const auto pair = [&](float a, float b) -> uint32_t {
      return __nv_cvt_float2_to_fp8x2(make_float2(a * factor, b * factor), __NV_SATFINITE, __NV_E4M3);
    };
    __stcs(out + matrix * kQuads + at, pair(w.x, w.y) | pair(w.z, w.w) << 16);
  }
  if (known) return;
  const uint32_t bits = __reduce_max_sync(~0u, __float_as_uint(top));
  if (threadIdx.x % 32 == 0) atomicMax(amax + matrix, bits);
}

__global__ void fill(float* x, int64_t count) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < count; i += int64_t{gridDim.x} * blockDim.x) {
    x[i] = static_cast<float>(i * 2654435761u % 1000) * 1e-3f;
  }
}

int main() {
  float4* x;
  uint32_t *amax, *sample, *out;
  cudaMalloc(&x, kMatrices * kElements * 4);
  cudaMalloc(&out, kMatrices * kElements);
  cudaMalloc(&amax, kMatrices * 4);
  cudaMalloc(&sample, kMatrices * 4);
  cudaMemset(amax, 0, kMatrices * 4);
  fill<<<2048, 256>>>(reinterpret_cast<float*>(x), kMatrices * kElements);
  cudaStream_t stream;
  cudaStreamCreate(&stream);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  cudaDeviceSynchronize();
  // 0: one group, with loads that bypass the cache; -1: one pass; -2: one pass, repeated for every matrix
  for (const int group : {0, -1, -2, 0, -1, -2, 128, 32, 16, 8, 4, 3, 2, 1}) {
    cudaGraph_t graph;
    cudaGraphExec_t run;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    if (group < 0) {
      constexpr int kSampled = (kBlocks + 15) / 16;
      cudaMemsetAsync(sample, 0, kMatrices * 4, stream);
      cudaMemsetAsync(amax, 0, kMatrices * 4, stream);
      if (group == -1) sampled<<<kMatrices * kSampled, kThreads, 0, stream>>>(x, sample);
      codes_and_amax<<<kMatrices * kBlocks, kThreads, 0, stream>>>(x, sample, amax, out, nullptr);
      codes_and_amax<<<kMatrices * kBlocks, kThreads, 0, stream>>>(x, sample, amax, out, amax);
    }
    for (int first = 0; group >= 0 && first < kMatrices; first += group ? group : kMatrices) {
      const int count = std::min(group ? group : kMatrices, kMatrices - first);
      if (group) {
        largest<false><<<count * kBlocks, kThreads, 0, stream>>>(x + first * kQuads, amax + first);
      } else {
        largest<true><<<count * kBlocks, kThreads, 0, stream>>>(x, amax);
      }
      codes<<<count * kBlocks, kThreads, 0, stream>>>(x + first * kQuads, amax + first, out + first * kQuads);
    }
    cudaStreamEndCapture(stream, &graph);
    cudaGraphInstantiate(&run, graph, 0);
    std::vector<float> times;
    for (int i = 0; i < 30; ++i) {
      cudaEventRecord(begin, stream);
      cudaGraphLaunch(run, stream);
      cudaEventRecord(end, stream);
      cudaEventSynchronize(end);
      float ms;
      cudaEventElapsedTime(&ms, begin, end);
      if (i >= 6) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    std::printf("groups of %3d: median %.3f ms, least %.3f\n", group, times[times.size() / 2], times[0]);
  }
  std::puts(cudaGetErrorString(cudaGetLastError()));
}
