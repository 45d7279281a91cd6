// Records that the device has come to a place in its program: one thread writes a word to the host's memory. The write
// is posted, so the stream does not wait for the bus.
#include <cuda_runtime.h>

#include "gtp/cuda.h"
#include "gtp/record.h"

namespace gtp::cuda {
namespace {

__device__ uint64_t stamps_executed;  // a device has its own, and executes one stamp at a time

__global__ void stamp_kernel(const int32_t* id, int32_t* result, volatile uint64_t* stamps) {
  const int32_t own = *id;
  *result = own;
  if (stamps == nullptr) return;
  const uint64_t number = ++stamps_executed;
  stamps[number % kStampsKept] = number << kStampIdBits | (static_cast<uint32_t>(own) & ((1u << kStampIdBits) - 1));
}

}  // namespace

const char* stamp(const int32_t* id, int32_t* result, uint64_t* stamps, Stream stream) {
  stamp_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(id, result, stamps);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

const char* share_with_devices(void* memory, int64_t bytes, int32_t device) {
  int before = 0, same_address = 0;
  cudaError_t error = cudaGetDevice(&before);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, device);
  }
  if (error == cudaSuccess && same_address) {
    error = cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  }
  if (error == cudaSuccess) error = cudaSetDevice(before);
  cudaGetLastError();  // otherwise the next launch would report the error
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return same_address ? nullptr : "devices see the host's memory at other addresses";
}

}  // namespace gtp::cuda
