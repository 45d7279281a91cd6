// Starts copies between a device and its host, and waits for them. The calls of one copy keep its buffers: what follows
// the first two arguments of a call only says what comes before it.
#include "backend.h"
#include "checks.h"

#ifdef GTP_WITH_CUDA
namespace gtp {
namespace {

ffi::Error check_part(const char* name, const ffi::AnyBuffer& part, const ffi::AnyBuffer& whole, int64_t offset) {
  if (part.element_type() != whole.element_type()) {
    return invalid(std::string(name) + " has another dtype than the array");
  }
  if (offset < 0 || offset + static_cast<int64_t>(part.size_bytes()) > static_cast<int64_t>(whole.size_bytes())) {
    return invalid(std::string(name) + " is not a part of the array");
  }
  return ffi::Error::Success();
}

// array: on the host. part: a contiguous part of it, on the device, from the byte `offset` on.
ffi::Error read_cuda(cuda::Stream stream, int64_t offset, ffi::AnyBuffer array, ffi::RemainingArgs,
                     ffi::Result<ffi::AnyBuffer> part) {
  GTP_CHECK(check_part("the result", *part, array, offset));
  const char* from = static_cast<const char*>(array.untyped_data()) + offset;
  return Cuda::run(stream, &cuda::start_copy, part->untyped_data(), from, part->size_bytes(), false);
}

// part: what a read has started to write; it is the result too.
ffi::Error arrive_cuda(cuda::Stream stream, ffi::AnyBuffer part, ffi::RemainingArgs,
                       ffi::Result<ffi::AnyBuffer> result) {
  if (part.untyped_data() != result->untyped_data()) return invalid("the result must be the buffer of the argument");
  return Cuda::run(stream, &cuda::wait_for_copy, part.untyped_data());
}

// array: on the host; it is the result too. part: replaces the bytes from `offset` on.
ffi::Error write_cuda(cuda::Stream stream, int64_t offset, ffi::AnyBuffer array, ffi::AnyBuffer part,
                      ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> result) {
  GTP_CHECK(check_part("the argument", part, array, offset));
  if (array.untyped_data() != result->untyped_data()) return invalid("the result must be the buffer of the argument");
  char* to = static_cast<char*>(array.untyped_data()) + offset;
  return Cuda::run(stream, &cuda::start_copy, to, part.untyped_data(), part.size_bytes(), true);
}

// array: what a write returned; it is the result too. part: what the write was given.
ffi::Error leave_cuda(cuda::Stream stream, int64_t offset, ffi::AnyBuffer array, ffi::AnyBuffer part,
                      ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> result) {
  GTP_CHECK(check_part("the argument", part, array, offset));
  if (array.untyped_data() != result->untyped_data()) return invalid("the result must be the buffer of the argument");
  return Cuda::run(stream, &cuda::wait_for_copy, static_cast<char*>(array.untyped_data()) + offset);
}

}  // namespace

// not GTP_DEFINE_CUDA_HANDLER, because a command buffer would run the copies on the stream that it captures
#define GTP_DEFINE_COPY_HANDLER(name, ...)                                  \
  GTP_EXPORT XLA_FFI_Error* gtp_##name##_cuda(XLA_FFI_CallFrame* frame);    \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(gtp_##name##_cuda, name##_cuda, ffi::Ffi::Bind().Ctx<Cuda::ContextTag>() __VA_ARGS__)

GTP_DEFINE_COPY_HANDLER(
    read,
    .Attr<int64_t>("offset").Arg<ffi::AnyBuffer>().RemainingArgs().Ret<ffi::AnyBuffer>());
GTP_DEFINE_COPY_HANDLER(arrive, .Arg<ffi::AnyBuffer>().RemainingArgs().Ret<ffi::AnyBuffer>());
GTP_DEFINE_COPY_HANDLER(
    write,
    .Attr<int64_t>("offset").Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().RemainingArgs().Ret<ffi::AnyBuffer>());
GTP_DEFINE_COPY_HANDLER(
    leave,
    .Attr<int64_t>("offset").Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().RemainingArgs().Ret<ffi::AnyBuffer>());

}  // namespace gtp
#endif
