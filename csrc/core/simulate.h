// How long a collective takes, by a model: every rank walks through the schedules of core/schedule.h and
// core/between.h, window by window and with as many of them under way as the engine over hosts has, and every message
// takes its turn on two links.
//
//   a message of n bytes   leaves when its rank has come to it and its sender's link is free, and in the first round of
//                          a walk not before the receiver has come there too; it is on the wire for `latency`, and
//                          takes n / bandwidth of both links (the slower one's for the receiver)
//   a combine of n bytes   takes n / reduce bandwidth of its rank
//
// Times are in microseconds, bandwidths in GB/s (1e9 bytes each second) and direction. Source of the model: Hockney
// 1994, Parallel Computing 20(3), with the overhead of LogP (Culler et al. 1993) and a queue on each link.
#pragma once

#include <vector>

#include "core/between.h"

namespace ringcomm::simulation {

// A class of links: those inside a host, or those between hosts.
struct LinkClass {
  double latency_us = 0;
  double bandwidth_gbps = 1;
  double overhead_us = 0;    // of a rank's own time, for each message it sends
  double reduce_gbps = 1e9;  // bytes that came over it and that a rank combines with what it has
  // A message is cut into windows of one slice for each chunk: of as many bytes as make a chunk one slice for each
  // slot, but from `least_slice_bytes` (0: no such rule, the most) to `slice_bytes` (0: not cut at all).
  std::size_t slice_bytes = 0, least_slice_bytes = 0;
  int slots = 1;  // windows under way at once
  // Sums of at most so many bytes are made at once of a reduction whose sums need memory of their own: an all_reduce
  // of elements that are smaller than their sums, and every reduce_scatter; a longer one is several in sequence. 0:
  // not.
  std::size_t wave_bytes = 0;
  // Every call begins with a short message each way to all whom a rank talks to: both mean the same call.
  bool agrees = false;
};

struct Cluster {
  int hosts = 1, ranks_per_host = 1;
  LinkClass inside, between;
  bool shared_nic = false;         // the ranks of a host share its link to the others; else each has its own
  std::vector<double> link_share;  // of each host: how much of the bandwidth between hosts it has; empty: all
  std::vector<double> start_us;    // of each rank: when it makes the call; empty: at 0
  std::vector<double> slowdown;    // of each rank: factor of its own time; empty: 1
  bool equal() const { return link_share.empty() && start_us.empty() && slowdown.empty(); }
};

enum class Collective : std::uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kAllToAll };
enum class Inside : std::uint8_t { kRing, kDirect, kOneshot };

struct Question {
  Collective collective = Collective::kAllReduce;
  Between between = Between::kRing;
  Inside inside = Inside::kDirect;
  // One walk over all ranks by `between`, whatever host they are on; else inside, between, inside.
  bool flat = false;
  int root_host = 0;  // broadcast: from its first rank
  // Elements of the whole message: for reduce_scatter of its input, for all_gather of its output, for all_to_all of
  // what a rank has for all.
  std::size_t count = 0;
  std::size_t element_bytes = 4;
  std::size_t partial_bytes = 4;  // of an element that is reduced, inside a host where there are several
  std::size_t sum_bytes = 4;      // the same, on the wire between hosts
  std::size_t result_bytes = 4;   // of one that is gathered between hosts, on the wire
  // Where all hosts are equal, one may stand for all of them, with the longest chunk of a window for all: where chunks
  // are equally long, or there are too many messages to look at each.
  bool fold = true;
};

struct Answer {
  double time_us = 0;               // until the last rank is done
  double first_us = 0;              // until the first rank is
  std::uint64_t inside_bytes = 0;   // the most that a rank sends inside its host
  std::uint64_t between_bytes = 0;  // the most that a host sends to others
  std::uint64_t messages = 0;       // the most that a rank sends
  std::uint64_t events = 0;         // messages that were looked at
  bool folded = false;
};

// Throws kInvalid for what the schedules do not have, and numbers that are no model.
void check(const Cluster& cluster, const Question& question);
// The same, and for more than 2e10 messages.
Answer simulate(const Cluster& cluster, const Question& question);

}  // namespace ringcomm::simulation
