// Times in nanoseconds.
#pragma once

#include <time.h>

#include <cstdint>

namespace ringcomm {

inline std::int64_t nanoseconds(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

// One clock for all processes of a host.
inline std::int64_t now_ns() { return nanoseconds(CLOCK_MONOTONIC); }

}  // namespace ringcomm
