// The collectives and the algorithms, in a header that kernels can include without the headers of the host.
#pragma once

#include <cstdint>

namespace ringcomm {

enum class Op : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kSend,
  kRecv,
  kProbe,  // of Engine::probe alone: run and submit do not take it
};
const char* name(Op op);

enum class Algorithm : std::uint8_t {
  kAuto,  // the engine chooses
  kRing,
  kDirect,
  kOneshot,
  kCopyEngine,
  // Only an engine chooses these, a caller cannot; loops over the algorithms for callers end at kCopyEngine.
  kStaged,     // cpu: through the boards' slots, in two phases where the op reduces
  kButterfly,  // between hosts, see core/inter_host_schedule.h
};
const char* name(Algorithm algorithm);

}  // namespace ringcomm
