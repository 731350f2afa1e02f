// A model of the time that a collective takes: every rank goes through the schedules of core/schedule.h and
// core/inter_host_schedule.h, window by window, with as many windows in flight as in the engine over hosts, and every
// message queues on two links.
//
//   a message of n bytes   leaves when its rank has reached it and its sender's link is free, and in the first round of
//                          a schedule not before the receiver has reached it too; it is on the wire for `latency`, and
//                          takes n / bandwidth of both links (on the receiver's at the rate of the slower one)
//   a combine of n bytes   takes n / reduce bandwidth of its rank's time
//
// Times are in microseconds, bandwidths in GB/s (1e9 bytes per second) for each direction. Source of the model: Hockney
// 1994, Parallel Computing 20(3), with the overhead of LogP (Culler et al. 1993) and a queue on each link.
#pragma once

#include <vector>

#include "core/inter_host_schedule.h"
#include "core/op.h"

namespace ringcomm::simulation {

// A class of links: those inside a host, or those between hosts.
struct LinkClass {
  double latency_us = 0;
  double bandwidth_gbps = 1;
  double overhead_us = 0;    // of the sending rank's time, for each message
  double reduce_gbps = 1e9;  // rate at which a rank combines received bytes with its own
  // A message is cut into windows of one slice for each chunk. The size of a slice is that of a chunk divided by the
  // number of slots, limited to `least_slice_bytes` (0: always the largest size) to `slice_bytes` (0: the message is
  // not cut).
  std::size_t slice_bytes = 0, least_slice_bytes = 0;
  int slots = 1;  // windows in flight at once
  // Limits the bytes of sums computed at once, in reductions whose sums need memory of their own: an all_reduce of
  // elements that are smaller than their sums, and every reduce_scatter. A longer reduction is done in several waves,
  // one after the other. 0: no limit.
  std::size_t wave_bytes = 0;
  // Every call begins with a short message in each direction between partners, which checks that both make the same
  // call.
  bool agrees = false;
};

struct Cluster {
  int hosts = 1, ranks_per_host = 1;
  LinkClass inside, between;
  bool shared_nic = false;         // the ranks of a host share its link to other hosts; else each has its own
  std::vector<double> link_share;  // of each host: its share of the bandwidth between hosts; empty: all of it
  std::vector<double> start_us;    // of each rank: time of its call; empty: 0
  std::vector<double> slowdown;    // of each rank: factor of the time for its own work; empty: 1
  bool equal() const { return link_share.empty() && start_us.empty() && slowdown.empty(); }
};

struct CollectiveCall {
  Op collective = Op::kAllReduce;  // also reduce_scatter, all_gather, broadcast, all_to_all
  InterHostSchedule between = InterHostSchedule::kRing;
  Algorithm inside = Algorithm::kDirect;  // also ring and oneshot
  // One schedule over all ranks by `between`, regardless of hosts; else three: inside, between, inside.
  bool flat = false;
  int root_host = 0;  // broadcast: the root is its first rank
  // Elements of the complete message: the input of a reduce_scatter, the output of an all_gather, the elements that one
  // rank sends to all ranks in an all_to_all.
  std::size_t count = 0;
  std::size_t element_bytes = 4;
  std::size_t partial_bytes = 4;  // size of an element that is reduced inside a host, if there are several hosts
  std::size_t sum_bytes = 4;      // size of such an element on the wire between hosts
  std::size_t result_bytes = 4;   // size of a gathered element on the wire between hosts
  // Allows one host to represent all if all are equal, and the longest chunk of a window to represent all chunks. This
  // is done if chunks are equally long, or if there are too many messages to simulate.
  bool fold = true;
};

struct Prediction {
  double time_us = 0;               // until the last rank is done
  double first_us = 0;              // until the first rank is done
  std::uint64_t inside_bytes = 0;   // the most that a rank sends inside its host
  std::uint64_t between_bytes = 0;  // the most that a host sends to others
  std::uint64_t messages = 0;       // the most that a rank sends
  std::uint64_t events = 0;         // messages that were simulated
  bool folded = false;
};

// Throws kInvalid for combinations that the schedules do not have, and for numbers out of range.
void check(const Cluster& cluster, const CollectiveCall& call);
// Calls `check` first; also throws for more than 2e10 messages.
Prediction simulate(const Cluster& cluster, const CollectiveCall& call);

}  // namespace ringcomm::simulation
