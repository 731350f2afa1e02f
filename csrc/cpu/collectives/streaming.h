// Decides whether slots are written with streaming stores, which bypass the caches. Within one cache complex ordinary
// stores are faster. Between complexes the lines of a slot travel between two caches at a fraction of the speed of
// memory, when they are written or when they are read. Threads move, and a virtual machine does not show where they
// run, so both sides measure: a writer its own writes, and a reader its reads, after which it tells the writer its
// preference. Only the speed depends on this.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm::cpu {

// Measures the speed of slots that were written through the caches, on one side.
class RateMeter {
 public:
  static constexpr std::size_t kLeastBytes = 4096;  // smaller slots stay in the caches
  static constexpr int kStreak = 4;                 // a single slow slot may be due to an interruption
  // Up to this size the caller's data is in the caches, too: a slot passes at more than 20 GB/s within a complex, at
  // 4 to 8 GB/s between two. Of larger messages, memory limits the first rate as well.
  static constexpr std::size_t kCachedMessageBytes = 1u << 20;
  static constexpr double slow_bytes_per_ns(std::size_t message_bytes) {
    return message_bytes <= kCachedMessageBytes ? 9 : 4.5;
  }

  // Records that a slot of `nbytes` that was written through the caches took `ns` to write or read.
  void record(std::size_t nbytes, std::int64_t ns, std::size_t message_bytes) {
    const bool slow = static_cast<double>(nbytes) < slow_bytes_per_ns(message_bytes) * static_cast<double>(ns);
    if (slow == wants_streaming_) {
      streak_ = 0;
    } else if (++streak_ >= (slow ? kStreak : 2)) {
      wants_streaming_ = slow;
      streak_ = 0;
    }
  }
  bool wants_streaming() const { return wants_streaming_; }

 private:
  bool wants_streaming_ = false;
  int streak_ = 0;
};

// Reading the clock takes noticeable time compared with a small slot, so only every kSampleInterval-th one is measured.
inline constexpr std::size_t kAlwaysMeasuredBytes = 32u << 10;
inline constexpr std::uint64_t kSampleInterval = 8;

constexpr bool is_measured(std::uint64_t ticket, std::size_t nbytes) {
  return nbytes >= kAlwaysMeasuredBytes || (nbytes >= RateMeter::kLeastBytes && ticket % kSampleInterval == 0);
}

// While streaming, every kProbeInterval-th slot is written through the caches, so that the readers notice when that has
// become fast.
inline constexpr std::uint64_t kProbeInterval = 64;

}  // namespace ringcomm::cpu
