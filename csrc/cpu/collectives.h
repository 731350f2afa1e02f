// One rank's collectives: checks a call, picks its algorithm and runs it.
#pragma once

#include "cpu/heap.h"
#include "cpu/stage.h"

namespace ringcomm::cpu {

class Collectives {
 public:
  Collectives(Group& group, const Heap& heap) : group_(group), heap_(heap), progress_(group.world_size()) {}

  void run(const Call& call);

 private:
  std::uint64_t run_connected(Stage& stage);
  std::uint64_t run_staged(Stage& stage, std::uint64_t first);

  Group& group_;
  const Heap& heap_;
  Progress progress_;
};

// Throws unless the call makes sense on this rank; nothing has been sent then.
void check_call(const Call& call, int rank, int world_size);

}  // namespace ringcomm::cpu
