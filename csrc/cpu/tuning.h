// The measured crossovers of the cpu engine (benchmarks/results/). None of them changes a bit of any result.
#pragma once

#include <cstddef>

namespace ringcomm::cpu::tuning {

// Results are written past the caches from this message size on, where they would not stay in them anyway.
inline constexpr std::size_t kStreamOutputBytes = 16u << 20;
// Up to here every rank reads everybody's whole message and reduces all of it: one exchange instead of two. With two
// ranks it moves no more bytes than the two-phase form, so it serves every size.
inline constexpr std::size_t kOneshotBytes = 32u << 10;
// From here on ranks tell each other where their buffers are, and work on visible ones in place.
inline constexpr std::size_t kVisibleBytes = 16u << 10;

// From here on reduce_scatter and broadcast are faster through the slots than in place: both ranks of a pair work, and
// what crosses between them is in the shared cache.
inline constexpr std::size_t kStagedBytes = 16u << 20;
// One-way messages go in slices of this part of their size, so that the reader is busy while the writer still writes.
inline constexpr std::size_t kOneWaySlices = 8;
inline constexpr std::size_t kLeastSliceBytes = 16u << 10;

constexpr std::size_t one_way_slice(std::size_t message_bytes, std::size_t slot_bytes) {
  const std::size_t part = message_bytes / kOneWaySlices / 4096 * 4096;
  const std::size_t slice = part < kLeastSliceBytes ? kLeastSliceBytes : part;
  return slice < slot_bytes ? slice : slot_bytes;
}

}  // namespace ringcomm::cpu::tuning
