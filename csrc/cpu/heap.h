// Memory that the peers can reach: arenas of shared memory, announced once, handed out in pieces.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "core/pieces.h"
#include "cpu/group.h"

namespace ringcomm::cpu {

class Heap {
 public:
  explicit Heap(Group& group) : group_(group) {}

  void* allocate(std::size_t nbytes);
  void release(void* data);
  // The same bytes at the same addresses, in memory that no peer has: one that is stopped in the middle of a call may
  // write to the old one when it goes on. After an abort alone.
  void detach();
  // Where [data, data + nbytes) lies for peers; private memory is not visible.
  Location locate(const void* data, std::size_t nbytes) const;
  bool empty() const { return arenas_.empty(); }

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
