// A loop over all threads of a pool, in IEEE arithmetic.
#pragma once

#include <cstdint>
#include <functional>

#include "gtp/cpu.h"

namespace gtp::cpu {

// Calls `body(i)` for i from 0 to `count`, on the calling thread and on those of the pool that are free. The caller
// takes part, so that this ends even if no other thread ever comes.
void parallel_for(const Pool& pool, int64_t count, const std::function<void(int64_t)>& body);

}  // namespace gtp::cpu
