// A parallel loop on the threads of a pool, in IEEE arithmetic.
#pragma once

#include <cstdint>
#include <functional>

#include "gtp/cpu.h"

namespace gtp::cpu {

// Calls `body(i)` for i from 0 to `count` - 1, on the calling thread and on the free threads of the pool. The caller
// takes part, so the loop ends even if no other thread becomes free.
void parallel_for(const Pool& pool, int64_t count, const std::function<void(int64_t)>& body);

}  // namespace gtp::cpu
