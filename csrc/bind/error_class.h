// The class of ringcomm.errors for each error code; both Python modules raise these.
#pragma once

#include "core/error.h"

namespace ringcomm {

inline const char* error_class(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalid:
      return "InvalidArgumentError";
    case ErrorCode::kUnsupported:
      return "UnsupportedError";
    case ErrorCode::kTimeout:
      return "CollectiveTimeoutError";
    case ErrorCode::kAborted:
      return "AbortedError";
    case ErrorCode::kMismatch:
      return "MismatchError";
    case ErrorCode::kSystem:
      return "EngineError";
  }
  return "RingcommError";
}

}  // namespace ringcomm
