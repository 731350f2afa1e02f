// The exchanges that the simulator runs: schedule, groups of ranks, cut of the message; and the agreement before them.
#pragma once

#include <algorithm>

#include "core/simulation/model.h"

namespace ringcomm::simulation {

// The ranks of a group: those of each host, those with the same index on every host (a rail), or all ranks.
enum class GroupKind : std::uint8_t { kHost, kRail, kAll };

// A schedule that all groups of ranks run at once.
struct Exchange {
  GroupKind among;
  InterHostSchedule kind;
  int members;
  int first_round, last_round;
  bool reduces;
  bool whole;                    // every message is the complete window, not a chunk (oneshot)
  std::vector<WindowCut> cuts;   // one for each rail, or a single one for all groups
  std::size_t element_bytes[2];  // in the half that reduces, and in the half that gathers
  LinkClass timing;
  int only_host = -1, but_host = -1;  // the only host that takes part, and one that does not; below 0: all do

  bool takes_part(int host) const { return (only_host < 0 || host == only_host) && host != but_host; }
  const WindowCut& cut(int group) const { return cuts.size() == 1 ? cuts[0] : cuts[group]; }
  int half() const { return reducing_rounds(kind, members); }
  std::size_t windows() const { return cuts[0].windows(); }  // the first cut is the longest
};

// A message in flight.
struct MessageInFlight {
  double start;
  std::size_t nbytes;
  int from, to;
  bool crosses;
};
struct Times {
  double sent, arrived;
};

inline bool is_even(const WindowCut& cut) { return cut.count == cut.windows() * cut.chunks * cut.slice_elements; }
inline double num_messages(InterHostSchedule kind, int members, const WindowCut& cut) {
  return 1.0 * cut.windows() * num_rounds(kind, members) * num_hops(kind, members);
}

// Returns the number of elements that the engine over hosts handles at once.
inline std::size_t wave_elements(const Cluster& cluster, const CollectiveCall& call) {
  const bool scatters = call.collective == Op::kReduceScatter,
             wider = call.collective == Op::kAllReduce && call.partial_bytes > call.element_bytes;
  const std::size_t nbytes = cluster.between.wave_bytes;
  if (nbytes == 0 || cluster.hosts == 1 || call.flat || !(scatters || wider)) return larger(1, call.count);
  const std::size_t parts = scatters ? static_cast<std::size_t>(cluster.hosts) * cluster.ranks_per_host : 1;
  return larger(64, nbytes / (call.partial_bytes * parts) / 64 * 64) * parts;
}

// Returns when each rank knows that its partners in its rail make the same call. `called`: the times of the calls, of
// the ranks of all hosts, or of the one host that represents all.
inline std::vector<double> agree(const Cluster& cluster, const CollectiveCall& call,
                                 const std::vector<double>& called) {
  const int rails = cluster.ranks_per_host, members = static_cast<int>(called.size()) / rails;
  const bool to_all = call.between == InterHostSchedule::kDirect && call.collective != Op::kBroadcast;
  const int rounds = members == 1 || to_all ? 0
                     : call.between == InterHostSchedule::kButterfly
                         ? bits_of(members)
                         : 1;  // a ring has the same neighbours in every round
  std::vector<double> last(rails, 0.0), agreed;
  for (std::size_t id = 0; id < called.size(); ++id) last[id % rails] = std::max(last[id % rails], called[id]);
  for (int id = 0; id < static_cast<int>(called.size()); ++id) {
    const int rail = id % rails, member = id / rails;
    double heard = to_all ? last[rail] : called[id];
    for (int round = 0; round < rounds; ++round) {
      const int to = sent(call.between, members, member, round, 0).peer,
                from = received(call.between, members, member, round, 0).peer;
      heard = std::max({heard, called[to * rails + rail], called[from * rails + rail]});
    }
    const double slowdown = cluster.slowdown.empty() ? 1.0 : cluster.slowdown[id];
    agreed.push_back(heard + cluster.between.latency_us + slowdown * cluster.between.overhead_us);
  }
  return agreed;
}

}  // namespace ringcomm::simulation
