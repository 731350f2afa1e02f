#include "hierarchy/topology.h"

#include <algorithm>

#include "core/error.h"

namespace ringcomm::hierarchy {

namespace {

std::vector<std::vector<int>> in_order_of_rank(std::vector<std::vector<int>> hosts) {
  hosts.erase(std::remove_if(hosts.begin(), hosts.end(), [](const auto& ranks) { return ranks.empty(); }), hosts.end());
  for (std::vector<int>& ranks : hosts) std::sort(ranks.begin(), ranks.end());
  std::sort(hosts.begin(), hosts.end());
  return hosts;
}

int balanced(int first, int count, std::vector<Merge>& tree) {
  if (count == 1) return first;
  const int left = tree_split(count);
  const int into = balanced(first, left, tree), from = balanced(first + left, count - left, tree);
  tree.push_back({into, from});
  return into;
}

}  // namespace

Topology::Topology(int rank, std::vector<std::vector<int>> hosts)
    : rank_(rank), hosts_(in_order_of_rank(std::move(hosts))) {
  std::size_t ranks = 0;
  for (const auto& host : hosts_) ranks += host.size();
  host_of_.assign(ranks, -1);
  local_of_.assign(ranks, -1);
  for (int h = 0; h < num_hosts(); ++h) {
    for (int i = 0; i < num_ranks(h); ++i) {
      const int r = hosts_[h][i];
      if (r < 0 || r >= world_size() || host_of_[r] >= 0)
        fail(ErrorCode::kInvalid, "hosts: rank ", rank, " expected every rank from 0 to ", world_size() - 1,
             " on one host, got rank ", r, " twice or out of that range; name each rank once");
      host_of_[r] = h;
      local_of_[r] = i;
    }
    rails_ = std::max(rails_, num_ranks(h));
  }
  if (rank < 0 || rank >= world_size())
    fail(ErrorCode::kInvalid, "hosts: expected a rank below ", world_size(), ", got ", rank);

  canonical_ = true;
  grow_tree(0, world_size());
  std::vector<Merge> even;
  balanced(0, num_hosts(), even);
  if (!canonical_) tree_ = even;
  butterfly_ = is_power_of_two(num_hosts()) && tree_ == even;
}

int Topology::rail_rank(int host, int rail) const {
  int local = 0;
  while (rail >= last_rail(host, local)) ++local;
  return hosts_[host][local];
}

// Builds the balanced tree over ranks [first, last), down to complete hosts; returns the host whose part gets the sum.
int Topology::grow_tree(int first, int last) {
  const int host = host_of_[first];
  const auto& ranks = hosts_[host];
  const bool whole =
      static_cast<int>(ranks.size()) == last - first && ranks.front() == first && ranks.back() == last - 1;
  if (whole) return host;
  if (last - first == 1) {  // a rank whose neighbours in the tree are on another host
    canonical_ = false;
    return host;
  }
  const int left = first + tree_split(last - first);
  const int into = grow_tree(first, left), from = grow_tree(left, last);
  if (canonical_) tree_.push_back({into, from});
  return into;
}

}  // namespace ringcomm::hierarchy
