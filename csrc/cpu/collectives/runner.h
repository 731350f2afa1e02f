// One rank's collectives: chooses the algorithm of a call and runs it.
#pragma once

#include "core/algorithm_counts.h"
#include "cpu/collectives/slot_stream.h"
#include "cpu/group/heap.h"

namespace ringcomm::cpu {

class Collectives {
 public:
  Collectives(Group& group, Heap& heap) : group_(group), heap_(heap), progress_(group.world_size()) {}

  void run(const Call& call);
  // See Engine::count_algorithms.
  void count_algorithms(std::shared_ptr<Flag> counts) { used_.count_in(std::move(counts)); }

 private:
  void end_badly(const Call& call, const char* what);
  void note_algorithm(const Call& call, AlgorithmUsed used) const;
  std::uint64_t run_connected(SlotStream& slots);
  std::uint64_t run_staged(SlotStream& slots, std::uint64_t first);

  Group& group_;
  Heap& heap_;
  AlgorithmCounts used_;
  Progress progress_;
};

}  // namespace ringcomm::cpu
