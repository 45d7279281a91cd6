#include <atomic>

#include "backend.h"
#include "checks.h"
#include "gtp/record.h"

namespace gtp {
namespace {

std::atomic<uint64_t*> record{nullptr};

ffi::Error check_word(const char* name, const ffi::AnyBuffer& buffer) {
  const bool one = buffer.element_type() == ffi::DataType::S32 && buffer.element_count() == 1;
  return one ? ffi::Error::Success() : invalid(std::string(name) + " must be one int32");
}

ffi::Error check_stamp(const ffi::AnyBuffer& id, const ffi::AnyBuffer& result) {
  GTP_CHECK(check_word("id", id));
  return check_word("result", result);
}

// id: int32 (1,). result: the same. Adds the id to the stamps of the device if there is a record.
// On CPUs, an operation waits for its operands only, so arrays that must come before the stamp are operands too.
ffi::Error stamp_cpu(ffi::ThreadPool, int32_t device, ffi::AnyBuffer id, ffi::RemainingArgs,
                     ffi::Result<ffi::AnyBuffer> result) {
  static std::atomic<uint64_t> executed[kRecordDevices];
  GTP_CHECK(check_stamp(id, *result));
  const int32_t own = *static_cast<const int32_t*>(id.untyped_data());
  *static_cast<int32_t*>(result->untyped_data()) = own;
  if (uint64_t* stamps = stamps_of(record.load(), device)) {
    const uint64_t number = ++executed[row_of(device)];
    const uint64_t word = number << kStampIdBits | (static_cast<uint32_t>(own) & ((1u << kStampIdBits) - 1));
    std::atomic_ref<uint64_t>(stamps[number % kStampsKept]).store(word);
  }
  return ffi::Error::Success();
}

#ifdef GTP_WITH_CUDA
ffi::Error stamp_cuda(cuda::Stream stream, int32_t device, ffi::AnyBuffer id, ffi::Result<ffi::AnyBuffer> result) {
  GTP_CHECK(check_stamp(id, *result));
  return Cuda::run(stream, &cuda::stamp, static_cast<const int32_t*>(id.untyped_data()),
                   static_cast<int32_t*>(result->untyped_data()), stamps_of(record.load(), device));
}
#endif

}  // namespace

GTP_EXPORT XLA_FFI_Error* gtp_stamp_cpu(XLA_FFI_CallFrame* frame);
XLA_FFI_DEFINE_HANDLER_SYMBOL(gtp_stamp_cpu, stamp_cpu,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Arg<ffi::AnyBuffer>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());
#ifdef GTP_WITH_CUDA
GTP_DEFINE_CUDA_HANDLER(stamp, stamp_cuda, .Ctx<ffi::DeviceOrdinal>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
#endif

}  // namespace gtp

// Makes stamps write to this memory of `kRecordBytes`, which must stay valid until the process ends.
//
// Args:
//   memory: the memory, aligned to 8 bytes.
//   device: the ordinal of a GPU of this process; -1 if it uses none.
//
// Returns: an empty string, or why GPUs cannot write to this memory; if so, nothing is recorded.
GTP_EXPORT const char* gtp_record_to(uint64_t* memory, int32_t device) {
  if (device >= 0) {
#ifdef GTP_WITH_CUDA
    if (const char* error = gtp::cuda::share_with_devices(memory, gtp::kRecordBytes, device)) return error;
#else
    return "the kernels were built without CUDA";
#endif
  }
  gtp::record.store(memory);
  return "";
}
