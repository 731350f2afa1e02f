// One rank's collectives: chooses the algorithm of a call and runs it.
#pragma once

#include "core/chosen.h"
#include "cpu/collectives/slot_stream.h"
#include "cpu/group/heap.h"

namespace ringcomm::cpu {

class Collectives {
 public:
  Collectives(Group& group, Heap& heap) : group_(group), heap_(heap), progress_(group.world_size()) {}

  void run(const Call& call);
  // See Engine::count_chosen.
  void count_chosen(std::shared_ptr<Flag> counts) { chosen_.count_in(std::move(counts)); }

 private:
  void end_badly(const Call& call, const char* what);
  void chose(const Call& call, Chosen chosen) const;
  std::uint64_t run_connected(SlotStream& slots);
  std::uint64_t run_staged(SlotStream& slots, std::uint64_t first);

  Group& group_;
  Heap& heap_;
  ChosenCounts chosen_;
  Progress progress_;
};

}  // namespace ringcomm::cpu
