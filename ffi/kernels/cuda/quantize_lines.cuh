// Makes a copy whose lines are the matrix's rows or columns: the row copy, or the transposed column copy.
#pragma once

#include <type_traits>

#include "quantize_panel.cuh"

namespace gtp::cuda {

// A thread takes a run of 16 numbers from each of two neighbouring lines. Four lanes cover 64 numbers of a line, and a
// warp 16 lines, so that a warp has whole 16 x 16 blocks. For wider stores, eight lanes cover 128 numbers, or sixteen
// lanes 256.
// `kDown`: lines are columns.
template <class T, Kind kind, bool kDown>
class LineCopy {
  using Panel = cuda::Panel<T, kind>;

 public:
  static constexpr bool kMeets = kDown;  // reads numbers that other warps have loaded
  bool wide;  // a run's codes are stored at once, so panels that lie entirely inside the matrix need no conditions
  TensorScale tensor{};

  // Moves to the panel at `at`; all threads of the block must call this. `known`: another copy has already computed the
  // tensor's scale, which saves all warps of the block another synchronization.
  __device__ __forceinline__ void move_to(const QuantizeJob& job, const Place& at, const Parameters& p,
                                          bool known = false, TensorScale scale = {}) {
    __shared__ float factors[kTabled ? kScaleCodes : 1];
    const Copy& copy = kDown ? job.column : job.row;
    zero_gaps(copy, at);
    const float* amax = known ? nullptr : amax_of(copy, job, at.matrix);
    if (known) {
      tensor = scale;
    } else if (kind != Kind::kExponents && amax != amax_) {
      if (kTabled && amax_) __syncthreads();  // until no thread uses the previous factors any more
      tensor = tensor_scale_of<kind, T>(amax, p, factors);
      if (kTabled) __syncthreads();
    }
    amax_ = amax;

    const int64_t length = kDown ? p.hadamard ? ceil_div(job.rows, kRun) * kRun : job.rows : job.cols;
    const int64_t lines = kDown ? job.cols : job.rows;
    // unsigned, because dividing then takes fewer instructions
    const uint64_t line = (kDown ? at.col : at.row) + line_of(), along = (kDown ? at.row : at.col) + run_of() * kRun;
    rest_ = static_cast<int>(min(int64_t{INT32_MAX}, length - (kDown ? at.row : at.col)));
    pitch_ = kFp4<kind> ? ceil_div(length, 2) : length;
    uint8_t* first = copy.codes + at.matrix * copy.codes_stride;
    codes_ = first + line * pitch_ + (kFp4<kind> ? along / 2 : along);
    wide = pitch_ % kBytes == 0 && aligned(first, kBytes);
    scales_pitch_ = ceil_div(length, kBlock);
    scales_ = copy.scales + at.matrix * copy.scales_stride +
              (kind == Kind::kTiles ? line / 16 : line) * scales_pitch_ + along / kBlock;
    run_pitch_ = ceil_div(length, kRun);
    run_ = (at.matrix * lines + line) * run_pitch_ + along / kRun;
  }

  __device__ __forceinline__ void next_part() { move(kStepLines, kStepAlong); }

  // Moves from the end of the last part to the next panel in the same row of panels.
  __device__ __forceinline__ void next_panel() {
    constexpr int kLines = kDown ? Panel::kCols : 0, kAlong = kDown ? 0 : Panel::kCols;
    move(kLines - Panel::kParts * kStepLines, kAlong - Panel::kParts * kStepAlong);
  }

  // Writes a part of the panel in `stage`. `rest`: the extent of the matrix from the panel on. If not null, `nibbles`
  // also receives the codes, arranged as in `nibble_offset`, and `tile` the scale of the thread's 16 x 16 block.
  template <bool kExtras, bool kWhole>
  __device__ __forceinline__ void write(const Parameters& p, const Extent& rest, const char* stage, int part,
                                        uint32_t* nibbles = nullptr, uint8_t* tile = nullptr) const {
    std::conditional_t<kDown, RunsOfColumns<T>, RunsOfRows<T>> x;
    x.template load<Panel>(stage, place(line_of(), run_of() * kRun) ^ place(part * kStepLines, part * kStepAlong));
    const int lines = (kDown ? rest.cols : rest.rows) - line_of() - part * kStepLines;
    if constexpr (kDown && kExtras && kind == Kind::kRuns) {
      if (p.hadamard) return write<kExtras, kWhole>(p, lines, x.transformed(), nibbles, tile);
    }
    write<kExtras, kWhole>(p, lines, x, nibbles, tile);
  }

 private:
  static constexpr int kBlock = kind == Kind::kExponents ? 32 : 16;
  static constexpr int kBytes = kFp4<kind> ? 8 : 16;  // bytes of the codes of a run
  static constexpr bool kTabled = kFp4<kind>;
  static_assert(!kTabled || Panel::kThreads >= kScaleCodes);
  static constexpr int kWarpLines = (kDown ? Panel::kCols : Panel::kRows) / (Panel::kThreads / 32);
  static constexpr int kLanes = kDown ? Panel::kColumnLanes : Panel::kRowLanes;  // lanes per line
  // The step from one part to the next: to the warp's next lines or, if it has processed them all, to the next tile.
  static constexpr bool kHadAll = 2 * 32 / kLanes == kWarpLines;
  static constexpr int kStepLines = kHadAll ? 0 : 2 * 32 / kLanes;
  static constexpr int kStepAlong = kHadAll && !kDown ? kTile : 0;
  static_assert(!kHadAll || !kDown || Panel::kParts == 1);

  uint8_t* codes_;  // codes of the thread's first number
  uint8_t* scales_;
  int64_t pitch_, scales_pitch_;  // from a line of codes to the next; from a line of scales
  uint64_t run_;                  // number of the thread's first run, among all runs
  uint64_t run_pitch_;
  int rest_;  // remaining numbers of a line, from the part on
  const float* amax_ = nullptr;  // the amax of the scale `tensor`, if this copy computed it

  __device__ __forceinline__ static int run_of() { return threadIdx.x % kLanes; }
  __device__ __forceinline__ static int line_of() {
    return threadIdx.x / 32 * kWarpLines + threadIdx.x % 32 / kLanes * 2;
  }

  __device__ __forceinline__ static int place(int line, int along) {
    return kDown ? Panel::place(along, line) : Panel::place(line, along);
  }

  __device__ __forceinline__ void move(int lines, int along) {
    codes_ += lines * pitch_ + (kFp4<kind> ? along / 2 : along);
    scales_ += (kind == Kind::kTiles ? lines / 16 : lines) * scales_pitch_ + along / kBlock;
    run_ += lines * run_pitch_ + along / kRun;
    rest_ -= along;
  }

  template <bool kExtras, bool kWhole, class Runs>
  __device__ __forceinline__ void write(const Parameters& p, int lines, const Runs& x, uint32_t* nibbles,
                                        uint8_t* tile) const {
    // for 16 x 16 tiles no warp may return early, because lanes compute the scale together
    if (!kWhole && kind != Kind::kTiles && __all_sync(0xFFFFFFFFu, lines <= 0)) return;
    uint32_t tops[2];
    x.max(tops);
    if constexpr (kind == Kind::kTiles) {
      tops[0] = tops[1] = shuffle_max(shuffle_max(shuffle_max(max(tops[0], tops[1]), 4), 8), 16);
    }
    Scaled block[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kind == Kind::kExponents) tops[r] = shuffle_max(tops[r], 1);
      block[r] = kind == Kind::kTiles && r == 1 ? block[0] : scale_of<kind>(tops[r], tensor, p);
    }

    // nearly all warps have only plain blocks, for which the code has no branches
    uint32_t words[2][kBytes / 4];
    uint8_t scale[2];
    const bool chance = kExtras && p.key;
    if (!chance && __all_sync(0xFFFFFFFFu, block[0].plain && block[1].plain)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scale[r] = static_cast<uint8_t>(block[r].code);
        plain_codes<kind>(x, r, block[r], p, words[r]);
      }
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const bool finite = tops[r] < kInfinity;
        scale[r] = scale_code<kind>(block[r], finite);
        if constexpr (kExtras) {
          if (chance) {
            const RandomWords random = random_words(run_ + r * run_pitch_, kDown, p.key[0], p.key[1]);
            stochastic_codes(x, r, block[r], finite, random, words[r]);
            continue;
          }
        }
        any_codes<kind>(x, r, block[r], finite, p, words[r]);
      }
    }

    if (tile) *tile = scale[0];
    const int valid = kWhole ? kRun : min(kRun, rest_ - run_of() * kRun);
    const bool scales_it = kind == Kind::kTiles ? threadIdx.x % 32 < 4 : run_of() % (kBlock / kRun) == 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kFp4<kind>) {
        if (nibbles) {
          auto* to = reinterpret_cast<uint2*>(nibbles + nibble_offset(line_of() + r) + run_of() * 2);
          *to = make_uint2(words[r][0], words[r][1]);
        }
      }
      if (!kWhole && (valid <= 0 || r >= lines)) continue;
      const bool has_scale = kind == Kind::kTiles ? r == 0 : kind != Kind::kTensor;
      if (has_scale && scales_it) store_byte_kept(scales_ + r * scales_pitch_, scale[r]);
      store<kWhole, kDown>(codes_ + r * pitch_, words[r], kFp4<kind> ? (valid + 1) / 2 : valid, wide);
    }
  }
};

}  // namespace gtp::cuda
