#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "ieee.h"

namespace gtp::cpu {
namespace {

// Outlives the loop, because a task may start after all work is done.
struct Loop {
  std::atomic<int64_t> next{0};
  int64_t count;
  const std::function<void(int64_t)>* body;
  std::mutex mutex;
  std::condition_variable done;
  int64_t left;

  void work() {
    IeeeArithmetic ieee;
    int64_t finished = 0;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count; ++finished) (*body)(i);
    if (finished == 0) return;
    std::lock_guard lock(mutex);
    left -= finished;
    if (left == 0) done.notify_all();
  }
};

}  // namespace

void parallel_for(const Pool& pool, int64_t count, const std::function<void(int64_t)>& body) {
  if (count == 0) return;
  auto loop = std::make_shared<Loop>();
  loop->count = loop->left = count;
  loop->body = &body;
  const int64_t helpers = std::min<int64_t>(pool.threads - 1, count - 1);
  for (int64_t i = 0; i < helpers; ++i) pool.schedule([loop] { loop->work(); });
  loop->work();
  std::unique_lock lock(loop->mutex);
  loop->done.wait(lock, [&] { return loop->left == 0; });
}

}  // namespace gtp::cpu
