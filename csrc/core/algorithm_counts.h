// The algorithm that an engine uses for a collective, and how often each was used, in memory that other processes may
// read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/op.h"
#include "core/sync.h"

namespace ringcomm {

// The first four are those of core/op.h. Between hosts the schedules of core/inter_host_schedule.h have the same names.
enum class AlgorithmUsed : std::uint8_t {
  kRing,
  kDirect,
  kOneshot,
  kCopyEngine,
  kStaged,     // cpu: through the boards' slots, in two phases where the op reduces
  kButterfly,  // between hosts
};
inline constexpr int kAlgorithmsUsed = static_cast<int>(AlgorithmUsed::kButterfly) + 1;
constexpr const char* name(AlgorithmUsed used) {
  constexpr const char* kNames[] = {"ring", "direct", "oneshot", "copy_engine", "staged", "butterfly"};
  static_assert(sizeof kNames / sizeof *kNames == kAlgorithmsUsed, "a name for each");
  return kNames[static_cast<std::size_t>(used)];
}

inline constexpr int kRecordedOps = static_cast<int>(Op::kProbe) + 1;
inline constexpr int kRecordedAlgorithms = static_cast<int>(Algorithm::kCopyEngine) + 1;

// The collectives of one rank, counted by op, algorithm asked for, and algorithm used. Only one thread at a time runs
// a rank's collectives, so that adding needs no locked instruction.
class AlgorithmCounts {
 public:
  static constexpr std::size_t kCounts = std::size_t{kRecordedOps} * kRecordedAlgorithms * kAlgorithmsUsed;
  static constexpr std::size_t index(int op, int asked, int used) {
    return static_cast<std::size_t>((op * kRecordedAlgorithms + asked) * kAlgorithmsUsed + used);
  }

  // From now on counts in `counts`, which has kCounts entries; see Engine::count_algorithms.
  void count_in(std::shared_ptr<Flag> counts) { counts_ = std::move(counts); }
  void add(Op op, Algorithm asked, AlgorithmUsed used, int calls = 1) const {
    if (!counts_) return;
    Flag* const count = counts_.get() + index(static_cast<int>(op), static_cast<int>(asked), static_cast<int>(used));
    store_relaxed(count, load_relaxed(count) + static_cast<std::uint64_t>(calls));
  }

 private:
  std::shared_ptr<Flag> counts_;  // null: nothing is counted
};

}  // namespace ringcomm
