// The CPU kernels. Calls return when the work is done.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "gtp/jobs.h"

namespace gtp::cpu {

// Runs a task on another thread at some later time.
using Schedule = std::function<void(std::function<void()>)>;

struct Pool {
  int threads;
  Schedule schedule;
};

void multi_amax(const std::vector<Array>& arrays, float* amax, const Pool& pool);
void hadamard_amax(const Array& x, int64_t count, int64_t rows, int64_t cols, float* amax, const Pool& pool);
void quantize(const std::vector<QuantizeJob>& jobs, const QuantizeOptions& options, const Pool& pool);
void dequantize(const std::vector<DequantizeJob>& jobs, int format, const Pool& pool);

}  // namespace gtp::cpu
