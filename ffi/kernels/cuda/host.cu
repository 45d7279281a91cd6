// Copies between the memory of a device and pinned memory of its host, on two streams in addition to that of the
// program: one for each direction, because the link carries both at once. The program starts a copy in one call and
// waits for it in another, and in between keeps both buffers.
#include <cuda_runtime.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "gtp/cuda.h"

namespace gtp::cuda {
namespace {

#define GTP_TRY(call)                                                             \
  do {                                                                            \
    if (cudaError_t error = (call); error != cudaSuccess) return cudaGetErrorString(error); \
  } while (0)

// The copies of one device. All members are used with the mutex held.
struct Copies {
  std::mutex mutex;
  cudaStream_t streams[2] = {nullptr, nullptr};  // from the host, to the host
  std::map<const void*, cudaEvent_t> running;    // by the address that is written
  std::vector<cudaEvent_t> free;

  const char* event(cudaEvent_t* found) {
    if (free.empty()) {
      GTP_TRY(cudaEventCreateWithFlags(found, cudaEventDisableTiming));
    } else {
      *found = free.back();
      free.pop_back();
    }
    return nullptr;
  }
};

Copies* copies_of_device(const char** error) {
  static std::mutex mutex;
  static std::map<int, std::unique_ptr<Copies>> devices;
  int device = 0;
  if (cudaError_t found = cudaGetDevice(&device); found != cudaSuccess) {
    *error = cudaGetErrorString(found);
    return nullptr;
  }
  const std::lock_guard lock(mutex);
  std::unique_ptr<Copies>& own = devices[device];
  if (!own) {
    own = std::make_unique<Copies>();
    for (cudaStream_t& stream : own->streams) {
      if (cudaError_t found = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking); found != cudaSuccess) {
        *error = cudaGetErrorString(found);
        own.reset();
        return nullptr;
      }
    }
  }
  return own.get();
}

}  // namespace

const char* start_copy(void* to, const void* from, int64_t bytes, bool to_host, Stream stream) {
  const char* error = nullptr;
  Copies* copies = copies_of_device(&error);
  if (copies == nullptr) return error;
  const std::lock_guard lock(copies->mutex);
  cudaStream_t own = copies->streams[to_host];
  cudaEvent_t before = nullptr, after = nullptr;
  if ((error = copies->event(&before)) != nullptr) return error;
  copies->free.push_back(before);  // a wait keeps what was recorded when it was enqueued
  GTP_TRY(cudaEventRecord(before, static_cast<cudaStream_t>(stream)));
  GTP_TRY(cudaStreamWaitEvent(own, before));
  cudaEvent_t& slot = copies->running[to];
  if (slot != nullptr) {  // of a program that failed before it waited
    GTP_TRY(cudaStreamWaitEvent(own, slot));
    after = slot;
  } else if ((error = copies->event(&after)) != nullptr) {
    copies->running.erase(to);
    return error;
  }
  slot = after;
  cudaError_t found = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, own);
  if (found == cudaSuccess) found = cudaEventRecord(after, own);
  if (found == cudaSuccess) return nullptr;
  cudaStreamSynchronize(own);  // nobody will wait for the copy
  copies->free.push_back(after);
  copies->running.erase(to);
  return cudaGetErrorString(found);
}

const char* wait_for_copy(const void* to, Stream stream) {
  const char* error = nullptr;
  Copies* copies = copies_of_device(&error);
  if (copies == nullptr) return error;
  const std::lock_guard lock(copies->mutex);
  const auto found = copies->running.find(to);
  if (found == copies->running.end()) return "no copy to this address was started, so XLA moved the buffer";
  GTP_TRY(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), found->second));
  copies->free.push_back(found->second);
  copies->running.erase(found);
  return nullptr;
}

}  // namespace gtp::cuda
