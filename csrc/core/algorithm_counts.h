// Counts the collectives of one rank by op, requested algorithm and algorithm used, in memory that other processes may
// read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/op.h"
#include "core/sync.h"

namespace ringcomm {

inline constexpr int kRecordedOps = static_cast<int>(Op::kProbe) + 1;
inline constexpr int kRecordedAlgorithms = static_cast<int>(Algorithm::kCopyEngine) + 1;  // asked for
inline constexpr int kAlgorithmsUsed = static_cast<int>(Algorithm::kButterfly);           // all but kAuto
inline constexpr std::size_t kAlgorithmCounts = std::size_t{kRecordedOps} * kRecordedAlgorithms * kAlgorithmsUsed;

constexpr std::size_t algorithm_count_at(int op, int asked, Algorithm used) {
  return static_cast<std::size_t>((op * kRecordedAlgorithms + asked) * kAlgorithmsUsed + static_cast<int>(used) - 1);
}

// Counts in `counts`, which has kAlgorithmCounts entries; null: nothing is counted. Only one thread at a time runs a
// rank's collectives, so that adding needs no locked instruction.
inline void count_algorithm(Flag* counts, Op op, Algorithm asked, Algorithm used, int calls = 1) {
  if (!counts) return;
  Flag* const count = counts + algorithm_count_at(static_cast<int>(op), static_cast<int>(asked), used);
  store_relaxed(count, load_relaxed(count) + static_cast<std::uint64_t>(calls));
}

}  // namespace ringcomm
