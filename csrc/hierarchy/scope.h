// The call that is being executed, and how its message is divided among the ranks of a host.
#pragma once

#include "core/call/parts.h"
#include "hierarchy/exchange_plan.h"

namespace ringcomm::hierarchy {

inline std::size_t align_of(std::size_t element) { return 64 / element; }
inline char* at(const void* data, std::size_t elements, std::size_t element) {
  return static_cast<char*>(const_cast<void*>(data)) + elements * element;
}

struct Scope {
  const Call& call;
  TransportClock::time_point limit;
  WireTypes types;
  std::size_t element, sum_element;
  InterHostSchedule schedule;
  ReduceOp op;  // between hosts
  int divisor;

  // Whether sums have a larger type than results, and so need memory of their own.
  bool wider() const { return types.sum != types.result; }
};

// A contiguous message, cut into rails.
class Cut {
 public:
  Cut(const Topology& topology, std::size_t count, std::size_t element)
      : topology_(topology), count_(count), align_(align_of(element)) {}

  std::size_t count() const { return count_; }
  Slice rail(int number) const { return shard_of(count_, topology_.rails(), number, align_); }
  // The elements of a local rank's rails on this host; rails [first, last) are this rank's.
  Slice of_local(int local) const {
    const Slice begin = rail(topology_.first_rail(topology_.host(), local)),
                end = rail(topology_.last_rail(topology_.host(), local) - 1);
    return {begin.offset, end.offset + end.count - begin.offset};
  }
  Slice mine() const { return of_local(topology_.local_rank()); }
  int first() const { return topology_.first_rail(topology_.host(), topology_.local_rank()); }
  int last() const { return topology_.last_rail(topology_.host(), topology_.local_rank()); }

  // The rail's rank on every host; and those of all rails of this rank.
  std::vector<int> rail_ranks(int number) const {
    std::vector<int> ranks;
    for (int h = 0; h < topology_.num_hosts(); ++h) ranks.push_back(topology_.rail_rank(h, number));
    return ranks;
  }
  std::vector<std::vector<int>> rail_ranks() const {
    std::vector<std::vector<int>> all;
    for (int l = first(); l < last(); ++l) all.push_back(rail_ranks(l));
    return all;
  }
  // The elements of each local rank's rails, of a message at `data`.
  std::vector<Part> parts(const void* data, std::size_t element) const {
    std::vector<Part> parts;
    for (int i = 0; i < topology_.local_world_size(); ++i) {
      const Slice slice = of_local(i);
      parts.push_back({at(data, slice.offset, element), slice.count});
    }
    return parts;
  }

 private:
  const Topology& topology_;
  const std::size_t count_, align_;
};

}  // namespace ringcomm::hierarchy
