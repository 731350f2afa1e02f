// The one exception of floors 0 to 2. A message is one sentence with five facts: call, rank, expected, got, what to do.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace ringcomm {

enum class ErrorCode {
  kInvalid,      // the caller's arguments; nothing was sent and the communicator stays usable
  kUnsupported,  // a feature that this build, engine or machine does not have
  kTimeout,      // a wait outlived its limit; the communicator is aborted
  kAborted,      // another rank (or this one) gave up; the communicator is aborted
  kMismatch,     // the ranks called different things; the communicator is aborted
  kSystem,       // the operating system refused something
};

class __attribute__((visibility("default"))) Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

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
