// The collectives and the algorithms by name: what kernels know of a call without the headers of the host.
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

enum class Algorithm : std::uint8_t { kAuto, kRing, kDirect, kOneshot, kCopyEngine };
const char* name(Algorithm algorithm);

}  // namespace ringcomm
