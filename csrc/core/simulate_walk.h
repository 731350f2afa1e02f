// What the simulator walks through: a schedule, between whom, and the cut of the message; and what comes before.
#pragma once

#include <algorithm>

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
  int only_host = -1, but_host = -1;  // that walks, and that does not; below 0: all do

  bool walks(int host) const { return (only_host < 0 || host == only_host) && host != but_host; }
  const WindowCut& cut(int group) const { return cuts.size() == 1 ? cuts[0] : cuts[group]; }
  int half() const { return reducing_rounds(kind, members); }
  std::size_t windows() const { return cuts[0].windows(); }  // the first is the longest
};

// A message on its way.
struct Coming {
  double start;
  std::size_t nbytes;
  int from, to;
  bool crosses;
};
struct Times {
  double sent, arrived;
};

inline bool is_even(const WindowCut& cut) { return cut.count == cut.windows() * cut.chunks * cut.slice_elements; }
inline double num_messages(Between kind, int members, const WindowCut& cut) {
  return 1.0 * cut.windows() * num_rounds(kind, members) * num_hops(kind, members);
}

// Elements that the engine over hosts handles at once.
inline std::size_t wave_elements(const Cluster& cluster, const Question& question) {
  const bool scatters = question.collective == Collective::kReduceScatter,
             wider = question.collective == Collective::kAllReduce && question.partial_bytes > question.element_bytes;
  const std::size_t nbytes = cluster.between.wave_bytes;
  if (nbytes == 0 || cluster.hosts == 1 || question.flat || !(scatters || wider)) return larger(1, question.count);
  const std::size_t parts = scatters ? static_cast<std::size_t>(cluster.hosts) * cluster.ranks_per_host : 1;
  return larger(64, nbytes / (question.partial_bytes * parts) / 64 * 64) * parts;
}

// When every rank has heard that the others of its lane that it talks to make the same call. `called`: when it made
// it, of the ranks of all hosts, or of the one that stands for all.
inline std::vector<double> agree(const Cluster& cluster, const Question& question, const std::vector<double>& called) {
  const int lanes = cluster.ranks_per_host, members = static_cast<int>(called.size()) / lanes;
  const bool to_all = question.between == Between::kDirect && question.collective != Collective::kBroadcast;
  const int rounds = members == 1 || to_all                    ? 0
                     : question.between == Between::kButterfly ? bits_of(members)
                                                               : 1;  // a ring has the same neighbours in every round
  std::vector<double> last(lanes, 0.0), agreed;
  for (std::size_t id = 0; id < called.size(); ++id) last[id % lanes] = std::max(last[id % lanes], called[id]);
  for (int id = 0; id < static_cast<int>(called.size()); ++id) {
    const int lane = id % lanes, member = id / lanes;
    double heard = to_all ? last[lane] : called[id];
    for (int round = 0; round < rounds; ++round) {
      const int to = sent(question.between, members, member, round, 0).peer,
                from = received(question.between, members, member, round, 0).peer;
      heard = std::max({heard, called[to * lanes + lane], called[from * lanes + lane]});
    }
    const double slowdown = cluster.slowdown.empty() ? 1.0 : cluster.slowdown[id];
    agreed.push_back(heard + cluster.between.latency_us + slowdown * cluster.between.overhead_us);
  }
  return agreed;
}

}  // namespace ringcomm::simulation
