// The class of ringcomm.errors for each error code; both Python modules raise these.
#pragma once

#include <string>
#include <string_view>

#include "core/call/signature.h"
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
    case ErrorCode::kRankLost:
      return "RankLostError";
    case ErrorCode::kMismatch:
      return "MismatchError";
    case ErrorCode::kSystem:
      return "EngineError";
  }
  return "RingcommError";
}

// Returns the code of an error class that ends a communicator.
inline ErrorCode error_code(std::string_view name) {
  for (const ErrorCode code : {ErrorCode::kTimeout, ErrorCode::kRankLost, ErrorCode::kMismatch, ErrorCode::kSystem})
    if (name == error_class(code)) return code;
  return ErrorCode::kAborted;
}

// Returns an error's text with the advice for a process group, which cannot shrink.
inline std::string advice_to_groups(std::string text) {
  const std::string_view shrink = kAdviceToShrink;
  const auto at = text.find(shrink);
  return at == std::string::npos ? text : text.replace(at, shrink.size(), kAdvice);
}

}  // namespace ringcomm
