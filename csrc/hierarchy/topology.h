// The ranks of each host, the drivers of a host's lanes, and the order in which the hosts' sums are added.
#pragma once

#include <vector>

#include "core/inter_host_schedule.h"

namespace ringcomm::hosts {

// One addition of two hosts' parts: that of `from` is added to that of `into`, which is the first operand.
struct Merge {
  int into, from;
  bool operator==(const Merge& other) const { return into == other.into && from == other.from; }
};

// A message is cut into as many lanes as the largest host has ranks. On every host each lane has a driver: the local
// rank that exchanges it with the drivers on the other hosts. So all local ranks share the work.
class Topology {
 public:
  // `hosts`: the ranks of each host; every rank of the communicator occurs once. Throws kInvalid.
  Topology(int rank, std::vector<std::vector<int>> hosts);

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(host_of_.size()); }
  int num_hosts() const { return static_cast<int>(hosts_.size()); }
  int lanes() const { return lanes_; }
  // Ranks of a host, ascending; hosts are in the order of their lowest ranks.
  const std::vector<int>& ranks(int host) const { return hosts_[host]; }
  int num_ranks(int host) const { return static_cast<int>(hosts_[host].size()); }
  int host_of(int rank) const { return host_of_[rank]; }
  int local_of(int rank) const { return local_of_[rank]; }
  int host() const { return host_of_[rank_]; }
  int local_rank() const { return local_of_[rank_]; }
  int local_world_size() const { return num_ranks(host()); }

  // For messages that can be cut anywhere: a local rank drives neighbouring lanes, [first_lane, last_lane).
  int first_lane(int host, int local) const { return local * lanes_ / num_ranks(host); }
  int last_lane(int host, int local) const { return first_lane(host, local + 1); }
  int driver(int host, int lane) const;
  // For messages with a part for each rank: lane l has the parts of the local ranks l of all hosts.
  int part_driver(int host, int lane) const { return hosts_[host][lane % num_ranks(host)]; }

  // Whether adding the hosts' sums gives the balanced tree over all ranks, that is, whether every host is a subtree.
  bool canonical() const { return canonical_; }
  // The tree over the hosts, as additions in order; the last one goes into host 0's part.
  const std::vector<Merge>& tree() const { return tree_; }
  // The schedule that adds in the order of the tree.
  Between in_order() const { return butterfly_ ? Between::kButterfly : Between::kDirect; }

 private:
  int grow_tree(int first, int last);

  const int rank_;
  const std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_, local_of_;
  int lanes_ = 0;
  bool canonical_ = false, butterfly_ = false;
  std::vector<Merge> tree_;
};

}  // namespace ringcomm::hosts
