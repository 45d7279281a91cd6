// The two platforms of a handler: the context it is called with, and the kernels it calls.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "gtp/cpu.h"
#include "gtp/cuda.h"
#include "xla/ffi/api/ffi.h"

namespace gtp {

namespace ffi = xla::ffi;

// Exceptions must not propagate into XLA.
template <class Body>
ffi::Error guarded(Body&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  }
}

struct Cpu {
  using Context = ffi::ThreadPool;
  using ContextTag = ffi::ThreadPool;

  template <class Kernel, class... Args>
  static ffi::Error run(Context threads, Kernel&& kernel, Args&&... args) {
    const cpu::Pool pool{static_cast<int>(threads.num_threads()),
                         [&threads](std::function<void()> task) { threads.Schedule(std::move(task)); }};
    kernel(std::forward<Args>(args)..., pool);
    return ffi::Error::Success();
  }

  static constexpr auto multi_amax = &cpu::multi_amax;
  static constexpr auto hadamard_amax = &cpu::hadamard_amax;
  static constexpr auto quantize = &cpu::quantize;
  static constexpr auto dequantize = &cpu::dequantize;
};

#ifdef GTP_WITH_CUDA
struct Cuda {
  using Context = cuda::Stream;
  using ContextTag = ffi::PlatformStream<cuda::Stream>;

  template <class Kernel, class... Args>
  static ffi::Error run(Context stream, Kernel&& kernel, Args&&... args) {
    const char* error = kernel(std::forward<Args>(args)..., stream);
    return error ? ffi::Error::Internal(std::string("CUDA: ") + error) : ffi::Error::Success();
  }

  static constexpr auto multi_amax = &cuda::multi_amax;
  static constexpr auto hadamard_amax = &cuda::hadamard_amax;
  static constexpr auto quantize = &cuda::quantize;
  static constexpr auto dequantize = &cuda::dequantize;
};
#endif

}  // namespace gtp

// Only what is exported is visible outside of the library.
#define GTP_EXPORT extern "C" __attribute__((visibility("default")))

// Defines the handlers `gtp_<name>_cpu` and, with CUDA, `gtp_<name>_cuda` from the template `function`. The arguments
// after it bind operands, results and attributes.
#define GTP_DEFINE_CPU_HANDLER(name, function, ...)                             \
  GTP_EXPORT XLA_FFI_Error* gtp_##name##_cpu(XLA_FFI_CallFrame* frame);         \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(gtp_##name##_cpu, function<::gtp::Cpu>,         \
                                ::xla::ffi::Ffi::Bind().Ctx<::gtp::Cpu::ContextTag>() __VA_ARGS__)
#ifdef GTP_WITH_CUDA
// Defines only the CUDA handler, from a function that is not a template.
#define GTP_DEFINE_CUDA_HANDLER(name, function, ...)                                      \
  GTP_EXPORT XLA_FFI_Error* gtp_##name##_cuda(XLA_FFI_CallFrame* frame);                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(gtp_##name##_cuda, function,                              \
                                ::xla::ffi::Ffi::Bind().Ctx<::gtp::Cuda::ContextTag>() __VA_ARGS__, \
                                {::xla::ffi::Traits::kCmdBufferCompatible})
#define GTP_DEFINE_HANDLERS(name, function, ...)       \
  GTP_DEFINE_CPU_HANDLER(name, function, __VA_ARGS__); \
  GTP_DEFINE_CUDA_HANDLER(name, function<::gtp::Cuda>, __VA_ARGS__)
#else
#define GTP_DEFINE_HANDLERS(name, function, ...) GTP_DEFINE_CPU_HANDLER(name, function, __VA_ARGS__)
#endif
