// The record of stamps: for each device, the last stamps that it has executed.
//
// The memory belongs to the caller and may be shared with other processes. A stamp is one word of 64 bits, so that a
// reader never sees half of it: the number of stamps that the device has executed, this one included, above the stamp's
// id in the low bits. Stamp number n is in place n % kStampsKept of the device.
#pragma once

#include <cstdint>

namespace gtp {

constexpr int kRecordDevices = 64;  // of one process
constexpr int kStampsKept = 64;     // per device
constexpr int kStampIdBits = 20;
constexpr int64_t kRecordBytes = int64_t{kRecordDevices} * kStampsKept * sizeof(uint64_t);

// Returns the row of a device. XLA numbers the CPU devices of a process from a multiple of this number.
inline int row_of(int32_t device) { return device & (kRecordDevices - 1); }

// Returns the place of a device's stamps, or nullptr if nothing is recorded.
inline uint64_t* stamps_of(uint64_t* record, int32_t device) {
  return record ? record + int64_t{row_of(device)} * kStampsKept : nullptr;
}

}  // namespace gtp
