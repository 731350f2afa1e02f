// Memory of a communicator under the allocator of a framework. Such an allocator takes two C functions, known by their
// names, and no object; so there is a pair of them for each pool, exported by this library:
//
//   void* ringcomm_pool_allocate_N(std::size_t nbytes, int device, void* stream)   null: no room
//   void ringcomm_pool_free_N(void* data, std::size_t nbytes, int device, void* stream)
//
// They are local, and may be called by any thread, also while the framework holds its own locks.
#pragma once

#include <cstddef>
#include <memory>

#include "core/engine.h"

namespace ringcomm {

inline constexpr int kMaxPools = 32;  // of a process, at a time

// The number of a new pool over `nbytes` of engine->allocate(): a collective call where that is one. The pool keeps the
// engine, which may close before it.
int open_pool(const std::shared_ptr<Engine>& engine, std::size_t nbytes, int device);
// Nothing is allocated from it any more. Its memory goes back to the engine once all pieces have been freed, and the
// device has done what their streams had to do then: in the first call of give_back_pools that finds it so.
void close_pool(int number);
void give_back_pools();

}  // namespace ringcomm
