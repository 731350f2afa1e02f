#include "cpu/group/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace ringcomm::cpu {

namespace {

const std::uint32_t* word_of(const Flag* flag) {
  const auto* words = reinterpret_cast<const std::uint32_t*>(flag);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  return words;
#else
  return words + 1;
#endif
}

}  // namespace

void futex_wait(const Flag* flag, std::uint64_t seen, std::int64_t timeout_us) {
  const timespec limit{static_cast<time_t>(timeout_us / 1000000), static_cast<long>(timeout_us % 1000000) * 1000};
  syscall(SYS_futex, word_of(flag), FUTEX_WAIT, static_cast<std::uint32_t>(seen), &limit, nullptr, 0);
}

void futex_wake(const Flag* flag) { syscall(SYS_futex, word_of(flag), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

void yield() { sched_yield(); }

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) != 0) return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return CPU_COUNT(&set);
}

WaitPolicy WaitPolicy::for_ranks(int ranks_on_host) {
  if (ranks_on_host <= available_cores()) return {200, 64, 2000};
  return {0, 64, 500};
}

}  // namespace ringcomm::cpu
