// The algorithm that carries out a collective, once the engine has chosen it; and its counts, in memory that other
// processes may read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "core/op.h"
#include "core/sync.h"

namespace ringcomm {

// The first four are those of core/op.h. Between hosts the schedules of core/inter_host_schedule.h have the same names.
enum class Chosen : std::uint8_t {
  kRing,
  kDirect,
  kOneshot,
  kCopyEngine,
  kStaged,     // cpu: two phases through the boards' slots, or the one exchange of an op that has no other
  kButterfly,  // between hosts
};
constexpr const char* name(Chosen chosen) {
  constexpr const char* kNames[] = {"ring", "direct", "oneshot", "copy_engine", "staged", "butterfly"};
  return kNames[static_cast<std::size_t>(chosen)];
}

inline constexpr int kRecordedOps = static_cast<int>(Op::kProbe) + 1;
inline constexpr int kRecordedAlgorithms = static_cast<int>(Algorithm::kCopyEngine) + 1;
inline constexpr int kRecordedChoices = static_cast<int>(Chosen::kButterfly) + 1;

// The collectives of one rank, counted by op, algorithm asked for, and algorithm chosen. Only one thread at a time runs
// a rank's collectives, so that adding needs no locked instruction.
class ChosenCounts {
 public:
  static constexpr std::size_t kCounts = std::size_t{kRecordedOps} * kRecordedAlgorithms * kRecordedChoices;
  static constexpr std::size_t index(int op, int asked, int chosen) {
    return static_cast<std::size_t>((op * kRecordedAlgorithms + asked) * kRecordedChoices + chosen);
  }

  // From now on counts in `counts`, which has kCounts entries; see Engine::count_chosen.
  void count_in(std::shared_ptr<Flag> counts) { counts_ = std::move(counts); }
  void add(Op op, Algorithm asked, Chosen chosen, int calls = 1) const {
    if (!counts_) return;
    Flag* const count = counts_.get() + index(static_cast<int>(op), static_cast<int>(asked), static_cast<int>(chosen));
    store_relaxed(count, load_relaxed(count) + static_cast<std::uint64_t>(calls));
  }

 private:
  std::shared_ptr<Flag> counts_;  // null: nothing is counted
};

}  // namespace ringcomm
