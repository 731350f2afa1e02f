#include "core/dispatch.h"
#include "core/engine.h"
#include "core/error.h"

namespace ringcomm {

const char* name(Op op) {
  switch (op) {
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kReduceScatter:
      return "reduce_scatter";
    case Op::kAllGather:
      return "all_gather";
    case Op::kBroadcast:
      return "broadcast";
    case Op::kReduce:
      return "reduce";
    case Op::kGather:
      return "gather";
    case Op::kScatter:
      return "scatter";
    case Op::kAllToAll:
      return "all_to_all";
    case Op::kBarrier:
      return "barrier";
    case Op::kSend:
      return "send";
    case Op::kRecv:
      return "recv";
    case Op::kProbe:
      return "probe";
  }
  return "?";
}

const char* name(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kAuto:
      return "auto";
    case Algorithm::kRing:
      return "ring";
    case Algorithm::kDirect:
      return "direct";
    case Algorithm::kOneshot:
      return "oneshot";
    case Algorithm::kCopyEngine:
      return "copy_engine";
    case Algorithm::kStaged:
      return "staged";
    case Algorithm::kButterfly:
      return "butterfly";
  }
  return "?";
}

void not_in_this_build(DType dtype, ReduceOp op) {
  fail(ErrorCode::kUnsupported, "reduce op ", name(op), " on ", name(dtype),
       " is not in this build; see RINGCOMM_ONLY");
}

}  // namespace ringcomm
