// A copy whose lines are the matrix's rows, or its columns: the row copy, and the transposed column copy.
#pragma once

#include <type_traits>

#include "quantize_panel.cuh"

namespace gtp::cuda {

// A thread takes a run of 16 numbers of two neighbouring lines; four lanes have the 64 numbers that a tile has of a
// line, and a warp 16 lines, so that it has whole 16 x 16 blocks. `kDown`: lines are columns.
//
// In stacks, for broader stores, codes and scales of a column's upper panel are held in shared memory until the lower
// one's are there; and of rows of two tiles, eight lanes have the 128 numbers, a warp 8 rows at a time.
template <class T, Kind kind, bool kDown>
class LineCopy {
  using Panel = cuda::Panel<T, kind>;
  static constexpr bool kBroad = !kDown && Panel::kBroad;
  static constexpr bool kHolds = kDown && Panel::kStacked;
  static constexpr int kHeldCodes = 64, kHeldScales = 8;  // bytes of a column, of both panels

 public:
  static constexpr bool kMeets = kDown;  // reads what other warps have loaded
  // Of shared memory, after the stages.
  static constexpr int kHeldBytes = kHolds ? Panel::kCols * (kHeldCodes + kHeldScales) : 0;
  bool wide;  // panels that lie wholly inside need no conditions
  TensorScale tensor;

  // To the panel at `at`, by all threads of the block. `known`: another copy has made the tensor's scale, which is a
  // tenth of all work.
  __device__ __forceinline__ void move_to(const QuantizeJob& job, const Place& at, const Parameters& p,
                                          bool known = false, TensorScale scale = {}) {
    __shared__ float factors[kTabled ? kScaleCodes : 1];
    const Copy& copy = kDown ? job.column : job.row;
    zero_gaps(copy, at);
    const float* amax = known ? nullptr : amax_of(copy, job, at.matrix);
    if (known) {
      tensor = scale;
    } else if (kind != Kind::kExponents && amax != amax_) {
      if (kTabled && amax_) __syncthreads();  // the factors before are done with
      tensor = tensor_scale_of<kind, T>(amax, p, factors);
      if (kTabled) __syncthreads();
    }
    amax_ = amax;

    const int64_t length = kDown ? p.hadamard ? ceil_div(job.rows, kRun) * kRun : job.rows : job.cols;
    const int64_t lines = kDown ? job.cols : job.rows;
    const int64_t line = (kDown ? at.col : at.row) + line_of(), along = (kDown ? at.row : at.col) + run_of() * kRun;
    rest_ = static_cast<int>(min(int64_t{INT32_MAX}, length - (kDown ? at.row : at.col)));
    pitch_ = kFp4<kind> ? ceil_div(length, 2) : length;
    uint8_t* first = copy.codes + at.matrix * copy.codes_stride;
    codes_ = first + line * pitch_ + (kFp4<kind> ? along / 2 : along);
    wide_run_ = pitch_ % kBytes == 0 && aligned(first, kBytes);
    scales_pitch_ = ceil_div(length, kBlock);
    uint8_t* first_scale = copy.scales + at.matrix * copy.scales_stride;
    scales_ = first_scale + (kind == Kind::kTiles ? line / 16 : line) * scales_pitch_ + along / kBlock;
    // of panels that hold, both must be whole
    wide = kHolds ? job.rows % (2 * kTile) == 0 && aligned(first, 16) && aligned(first_scale, 8) : wide_run_;
    lower_ = false;
    run_pitch_ = ceil_div(length, kRun);
    run_ = (at.matrix * lines + line) * run_pitch_ + along / kRun;
  }

  // A panel has as many parts as tiles: the tiles, or, broad, some of each warp's rows of all of them.
  __device__ __forceinline__ void next_part() {
    if constexpr (kBroad) {
      move(kPartLines, 0);
    } else if constexpr (kDown) {
      move(kTile, 0);
    } else {
      move(0, kTile);
    }
  }

  // From after the last part, where in a row of panels the next one begins already.
  __device__ __forceinline__ void next_panel() {
    constexpr int kLines = kBroad ? Panel::kTiles * kPartLines : kDown ? Panel::kCols : 0;  // that parts have gone on
    constexpr int kAlong = kBroad || kDown ? 0 : Panel::kCols;
    if constexpr (Panel::kStacked) {
      move((kDown ? 0 : kTile) - kLines, (kDown ? kTile : 0) - kAlong);
    } else {
      move((kDown ? Panel::kCols : 0) - kLines, (kDown ? 0 : Panel::kCols) - kAlong);
    }
    lower_ = true;
  }

  // `stage`: the panel's tile number `part`; `rest`: of the matrix, from that tile on. `nibbles` and `tile`: where to
  // leave the codes as well, as `nibble_offset` says, and the scale of the thread's 16 x 16 block.
  template <bool kExtras, bool kWhole>
  __device__ __forceinline__ void write(const Parameters& p, const Extent& rest, const char* stage, int part,
                                        uint32_t* nibbles = nullptr, uint8_t* tile = nullptr) const {
    std::conditional_t<kDown, RunsOfColumns<T>, RunsOfRows<T>> x;
    int lines = (kDown ? rest.cols : rest.rows) - line_of();
    if constexpr (kBroad) {
      const int tile = run_of() / 4, row = part * kPartLines;
      x.load(stage + (tile - part) * Stage<T>::kBytes + row * Stage<T>::kRowBytes, run_of() % 4, line_of(),
             Panel::odd(tile));
      lines -= row;
    } else {
      x.load(stage, run_of(), line_of(), Panel::odd(part));
    }
    if constexpr (kDown && kExtras && kind == Kind::kRuns) {
      if (p.hadamard) return write<kExtras, kWhole>(p, lines, part, x.transformed(), nibbles, tile);
    }
    write<kExtras, kWhole>(p, lines, part, x, nibbles, tile);
  }

 private:
  static constexpr int kBlock = kind == Kind::kExponents ? 32 : 16;
  static constexpr int kBytes = kFp4<kind> ? 8 : 16;  // of the codes of a run
  static constexpr bool kTabled = kFp4<kind>;
  static constexpr int kLanes = kBroad ? 8 : 4;       // of a line
  static constexpr int kPartLines = 2 * 32 / kLanes;  // of a warp

  uint8_t* codes_;  // of the thread's first number
  uint8_t* scales_;
  int64_t pitch_, scales_pitch_;  // from a line of codes to the next; from a line of scales
  uint64_t run_;                  // of the thread's first number, among all runs
  uint64_t run_pitch_;
  int rest_;       // of a line, from the part on
  bool wide_run_;  // a run's codes are stored at once
  bool lower_;     // of a stack
  const float* amax_ = nullptr;  // whose scale `tensor` is, if this copy has made it

  __device__ __forceinline__ static int run_of() { return threadIdx.x % kLanes; }
  __device__ __forceinline__ static int line_of() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / kLanes * 2; }

  __device__ __forceinline__ void move(int lines, int along) {
    codes_ += lines * pitch_ + (kFp4<kind> ? along / 2 : along);
    scales_ += (kind == Kind::kTiles ? lines / 16 : lines) * scales_pitch_ + along / kBlock;
    run_ += lines * run_pitch_ + along / kRun;
    rest_ -= along;
  }

  // Where 16 bytes of a column's codes are held, of a warp's 16 columns: columns that are written together, or read
  // together, lie in different banks.
  __device__ __forceinline__ static int held_at(int column, int chunk) {
    const int turned = (column & 2) << 1 | (column & 4) >> 1;
    return column / 2 * 128 + ((column % 2 * 4 + chunk ^ turned) << 4);
  }

  // Holds a panel's codes and scales, which a warp does for itself; and with those of the lower panel stores both:
  // four lanes a column's codes, one lane its scales.
  __device__ __forceinline__ void hold(int part, const uint32_t (&words)[2][kBytes / 4],
                                       const uint8_t (&scale)[2]) const {
    extern __shared__ __align__(128) char shared[];
    const int warp = threadIdx.x / 32, first = line_of() % 16, run = run_of();
    char* held = shared + 2 * Panel::kBytes;
    char* codes = held + (part * kTile + warp * 16) * kHeldCodes;
    char* scales = held + Panel::kCols * kHeldCodes + (part * kTile + warp * 16 + first) * kHeldScales;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      auto* to = reinterpret_cast<uint2*>(codes + held_at(first + r, lower_ * 2 + run / 2) + run % 2 * 8);
      *to = make_uint2(words[r][0], words[r][1]);
      scales[r * kHeldScales + lower_ * 4 + run] = static_cast<char>(scale[r]);
    }
    if (!lower_) return;
    __syncwarp();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4 four = *reinterpret_cast<const uint4*>(codes + held_at(first + r, run));
      const uint32_t chunk[4] = {four.x, four.y, four.z, four.w};
      store_words(codes_ + r * pitch_ + (run * 8 - kHeldCodes / 2), chunk);
    }
    if (run < 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(scales + run * kHeldScales);
      const uint32_t eight[2] = {two.x, two.y};
      store_words(scales_ + (run ? scales_pitch_ - 1 : 0) - kHeldScales / 2, eight);
    }
  }

  template <bool kExtras, bool kWhole, class Runs>
  __device__ __forceinline__ void write(const Parameters& p, int lines, int part, const Runs& x, uint32_t* nibbles,
                                        uint8_t* tile) const {
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

    // a warp whose blocks are all plain, as nearly all are, has code without branches
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

    if constexpr (kHolds && kWhole) return hold(part, words, scale);
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
      if (has_scale && scales_it) scales_[r * scales_pitch_] = scale[r];
      store<kWhole>(codes_ + r * pitch_, words[r], kFp4<kind> ? (valid + 1) / 2 : valid, wide_run_);
    }
  }
};

}  // namespace gtp::cuda
