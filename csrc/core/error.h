// The one exception of the native code. A message is one sentence with five facts: call, rank, expected, got, what to
// do.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace ringcomm {

enum class ErrorCode {
  kInvalid,      // wrong arguments; nothing was sent and the communicator stays usable
  kUnsupported,  // this build, engine or machine lacks the feature
  kTimeout,      // a wait exceeded its limit; the communicator is aborted
  kAborted,      // this or another rank aborted; the communicator is aborted
  kRankLost,     // a rank ended while others need it; the communicator is aborted
  kMismatch,     // the ranks called different things; the communicator is aborted
  kSystem,       // the operating system reported an error
};

class __attribute__((visibility("default"))) Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  // A copy with the number of the communicator that the error ends.
  Error(const Error& error, std::uint64_t group) : std::runtime_error(error), code_(error.code_), group_(group) {}
  ErrorCode code() const { return code_; }
  std::uint64_t group() const { return group_; }  // the communicator's group_number; 0: of none, or unknown

 private:
  ErrorCode code_;
  std::uint64_t group_ = 0;
};

// Whether the error ends the communicator on which it is raised.
inline bool ends_communicator(ErrorCode code) {
  return code == ErrorCode::kTimeout || code == ErrorCode::kAborted || code == ErrorCode::kRankLost ||
         code == ErrorCode::kMismatch;
}

template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <typename... Parts>
[[noreturn]] void fail(ErrorCode code, const Parts&... parts) {
  throw Error(code, concat(parts...));
}

}  // namespace ringcomm
