// One rank's collectives: chooses the algorithm of a call and runs it.
#pragma once

#include "cpu/collectives/slot_stream.h"
#include "cpu/group/heap.h"

namespace ringcomm::cpu {

class Collectives {
 public:
  Collectives(Group& group, Heap& heap) : group_(group), heap_(heap), progress_(group.world_size()) {}

  void run(const Call& call);

 private:
  void end_badly(const Call& call, const char* what);
  std::uint64_t run_connected(SlotStream& slots);
  std::uint64_t run_staged(SlotStream& slots, std::uint64_t first);

  Group& group_;
  Heap& heap_;
  Progress progress_;
};

}  // namespace ringcomm::cpu
