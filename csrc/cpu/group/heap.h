// Memory that the peers can access: arenas of shared memory, each published once, from which blocks are allocated.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "core/pieces.h"
#include "cpu/group/state.h"

namespace ringcomm::cpu {

class Heap {
 public:
  explicit Heap(Group& group) : group_(group) {}

  void* allocate(std::size_t nbytes);
  void release(void* data);
  // Moves the content to new memory at the same addresses, to which no peer has access, since a peer that was stopped
  // during a call may still write to the old memory when it continues. Only after an abort.
  void detach();
  // The location of [data, data + nbytes) for peers; private memory is not visible.
  Location locate(const void* data, std::size_t nbytes) const;

 private:
  struct Arena {
    SharedMemory memory;
    int number;
    Pieces pieces;
  };

  Group& group_;
  mutable std::mutex mutex_;
  std::vector<std::unique_ptr<Arena>> arenas_;
};

}  // namespace ringcomm::cpu
