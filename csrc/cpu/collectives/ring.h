// The ring schedule of core/ring_loop.h, executed by one CPU thread per rank through the boards' slots.
#pragma once

#include <cstdint>

#include "cpu/collectives/slot_stream.h"

namespace ringcomm::cpu {

// all_reduce, reduce_scatter, all_gather, broadcast and reduce. Returns the number of tickets used. world_size >= 2.
std::uint64_t ring_collective(SlotStream& slots);

}  // namespace ringcomm::cpu
