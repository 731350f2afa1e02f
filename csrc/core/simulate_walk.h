// What the simulator walks through: a schedule, between whom, and the cut of the message.
#pragma once

#include "core/simulate.h"

namespace ringcomm::simulation {

// Who walks together: the ranks of each host, those with one place on every host (a lane), or all.
enum class Among : std::uint8_t { kHost, kLane, kAll };

// One walk of all groups of ranks at once.
struct Exchange {
  Among among;
  Between kind;
  int members;
  int first_round, last_round;
  bool reduces;
  bool whole;                    // every message is the whole window, not a chunk (one shot)
  std::vector<WindowCut> cuts;   // of each lane; of all groups, if there is one
  std::size_t element_bytes[2];  // in the half that reduces, and in that which gathers
  LinkClass timing;

  const WindowCut& cut(int group) const { return cuts.size() == 1 ? cuts[0] : cuts[group]; }
  int half() const { return reducing_rounds(kind, members); }
  std::size_t windows() const { return cuts[0].windows(); }  // the first is the longest
};

}  // namespace ringcomm::simulation
