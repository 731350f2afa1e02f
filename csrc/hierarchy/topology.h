// The ranks of each host, the ranks of a host's rails, and the order in which the hosts' sums are added.
#pragma once

#include <vector>

#include "core/inter_host_schedule.h"

namespace ringcomm::hierarchy {

// One addition of two hosts' parts: that of `from` is added to that of `into`, which is the first operand.
struct Merge {
  int into, from;
  bool operator==(const Merge& other) const { return into == other.into && from == other.from; }
};

// A message is cut into as many rails as the largest host has ranks. On every host each rail has a rank: the local rank
// that exchanges it with the rail's ranks on the other hosts. So all local ranks share the work.
class Topology {
 public:
  // `hosts`: the ranks of each host; every rank of the communicator occurs once. Throws kInvalid.
  Topology(int rank, std::vector<std::vector<int>> hosts);

  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(host_of_.size()); }
  int num_hosts() const { return static_cast<int>(hosts_.size()); }
  int rails() const { return rails_; }
  // Ranks of a host, ascending; hosts are in the order of their lowest ranks.
  const std::vector<int>& ranks(int host) const { return hosts_[host]; }
  int num_ranks(int host) const { return static_cast<int>(hosts_[host].size()); }
  int host_of(int rank) const { return host_of_[rank]; }
  int local_of(int rank) const { return local_of_[rank]; }
  int host() const { return host_of_[rank_]; }
  int local_rank() const { return local_of_[rank_]; }
  int local_world_size() const { return num_ranks(host()); }

  // For messages that can be cut anywhere: a local rank has neighbouring rails, [first_rail, last_rail).
  int first_rail(int host, int local) const { return local * rails_ / num_ranks(host); }
  int last_rail(int host, int local) const { return first_rail(host, local + 1); }
  int rail_rank(int host, int rail) const;
  // For messages with a part for each rank: rail l has the parts of the local ranks l of all hosts.
  int part_rail_rank(int host, int rail) const { return hosts_[host][rail % num_ranks(host)]; }

  // Whether adding the hosts' sums gives the balanced tree over all ranks, that is, whether every host is a subtree.
  bool canonical() const { return canonical_; }
  const char* order() const { return canonical_ ? "canonical" : "canonical over hosts"; }
  // The tree over the hosts, as additions in order; the last one goes into host 0's part.
  const std::vector<Merge>& tree() const { return tree_; }
  // The schedule that adds in the order of the tree.
  InterHostSchedule in_order() const { return butterfly_ ? InterHostSchedule::kButterfly : InterHostSchedule::kDirect; }

 private:
  int grow_tree(int first, int last);

  const int rank_;
  const std::vector<std::vector<int>> hosts_;
  std::vector<int> host_of_, local_of_;
  int rails_ = 0;
  bool canonical_ = false, butterfly_ = false;
  std::vector<Merge> tree_;
};

}  // namespace ringcomm::hierarchy
