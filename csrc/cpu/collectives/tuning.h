// The measured crossover points of the cpu engine (benchmarks/results/). None of them affects the bits of a result.
#pragma once

#include <cstddef>

namespace ringcomm::cpu::tuning {

// Results are written with streaming stores from this message size on: they would not stay in the caches anyway.
inline constexpr std::size_t kStreamOutputBytes = 16u << 20;
// Up to this size every rank reads all messages completely and reduces all of their elements: one exchange instead of
// two. With two ranks it moves no more bytes than the two-phase algorithm, so it is used for every size.
inline constexpr std::size_t kOneshotBytes = 32u << 10;
// From this size on ranks tell each other the locations of their buffers, and work on visible ones in place.
inline constexpr std::size_t kVisibleBytes = 16u << 10;

// From this size on reduce_scatter and broadcast are faster through the slots than in place: both ranks of a pair work,
// and the data that they exchange is in the shared cache.
inline constexpr std::size_t kStagedBytes = 16u << 20;
// Up to this size the progress thread leaves an asynchronous call to the caller that waits for it
// (runtime/progress/work_queue.h): to wake the thread takes longer than the call.
inline constexpr std::size_t kSmallCallBytes = 64u << 10;
// One-way messages are sent in slices of 1/kOneWaySlices of their size, so that the reader works while the writer still
// writes.
inline constexpr std::size_t kOneWaySlices = 8;
inline constexpr std::size_t kLeastSliceBytes = 16u << 10;

constexpr std::size_t one_way_slice(std::size_t message_bytes, std::size_t slot_bytes) {
  const std::size_t part = message_bytes / kOneWaySlices / 4096 * 4096;
  const std::size_t slice = part < kLeastSliceBytes ? kLeastSliceBytes : part;
  return slice < slot_bytes ? slice : slot_bytes;
}

}  // namespace ringcomm::cpu::tuning
