// Pools let a framework's allocator hand out memory of a communicator. Such an allocator finds two C functions by name,
// and can pass no object to them. So this library exports a pair of functions for each pool:
//
//   void* ringcomm_pool_allocate_N(std::size_t nbytes, int device, void* stream)   null: no room
//   void ringcomm_pool_free_N(void* data, std::size_t nbytes, int device, void* stream)
//
// Both functions are local. Any thread may call them, even while the framework holds its own locks.
#pragma once

#include <cstddef>
#include <memory>

#include "core/engine.h"

namespace ringcomm {

inline constexpr int kMaxPools = 32;  // of a process, at a time

// Makes a pool over `nbytes` from engine->allocate(), and returns its number; collective if allocate() is. The pool
// keeps the engine alive; the engine may be closed before the pool.
int open_pool(const std::shared_ptr<Engine>& engine, std::size_t nbytes, int device);
// Ends allocation from the pool. Its memory goes back to the engine in the first give_back_pools() after all pieces
// have been freed and the device has finished the work that their streams had at that time.
void close_pool(int number);
void give_back_pools();

}  // namespace ringcomm
