// How tiles lie together: what a block loads at a time, and in which order it goes on.
#pragma once

#include "quantize_tile.cuh"

namespace gtp::cuda {

// A panel is a row of tiles, 256 bytes broad, that are loaded together. A block's turn has two panels: neighbours in a
// row, or, `kStacked`, one below the other.
//
// Stacks are for blocks of 16 that are runs of their lines. What bounds these is how many lines of 128 bytes stores
// touch, however little of each: for both copies of 16-bit numbers ncu had `lts__t_tag_requests` at 80% of its peak,
// DRAM at 56% (H200). So a store takes more of a line: of a row the codes of both tiles, of a column those of both
// panels.
template <class T, Kind kind>
struct Panel {
  static constexpr int kTiles = 4 / T::kBytes;
  static constexpr int kCols = kTiles * kTile;
  static constexpr bool kStacked = kind == Kind::kRuns;
  static constexpr int kBytes = kTiles * Stage<T>::kBytes;

  // Whether a warp takes rows of both tiles at a time.
  static constexpr bool kBroad = kTiles == 2 && (kStacked || kind == Kind::kExponents);

  // `odd` of a panel's tile number i.
  __device__ __forceinline__ static int odd(int i) { return kBroad ? i : 0; }
};

}  // namespace gtp::cuda
