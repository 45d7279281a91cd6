// The CUDA kernels. Calls only enqueue work on the stream; they neither allocate nor wait. Each returns nullptr, or
// CUDA's error message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtp/jobs.h"

namespace gtp::cuda {

using Stream = void*;  // cudaStream_t

const char* multi_amax(const std::vector<Array>& arrays, float* amax, Stream stream);
const char* hadamard_amax(const Array& x, int64_t count, int64_t rows, int64_t cols, float* amax, Stream stream);
const char* quantize(const std::vector<QuantizeJob>& jobs, const QuantizeOptions& options, Stream stream);
const char* dequantize(const std::vector<DequantizeJob>& jobs, int format, Stream stream);
const char* take(const TakeJob& job, Stream stream);
const char* transpose(const TransposeJob& job, Stream stream);
const char* grouped_matmul(const GroupedJob& job, Stream stream);
const char* grouped_blocked_matmul(const GroupedJob& job, Stream stream);
const char* quantize_runs(const RunsJob& job, Stream stream);
// Finds the amax of hidden, or of the gradient of gate_up if the gradient of hidden is given.
const char* swiglu_amax(const SwigluJob& job, float* amax, Stream stream);
const char* swiglu_quantize(const SwigluJob& job, Stream stream);
const char* blocked_matmul(const BlockedJob& job, Stream stream);

// Copies an id, and adds it to a device's stamps (`gtp/record.h`) unless they are nullptr.
const char* stamp(const int32_t* id, int32_t* result, uint64_t* stamps, Stream stream);

// Lets all GPUs of the process write to this memory of the host. `device` is one of them.
const char* share_with_devices(void* memory, int64_t bytes, int32_t device);

// Starts a copy between a device and pinned memory of its host, after all that `stream` has been given.
const char* start_copy(void* to, const void* from, int64_t bytes, bool to_host, Stream stream);

// Lets `stream` wait for the copy to an address.
const char* wait_for_copy(const void* to, Stream stream);

// Returns the version of the cuBLASLt that `blocked_matmul` calls, such as 120900 for CUDA 12.9; 0 if there is none.
size_t cublaslt_version();

}  // namespace gtp::cuda
