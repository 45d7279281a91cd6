// The largest finite magnitude of the numbers that the threads of a grid read.
#pragma once

#include "device.cuh"

namespace gtp::cuda {

// The largest finite magnitude among a thread's words. Adding the distance from infinity's pattern to the sign bit makes
// the patterns of non-finite numbers negative, so that a signed maximum ignores them.
template <class T>
class FiniteMax {
 public:
  __device__ __forceinline__ void add(uint32_t word) {
    if constexpr (T::kBytes == 4) {
      top_ = max(top_, static_cast<int32_t>((word & kMagnitude) + kLift));
    } else {
      top_ = static_cast<int32_t>(__vmaxs2(static_cast<uint32_t>(top_), magnitudes<T>(word) + kLift));
    }
  }

  // Returns the maximum as float32 bits; 0 without any number.
  __device__ __forceinline__ uint32_t bits() const {
    return widen_magnitude<T>(fold_halves<T>(static_cast<uint32_t>(top_) - kLift));
  }

 private:
  static constexpr uint32_t kLift = T::kBytes == 4 ? 0x00800000u : __is_same(T, BF16) ? 0x00800080u : 0x04000400u;
  int32_t top_ = static_cast<int32_t>(kLift);
};

// Reduces the block's maximum; its first thread combines it with the slot. An integer maximum is exact and independent
// of the order of the blocks.
template <int kThreads>
__device__ void raise_block(uint32_t top, uint32_t* slot) {
  __shared__ uint32_t tops[kThreads / 32];
  top = __reduce_max_sync(0xFFFFFFFFu, top);
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  if (threadIdx.x < 32) {
    top = threadIdx.x < kThreads / 32 ? tops[threadIdx.x] : 0;
    top = __reduce_max_sync(0xFFFFFFFFu, top);
    if (threadIdx.x == 0 && top != 0) atomicMax(slot, top);
  }
}

}  // namespace gtp::cuda
