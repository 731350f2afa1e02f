// Checks of the simulator's input: numbers out of range, and combinations that the schedules do not have.
#include "core/simulation/model.h"

#include <cmath>

#include "core/error.h"

namespace ringcomm::simulation {

namespace {

void check(bool holds, const char* what, double got, const char* expected) {
  if (!holds) fail(ErrorCode::kInvalid, "simulate: got ", what, " ", got, ", expected ", expected, "; pass that");
}

void check_link(const LinkClass& link) {
  check(std::isfinite(link.latency_us) && link.latency_us >= 0, "latency_us", link.latency_us, "0 or more");
  check(link.bandwidth_gbps > 0, "bandwidth_gbps", link.bandwidth_gbps, "more than 0");
  check(std::isfinite(link.overhead_us) && link.overhead_us >= 0, "overhead_us", link.overhead_us, "0 or more");
  check(link.reduce_gbps > 0, "reduce_gbps", link.reduce_gbps, "more than 0");
  check(link.slots >= 1, "slots", link.slots, "at least 1");
}

void check_list(const std::vector<double>& values, std::size_t entries, const char* what, bool may_be_zero) {
  if (values.empty()) return;
  if (values.size() != entries)
    fail(ErrorCode::kInvalid, "simulate: got ", values.size(), " entries of ", what, ", expected ", entries,
         "; pass one for each");
  for (const double value : values)
    check(std::isfinite(value) && (value > 0 || (may_be_zero && value == 0)), what, value,
          may_be_zero ? "0 or more" : "more than 0");
}

void check_schedules(const Cluster& cluster, const CollectiveCall& call) {
  const int members = call.flat ? cluster.hosts * cluster.ranks_per_host : cluster.hosts;
  check(call.between != InterHostSchedule::kButterfly || is_power_of_two(members), "members of a butterfly", members,
        "a power of two, or the schedule direct or ring");
  const bool all_to_all = call.collective == Op::kAllToAll;
  if (all_to_all && members > 1 && call.between != InterHostSchedule::kDirect)
    fail(ErrorCode::kInvalid,
         "simulate: got an all_to_all that is not direct, expected direct, which alone has it; "
         "pass that");
  if (call.collective == Op::kBroadcast && members > 1 && call.between != InterHostSchedule::kRing)
    fail(ErrorCode::kInvalid,
         "simulate: got a broadcast that is not a ring, expected ring, the chain of it; pass that");
  const bool oneshot = call.inside == Algorithm::kOneshot;
  if (oneshot && (cluster.hosts > 1 || call.flat || call.collective != Op::kAllReduce))
    fail(ErrorCode::kInvalid,
         "simulate: got oneshot for what it does not do, expected an all_reduce inside one host; "
         "pass direct or ring");
}

}  // namespace

void check(const Cluster& cluster, const CollectiveCall& call) {
  constexpr int kMostRanks = 1 << 20;
  check(cluster.hosts >= 1 && cluster.hosts <= kMostRanks, "hosts", cluster.hosts, "at least 1");
  check(cluster.ranks_per_host >= 1 && cluster.ranks_per_host <= kMostRanks, "ranks_per_host", cluster.ranks_per_host,
        "at least 1");
  check(1.0 * cluster.hosts * cluster.ranks_per_host <= kMostRanks, "ranks",
        1.0 * cluster.hosts * cluster.ranks_per_host, "at most 2^20 on all hosts");
  check_link(cluster.inside);
  check_link(cluster.between);
  const std::size_t hosts = cluster.hosts, ranks = hosts * cluster.ranks_per_host;
  check_list(cluster.link_share, hosts, "link_share", false);
  check_list(cluster.start_us, ranks, "start_us", true);
  check_list(cluster.slowdown, ranks, "slowdown", false);
  check(call.root_host >= 0 && call.root_host < cluster.hosts, "root_host", call.root_host, "a host");
  check(call.element_bytes >= 1 && call.partial_bytes >= 1 && call.sum_bytes >= 1 && call.result_bytes >= 1,
        "bytes of an element", 0, "at least 1");
  check_schedules(cluster, call);
}

}  // namespace ringcomm::simulation
