// The algorithms that pass private memory through the boards' slots. Each returns the number of tickets used; `first`
// is the index of the first ticket that it may use.
//
// They share one pattern: publish ticket i, then consume ticket i - lag. Because of the lag, the data to be read has
// left the writer's cache, and a rank that is late finds its data ready.
#pragma once

#include <cstdint>

#include "cpu/collectives/slot_stream.h"

namespace ringcomm::cpu {

// all_reduce: every rank publishes its complete message and reduces all messages.
std::uint64_t staged_oneshot_all_reduce(SlotStream& slots, std::uint64_t first);
// all_reduce and reduce in two phases: rank r reduces shard r, then all (or the root) gather the shards.
std::uint64_t staged_two_phase_reduce(SlotStream& slots, std::uint64_t first);
std::uint64_t staged_reduce_scatter(SlotStream& slots, std::uint64_t first);
// all_gather and gather.
std::uint64_t staged_gather(SlotStream& slots, std::uint64_t first);
std::uint64_t staged_broadcast(SlotStream& slots, std::uint64_t first);
std::uint64_t staged_scatter(SlotStream& slots, std::uint64_t first);
std::uint64_t staged_all_to_all(SlotStream& slots, std::uint64_t first);
std::uint64_t staged_barrier(SlotStream& slots, std::uint64_t first);

}  // namespace ringcomm::cpu
