// Waiting for a flag that another rank writes: spin, then yield, then sleep on a futex, with regular checks of the
// group's abort flag and a deadline.
#pragma once

#include <chrono>
#include <cstdint>

#include "core/sync.h"

namespace ringcomm::cpu {

using Clock = std::chrono::steady_clock;

// How long a wait stays awake. With a core for every rank the peer is running and will be quick; otherwise the peer may
// need this core.
struct WaitPolicy {
  int spins;              // polls with a pause between them
  int yields;             // polls with a sched_yield between them
  std::int64_t awake_us;  // then sleep, once this long has passed

  static WaitPolicy for_ranks(int ranks_on_host);
};

// The futex is the low half of a flag.
void futex_wait(const Flag* flag, std::uint64_t seen, std::int64_t timeout_us);
void futex_wake(const Flag* flag);
void yield();
int available_cores();

// Stores the value and wakes the threads that sleep on the flag's segment.
inline void post(Flag* flag, std::uint64_t value, const Flag* sleepers) {
  store_then_look(flag, value);
  if (load_after_store(sleepers) != 0) futex_wake(flag);
}

// Waits until *flag >= target. `check` is called regularly while waiting, and throws to end the wait. `begin` becomes
// the time at which it stopped spinning, if it did: a clock costs too much for shorter waits.
template <typename Check>
void wait_flag(const Flag* flag, std::uint64_t target, Flag* sleepers, const WaitPolicy& policy,
               Clock::time_point& begin, const Check& check) {
  for (int i = 0; i < policy.spins; ++i) {
    if (load_acquire(flag) >= target) return;
    cpu_relax();
  }
  begin = Clock::now();
  for (int i = 0;; ++i) {
    for (int k = 0; k < policy.yields; ++k) {
      if (load_acquire(flag) >= target) return;
      yield();
    }
    check();
    if (Clock::now() - begin > std::chrono::microseconds(policy.awake_us)) break;
  }
  for (;;) {
    fetch_add(sleepers, 1);
    const std::uint64_t seen = load_after_store(flag);
    if (seen < target) futex_wait(flag, seen, 20000);
    fetch_add(sleepers, static_cast<std::uint64_t>(-1));
    if (load_acquire(flag) >= target) return;
    check();
  }
}

}  // namespace ringcomm::cpu
